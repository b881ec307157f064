"""Pools in the layouts "DS" and "KV" over two and four simulated devices do what those of one device do.

`test_sharding.py` runs this file in a process of its own, because JAX counts its devices once.
"""

import dataclasses

import jax
import numpy as np
import pytest
from fakes.driver import DATA
from fakes.engines import poison
from fakes.split_models import assert_same_everywhere, qwen
from jax.sharding import Mesh

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.models import load_model
from mamba_align_jax.sharding import AXIS, Part, columns

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running

pytestmark = pytest.mark.usefixtures("one_program")
ATOL = 1e-4
# Pages for fewer sequences than there are slots, so that requests are preempted.
SIZES = dict(block_size=16, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=128)
SIZES |= dict(num_speculative_tokens=2, num_state_blocks=40, num_kv_pages=22, checked=True)
MTP = dict(speculation="mtp")
OTHER = dict(window_layout="DS", state_layout="KV")


@pytest.fixture(scope="module")
def model():
    return qwen()


def make(model, devices, **fields):
    """An engine over so many devices, with dirty pools."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,)) if devices > 1 else None
    engine = Engine(model, EngineConfig(**SIZES | fields), mesh=mesh)
    poison(engine)
    return engine


def serve(engines, vocab=64):
    """Serves the same requests on all engines, which must give the same outputs in every step."""
    rng = np.random.default_rng(0)
    shared, found = rng.integers(0, vocab, 34).tolist(), {}
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    drawn = dataclasses.replace(greedy, temperature=0.8, top_k=20, seed=3)
    for _ in range(2):
        for number, length in enumerate((3, 9, 20)):
            prompt = shared + np.random.default_rng(number).integers(0, vocab, length).tolist()
            for params in (greedy, drawn):
                for engine in engines:
                    engine.add_request(prompt, params)
        while engines[0].has_unfinished:
            first, *others = [{output.request_id: output.token_ids for output in each.step()} for each in engines]
            assert all(other == first for other in others)
            found |= first
        assert not any(engine.has_unfinished for engine in engines)
    assert len(found) == 12
    return found


def assert_same_account(engines):
    """There were hits, and all that is counted, drafts and preemptions too, is that of the first engine."""
    first, *others = (dataclasses.replace(engine.stats, state_bytes_copied=0) for engine in engines)
    assert all(other == first for other in others)
    assert first.hit_requests >= 6
    assert first.null_reads == 0
    return first


def test_engine_with_other_layouts_does_on_several_devices_what_one_device_does(model):
    """There are chunked prompts, hits, drafts of the model's head, random choices and preempted requests."""
    engines = [make(model, 1, **MTP), *(make(model, devices, **MTP, **OTHER) for devices in (2, 4))]
    serve(engines)
    stats = assert_same_account(engines)
    assert 0 < sum(stats.accepted_tokens) < sum(stats.draft_tokens)
    assert stats.preemptions > 0
    one, *split = engines
    windows, states = (np.asarray(array) for array in one.runner.device_state.pool.states[0])
    for engine, devices in zip(split, (2, 4), strict=True):
        device_state = engine.runner.device_state
        books = lambda state: (state.state, state.tables, state.pending)
        assert_same_everywhere(books(device_state), devices)
        jax.tree.map(np.testing.assert_array_equal, books(device_state), books(one.runner.device_state))
        conv, recurrent = device_state.pool.states[0]
        # Channels and heads are divided, wherever their axes are.
        assert conv.sharding.shard_shape(conv.shape)[2] * devices == conv.shape[2]
        assert recurrent.sharding.shard_shape(recurrent.shape)[2:] == (8 // devices, 8, 16)
        copies = max(devices // 2, 1)
        order = columns([Part(2, 8, copies), Part(2, 8, copies), Part(8, 16)], devices)
        np.testing.assert_allclose(np.swapaxes(conv, -2, -1), windows[..., order], atol=ATOL, rtol=0)
        np.testing.assert_allclose(np.swapaxes(recurrent, -2, -1), states, atol=ATOL, rtol=0)


@pytest.mark.deep
@pytest.mark.parametrize(
    "fields",
    [
        dict(OTHER, state_layout="VK", policy="deferred", fold_length=8),
        dict(OTHER, prefix_cache="all"),
        dict(OTHER, policy="pre_copy"),
        dict(OTHER, async_stepping=True, checked=False),
    ],
    ids=str,
)
def test_other_layouts_on_several_devices_serve_every_mode_and_policy(model, fields):
    fields = dict(prompt_lookup_min=1) | fields
    plain = dict(window_layout="SD", state_layout="VK")
    engines = [make(model, 1, **fields | plain), *(make(model, devices, **fields) for devices in (2, 4))]
    serve(engines)
    stats = assert_same_account(engines)
    assert 0 < sum(stats.accepted_tokens) < sum(stats.draft_tokens)
    assert stats.preemptions > 0


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "layouts"),
    [("kimi_linear", OTHER), ("mamba2", dict(window_layout="DS")), ("lfm2", dict(window_layout="DS"))],
)
def test_other_mixers_with_other_layouts_do_on_two_devices_what_one_device_does(name, layouts):
    model = load_model(DATA / name)
    engines = [make(model, devices, num_kv_pages=40, prompt_lookup_min=1, **layouts) for devices in (1, 2)]
    serve(engines, model.config.vocab_size)
    assert_same_account(engines)


def test_prefixes_move_between_layouts_and_numbers_of_devices(model):
    """A prefix that comes back has the same bits, whatever order its axes, heads and channels had meanwhile."""
    cases = [(1, {}), (1, OTHER), (2, OTHER), (4, {}), (4, OTHER)]
    engines = [make(model, devices, num_kv_pages=64, **MTP, **layouts) for devices, layouts in cases]
    greedy, rng = SamplingParams(max_tokens=10, ignore_eos=True), np.random.default_rng(11)
    for first in engines[2:]:
        prompt = rng.integers(0, 64, 53).tolist()
        first.generate(prompt, greedy)
        data = first.export_prefix(prompt)
        (wanted,) = first.generate(prompt, greedy)
        for other in engines:
            assert other.import_prefix(data, prompt) == 48
            assert other.export_prefix(prompt) == data
            (output,) = other.generate(prompt, greedy)
            assert (output.token_ids, output.num_cached_tokens) == (wanted.token_ids, 48)
    # The arrays lie as before, so that steps need no other program.
    for engine in engines[2:]:
        state = engine.runner.device_state
        for array, spec in zip(state.pool.states[0], engine.runner.layout.pool.states[0], strict=True):
            expected = jax.sharding.NamedSharding(engine.runner.layout.mesh, spec)
            assert array.sharding.is_equivalent_to(expected, array.ndim)
