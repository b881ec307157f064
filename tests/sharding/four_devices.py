"""Four simulated devices do what one does.

`test_sharding.py` runs this file in a process of its own, because JAX counts its devices once.
"""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.driver import DATA
from fakes.engines import launch_ahead, poison
from fakes.split_models import assert_same_everywhere, qwen, randomised
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig, ConvState, GroupSpec, RecurrentState
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.ring import DeltaRuleRing
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.cli import commands as cli
from mamba_align_jax.engine.device.identity import weights_digest
from mamba_align_jax.engine.device.program import run_step
from mamba_align_jax.kv import KVPages
from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.exchange import Exchange, Partial
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.moe import SharedExpertMoE
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.step_inputs import step_inputs
from mamba_align_jax.models import load_model, mamba, nemotron_h, qwen3_5
from mamba_align_jax.models.tensor_parallel import exchange_by, shard_model, share
from mamba_align_jax.models.weights import save_weights
from mamba_align_jax.sharding import AXIS, Part, columns, pool_partition, pool_sharding
from pallas_kernels import (
    Mailboxes,
    QuantizedWeight,
    Rows,
    causal_conv1d_update,
    gated_delta_rule_update,
    quantize,
)
from pallas_kernels.quantized import concatenate, dequantized

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than running

pytestmark = pytest.mark.usefixtures("one_program")
ATOL = 1e-4
EVERY = P()
# Engines of one set of sizes share their programs.
SIZES = dict(block_size=16, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=128)
SIZES |= dict(num_speculative_tokens=2, num_state_blocks=40, num_kv_pages=64)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), (AXIS,))


@pytest.fixture(scope="module")
def model():
    return qwen()


def run(engines, each_step=lambda: None):
    """Serves the same requests on all engines, which must give the same outputs in every step; returns them by id."""
    rng, found = np.random.default_rng(0), {}
    shared = rng.integers(0, 64, 50).tolist()
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    drawn = (
        dataclasses.replace(greedy, temperature=0.8, top_k=20, seed=3),
        dataclasses.replace(greedy, temperature=1.2, top_p=0.9, seed=4, num_speculative_tokens=1),
        dataclasses.replace(greedy, temperature=1.0, seed=5),
    )
    for length, params in zip((3, 9, 20), drawn, strict=True):
        prompt = shared + rng.integers(0, 64, length).tolist()
        assert len({engine.add_request(prompt, p) for p in (params, greedy) for engine in engines}) == 2
    while engines[0].has_unfinished:
        first, *others = [{output.request_id: output.token_ids for output in engine.step()} for engine in engines]
        assert all(other == first for other in others)
        found |= first
        each_step()
    assert not any(engine.has_unfinished for engine in engines)
    assert len(found) == 6
    return found


def test_engine_on_four_devices_does_what_one_device_does(model, mesh, monkeypatch):
    """There are chunked prompts, hits, drafts of the model's head, and sampling.

    Steps on one device are launched ahead like those on four, so that both plan the same steps.
    """
    before = jax.tree.map(np.asarray, nnx.state(model))
    programs = run_step._cache_size()
    for stepping in (False, True):
        config = EngineConfig(**SIZES, speculation="mtp", async_stepping=stepping)
        four = Engine(model, config, mesh=mesh)
        assert (four.runner._thread is not None) == stepping
        assert four.steps_in_flight == 2 * stepping
        with monkeypatch.context() as patched:
            launch_ahead(patched)
            one = Engine(model, config)
        poison(one)
        poison(four)

        def compare(one=one.runner, four=four.runner):
            """Compares counts, tables, drafts and all tokens of every slot."""
            books = lambda state: (state.state, state.tables, state.pending)
            assert_same_everywhere(books(four.device_state))
            jax.tree.map(np.testing.assert_array_equal, books(four.device_state), books(one.device_state))

        # Asynchronous steps overlap only while the test does not read their results.
        run([one, four], (lambda: None) if stepping else compare)
        compare()
        counts = [dataclasses.replace(engine.stats, state_bytes_copied=0) for engine in (one, four)]
        assert counts[0] == counts[1]
        assert counts[0].hit_requests >= 3
        assert counts[0].null_reads == 0
        assert all(0 < a < d for a, d in zip(counts[0].accepted_tokens, counts[0].draft_tokens, strict=True))
        # States, keys and values agree. Those of the draft head's layer depend on the last hidden states.
        repeated = 2 * 2 * 8  # channels of queries and keys, in windows of five rows
        assert four.align.bytes_per_block * 4 == one.align.bytes_per_block + 4 * 5 * repeated
        assert four.sizes.kv_page_bytes * 4 == one.sizes.kv_page_bytes * 2
        (conv, recurrent), got = (engine.runner.device_state.pool.states[0] for engine in (one, four))
        assert got[1].sharding.shard_shape(got[1].shape)[2] == 2
        key, value = Part(2, 8, 2), Part(8, 16)
        np.testing.assert_allclose(got[0], conv[..., columns([key, key, value], 4)], atol=ATOL, rtol=0)
        np.testing.assert_allclose(got[1], recurrent, atol=ATOL, rtol=0)
        heads = columns([Part(2, 1, 2)], 4)
        pages = [jax.tree.leaves(engine.runner.device_state.kv) for engine in (one, four)]
        for first, got in zip(*pages, strict=True):
            assert got.shape[0] == 2
            # Several rows write guesses to page 0.
            np.testing.assert_allclose(got[:, 1:], first[:, 1:, :, heads], atol=ATOL, rtol=0)
    assert run_step._cache_size() == programs + 2
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(model)))


def test_prompt_lookup_and_states_that_move_on_four_devices_change_no_token(model, mesh):
    before = jax.tree.map(np.asarray, nnx.state(model))
    config = EngineConfig(**SIZES, prompt_lookup_min=1, policy="pre_copy", async_stepping=True, checked=True)
    lookup = Engine(model, config, mesh=mesh)
    poison(lookup)
    assert run([lookup]) == run([Engine(model, EngineConfig(**SIZES, speculation="mtp"))])
    assert lookup.stats.state_bytes_copied > 0
    assert sum(lookup.stats.accepted_tokens) > 0
    state = lookup.runner.device_state
    assert_same_everywhere((state.state, state.tables, state.pending))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(model)))


@pytest.mark.parametrize(("name", "shares"), [(None, [1, 2, 2]), ("mamba2", [2, 1, 2, 2])], ids=["gdn", "mamba2"])
def test_deferred_states_on_four_devices_are_those_of_one_device(model, mesh, name, shares):
    """Rings are split by heads: two key heads or groups are repeated, as those of the windows are."""
    model = load_model(DATA / name) if name else model
    config = EngineConfig(**SIZES, prompt_lookup_min=1, policy="deferred", fold_length=8, checked=True)
    one, four = (Engine(model, config, mesh=where) for where in (None, mesh))
    for engine in (one, four):
        poison(engine)
    run([one, four])
    assert one.stats == four.stats
    assert (one.stats.null_reads, one.stats.state_bytes_copied) == (0, 0)
    assert sum(one.stats.draft_tokens if name else one.stats.accepted_tokens) > 0
    assert one.stats.hit_requests > 0
    ring = four.runner.device_state.pool.rings[0]
    assert [x.sharding.shard_shape(x.shape)[2] for x in ring] == shares
    states = [engine.runner.device_state.state for engine in (one, four)]
    assert_same_everywhere(states[1])
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_blocks_are_copied_on_four_devices(model, mesh):
    runner, rng = Engine(model, EngineConfig(**SIZES), mesh=mesh).runner, np.random.default_rng(0)
    state = runner.device_state
    drawn = lambda array: jax.device_put(rng.normal(size=array.shape).astype(array.dtype), array.sharding)
    runner.device_state = dataclasses.replace(state, pool=jax.tree.map(drawn, state.pool))
    before = jax.tree.map(lambda array: np.array(array), runner.device_state.pool.states)
    runner.run_command(runner.do_copy_states, [(3, 5), (3, 7), (2, 9)])
    after = runner.device_state.pool.states
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        old[:, [5, 7, 9]] = old[:, [3, 3, 2]]
        np.testing.assert_array_equal(new, old)


def test_prefixes_move_between_numbers_of_devices(model, mesh):
    """Keys and windows of repeated heads are in another order on each mesh. A prefix that comes back has the same bits."""
    config, rng = EngineConfig(**SIZES, speculation="mtp"), np.random.default_rng(11)
    engines = [Engine(model, config, mesh=where) for where in (None, mesh)]
    for engine in engines:
        poison(engine)
    greedy, outputs = SamplingParams(max_tokens=10, ignore_eos=True), {}
    for first in engines:
        prompt = rng.integers(0, 64, 53).tolist()
        (wanted,) = first.generate(prompt, greedy)
        data = first.export_prefix(prompt)
        assert wanted.num_cached_tokens == 0
        outputs[tuple(prompt)] = first.generate(prompt, greedy)[0]
        (other,) = (engine for engine in engines if engine is not first)
        assert other.import_prefix(data, prompt) == first.cached_prefix(prompt).num_tokens == 48
        assert other.export_prefix(prompt) == data
    for prompt, output in outputs.items():
        for engine in engines:
            (again,) = engine.generate(list(prompt), greedy)
            assert (again.token_ids, again.num_cached_tokens) == (output.token_ids, 48)
    # The arrays lie as before, so that steps need no other program.
    state = engines[-1].runner.device_state
    for array, spec in (
        (state.pool.states[0][0], P(None, None, None, AXIS)),
        (state.kv.keys, P(None, None, None, AXIS)),
    ):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim)


@pytest.mark.deep
def test_server_splits_its_model_over_as_many_devices_as_it_is_told(monkeypatch):
    engines, directory = [], DATA / "mamba2"
    monkeypatch.setattr(cli.serving, "run", lambda options, load: engines.append(load(EngineConfig(**SIZES))) or 0)
    assert cli.main(["serve", "--model", str(directory), "--tensor-parallel-size", "2"]) == 0
    (split,) = engines
    assert split.runner.layout.mesh.devices.tolist() == jax.devices()[:2]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    whole = Engine.from_pretrained(directory, EngineConfig(**SIZES))
    assert split.generate([1, 2, 3], params)[0].token_ids == whole.generate([1, 2, 3], params)[0].token_ids


@pytest.mark.parametrize("name", [None, *(pytest.param(n, marks=pytest.mark.deep) for n in ("mamba2", "kimi_linear"))])
def test_digest_of_weights_is_that_of_one_device(model, mesh, name):
    digest = lambda params, layout=None: weights_digest(jax.tree.leaves(params), layout)
    whole = load_model(DATA / name) if name else model
    # JAX's own meshes have arrays whose sharding is a part of their type.
    placed, layout = shard_model(whole, Mesh(mesh.devices[:2], (AXIS,)) if name else jax.make_mesh((4,), (AXIS,)))
    assert any(layout.ordered_params)
    assert digest(nnx.state(placed), layout) == digest(nnx.state(whole))


def quantised(model, block):
    """The model with quantised weights in its products, in small blocks; those of delta nets keep parts as they are."""
    graph, state = nnx.split(model)
    products = {path for path, module in nnx.iter_modules(model) if isinstance(module, Linear) and path[0] == "layers"}

    def narrow(place, param):
        if place[:-1] not in products or place[-1] != "weight":
            return param
        sizes = dict(nnx.iter_modules(model))[place[:-1]].parts
        parts = np.split(np.asarray(param[...]), np.cumsum(sizes)[:-1])
        each = [quantize(part, block) if len(part) >= 16 else part for part in parts]
        return param.replace(jax.tree.map(jnp.asarray, concatenate(each)))

    flat = [(place, narrow(place, param)) for place, param in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def with_arrays(model):
    """The model with the arrays that its quantised weights mean."""
    graph, state = nnx.split(model)
    is_param = lambda leaf: isinstance(leaf, nnx.Variable)
    value = lambda param: dequantized(param.get_value())
    return nnx.merge(graph, jax.tree.map(lambda param: param.replace(value(param)), state, is_leaf=is_param))


@pytest.mark.parametrize("block", [(16, 24), (1, 64), (512, 512)], ids=["blocks", "channels", "tensor"])
def test_every_device_has_the_scales_of_its_values(model, mesh, block):
    """A cut inside a block repeats its scale, and the digest of the weights counts it once."""
    narrow = quantised(model, block)
    placed, layout = shard_model(narrow, mesh)
    plain, _ = shard_model(with_arrays(narrow), mesh)
    pairs = zip(*(nnx.to_flat_state(nnx.state(each)) for each in (placed, plain)), strict=True)
    found = 0
    for (place, ours), (_, theirs) in pairs:
        ours, theirs = ours.get_value(), theirs.get_value()
        found += isinstance(ours, QuantizedWeight)
        for number in range(4):
            own = jax.tree.map(lambda leaf, number=number: leaf.addressable_shards[number].data, ours)
            wanted = theirs.addressable_shards[number].data
            np.testing.assert_array_equal(np.asarray(dequantized(own)), np.asarray(wanted), err_msg=str(place))
    assert found >= 6
    assert share(placed).layers[0].mlp.down_proj.weight.shape == share(plain).layers[0].mlp.down_proj.weight.shape
    digest = lambda params, layout=None: weights_digest(jax.tree.leaves(params), layout)
    assert digest(nnx.state(placed), layout) == digest(nnx.state(narrow))


@pytest.mark.deep
def test_engine_with_quantised_weights_on_four_devices_does_what_one_device_does(model, mesh):
    narrow, config = quantised(model, (16, 24)), EngineConfig(**SIZES)
    prompts, params = [[1, 2, 3], [5] * 40], SamplingParams(max_tokens=6, ignore_eos=True)
    four, one = (Engine(narrow, config, mesh=each).generate(prompts, params) for each in (mesh, None))
    assert [each.token_ids for each in four] == [each.token_ids for each in one]


def test_a_split_model_is_not_saved(model, mesh, tmp_path):
    """A device's columns are not in the order of the files."""
    placed, _ = shard_model(model, mesh)
    with pytest.raises(ValueError, match=r"save_weights: model must not be split over devices, but "):
        save_weights(placed, qwen3_5, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_changed_logits_and_log_probabilities_are_those_of_one_device(model, mesh):
    """Every device counts all tokens. A request that changes nothing runs beside the one that does."""
    sizes = dict(block_size=16, kv_page_size=8, max_num_seqs=2, max_num_batched_tokens=48, max_model_len=96)
    prompt = np.random.default_rng(3).integers(0, 64, 30).tolist()
    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    changed = dataclasses.replace(
        greedy, repetition_penalty=1.3, frequency_penalty=0.7, logit_bias={5: 3.5}, min_p=0.05, logprobs=3,
        prompt_logprobs=2,
    )  # fmt: skip
    for params in (changed, dataclasses.replace(changed, temperature=1.1, seed=7)):
        found = []
        for where in (None, mesh):
            engine = Engine(model, EngineConfig(**sizes, num_state_blocks=20, num_kv_pages=40), mesh=where)
            ids = [engine.add_request(prompt, each) for each in (params, greedy)]
            outputs = {}
            while engine.has_unfinished:
                outputs |= {output.request_id: output for output in engine.step()}
            found.append([outputs[number] for number in ids])
        assert_same_everywhere(engine.runner.sampler)
        assert engine.runner.sampler.seen.sharding.shard_shape(engine.runner.sampler.seen.shape)[1] == 64
        for one, four in zip(*found, strict=True):
            assert one.token_ids == four.token_ids
        (one, plain), (four, _) = found
        assert one.token_ids != plain.token_ids
        for first, second in zip(
            one.logprobs + one.prompt_logprobs[1:], four.logprobs + four.prompt_logprobs[1:], strict=True
        ):
            assert first.token_id == second.token_id
            np.testing.assert_allclose(first.logprob, second.logprob, atol=ATOL, rtol=0)


@pytest.mark.parametrize("name", ["mamba2", pytest.param("kimi_linear", marks=pytest.mark.deep)])
def test_arrays_without_elements_are_not_used(mesh, name):
    """A model without attention has no keys, and latent attention no values. XLA in JAX 0.11 crashes over empty arrays."""
    config = EngineConfig(max_num_seqs=2, max_model_len=64, num_state_blocks=8, num_kv_pages=8)
    engine = Engine(load_model(DATA / name), config, mesh=Mesh(mesh.devices[:2], (AXIS,)))
    assert any(0 in array.shape for array in jax.tree.leaves(engine.runner.device_state.kv))
    step = engine.runner.trace(engine.runner.buckets[0]).jaxpr.jaxpr
    (split,) = (eqn.params["jaxpr"] for eqn in step.eqns if eqn.primitive.name == "shard_map")
    used = {id(variable) for eqn in split.eqns for variable in eqn.invars} | set(map(id, split.outvars))
    assert not any(0 in variable.aval.shape and id(variable) in used for variable in split.invars)


@pytest.mark.parametrize(
    "name", ["zamba2", *(pytest.param(n, marks=pytest.mark.deep) for n in ("bamba", "lfm2", "lfm2_moe"))]
)
def test_shared_blocks_and_short_convolutions_are_split(mesh, name):
    tokens = np.load(DATA / name / "reference.npz")["tokens"][0].tolist()
    config = EngineConfig(max_num_seqs=2, max_model_len=96, num_state_blocks=16, num_kv_pages=16)
    engine = Engine(load_model(DATA / name), config, mesh=Mesh(mesh.devices[:2], (AXIS,)))
    (output,) = engine.generate(tokens[:37], SamplingParams(max_tokens=32, ignore_eos=True))
    assert list(output.token_ids) == tokens[37:]


def test_draft_head_is_placed_as_the_layers_are(model, mesh):
    placed, _ = shard_model(model, mesh)
    lies = lambda module: jax.tree.map(lambda x: x.sharding.spec, nnx.state(module))
    assert lies(placed.mtp.layers[0]) == lies(placed.layers[1])
    assert share(placed).mtp.layers[0].mlp.down_proj.weight.shape == (32, 12)
    assert placed.mtp.fc.weight[...].sharding.spec == EVERY


def test_most_likely_token_of_a_split_vocabulary_is_the_first_of_several(model, mesh):
    """Tokens 21 and 37 of different devices always tie, and all tokens tie after hidden states of 0."""
    _, state = nnx.split(model)
    weight = state.lm_head.weight
    weight.set_value(weight[...].at[37].set(weight[21]).at[21].multiply(3).at[37].multiply(3))
    tied = nnx.merge(nnx.graphdef(model), state)
    placed, layout = shard_model(tied, mesh)
    graph, params = nnx.split(placed)
    hidden = np.random.default_rng(0).normal(size=(200, 32)).astype(np.float32)
    hidden[7] = 0
    hidden = jnp.asarray(hidden)
    specs = jax.tree.unflatten(jax.tree.structure(params), layout.params), EVERY
    run = layout.run(lambda params, hidden: nnx.merge(graph, params).most_likely(hidden), specs, EVERY)
    found, wanted = np.asarray(jax.jit(run)(params, hidden)), np.argmax(tied.logits(hidden), axis=1)
    np.testing.assert_array_equal(found, wanted)

    def by_exchange(params, hidden, boxes):
        whole = nnx.merge(graph, params)
        exchange_by(whole, Exchange(boxes, jnp.int32(1)))
        return whole.most_likely(hidden)

    boxes = Mailboxes.create(mesh, AXIS, 10_000)
    run = layout.run(by_exchange, (*specs, boxes.partition()), EVERY)
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(params, hidden, boxes)), wanted)
    np.testing.assert_array_equal(tied.most_likely(hidden), wanted)
    assert found[7] == 0
    assert 21 in found
    assert 37 not in found


def test_exchange_adds_up_and_gathers_what_four_devices_have(mesh):
    rng, boxes = np.random.default_rng(0), Mailboxes.create(mesh, AXIS, 1000)
    sums = rng.normal(size=(4, 2, 5, 8)).astype(np.float32)

    def run(boxes, own):
        exchange = Exchange(boxes, jnp.int32(1))
        return exchange.total(Partial(own[0], AXIS)), exchange.gather(own[0, 0]), Partial(own[0], AXIS).total()

    specs = boxes.partition(), P(AXIS)
    split = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=EVERY, check_vma=False)
    total, gathered, by_xla = jax.jit(split)(boxes, sums)
    np.testing.assert_allclose(total, sums.sum((0, 1)), atol=1e-5)
    np.testing.assert_allclose(by_xla, sums.sum((0, 1)), atol=1e-5)
    np.testing.assert_array_equal(gathered, sums[:, 0])


def test_parts_of_a_product_with_split_inputs_are_cut(mesh):
    linear = Linear(8, (3, 1, 4), "float32", nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    wanted = linear(jnp.asarray(x))
    linear.axis = AXIS
    graph, params = nnx.split(linear)
    run = lambda params, x: nnx.merge(graph, params)(x)
    inputs = P(None, AXIS)
    split = jax.shard_map(run, mesh=mesh, in_specs=(inputs, inputs), out_specs=EVERY, check_vma=False)
    got = jax.jit(split)(params, x)
    chex.assert_trees_all_equal_shapes(got, wanted)
    chex.assert_trees_all_close(got, wanted, atol=1e-6)


def test_even_split_of_a_window_is_wrong(model, mesh, monkeypatch):
    """An even split of [q | k | v] would give a device channels of other heads. The parts prevent that."""
    monkeypatch.setattr(
        "mamba_align_jax.layers.split.columns", lambda parts, _: np.arange(sum(p[0] * p[1] for p in parts))
    )
    narrow = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    placed, _ = shard_model(model, narrow)
    weight = placed.layers[0].linear_attn.in_proj_qkvzba.weight[...]
    monkeypatch.undo()
    right = shard_model(model, narrow)[0].layers[0].linear_attn.in_proj_qkvzba.weight[...]
    assert not np.array_equal(weight, right)


def zoo(latent, rngs):
    """A model with every kind of mixer and of feed-forward layer."""
    hidden = 32
    config = mamba.Config(
        vocab_size=66 if latent else 64,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=8,
        time_step_rank=4,
        dtype="float32",
    )
    dtype = "float32"
    norm = lambda size: RMSNorm(size, 1e-6)
    if latent:
        mixers = [
            KimiDeltaAttention(hidden, 4, 8, 4, 1e-6, dtype, rngs, f_rank=8),
            MultiHeadLatentAttention(hidden, 4, 8, 4, 8, 16, dtype, rngs, q_lora_rank=8, rope_theta=1e4, gated=True),
        ]
    else:
        mixers = [
            GatedDeltaNet(hidden, 2, 4, 8, 16, 4, 1e-6, dtype, rngs, allow_neg_eigval=True),
            SharedExpertMoE(hidden, 4, 2, 8, 16, dtype, rngs),
            Mamba1Mixer(hidden, 48, 6, 4, 4, dtype, rngs, norm=norm, proj_bias=True),
            Attention(hidden, 4, 2, 8, dtype, rngs, rotary_dim=8, norm=norm, norm_whole=True, bias=True),
            Mamba2Mixer(hidden, 8, 8, 6, 2, 4, dtype, rngs, in_bias=True, out_bias=True, multipliers=(1, 2, 3, 2, 1)),
            nemotron_h.MLP(hidden, 24, True, dtype, rngs),
        ]
    return mamba.Backbone(config, mixers, rngs)


def prompt(align, model, tokens):
    """A function of a model's parameters that returns the logits and the states of one prompt."""
    tables = BlockTables(blocks=jnp.ones((len(align.groups), 1, align.num_columns), jnp.int32))
    batch = StepBatch.from_host(align, 1, [0], [0, len(tokens)], [-1])

    def run(graph, params, tokens):
        model = nnx.merge(graph, params)
        _, indices = begin_step(align, AlignState.create(align), batch, tables)
        step = step_inputs(
            batch, indices, num_decode_rows=0, page_tables=jnp.ones((1, 1), jnp.int32),
            num_tokens=tokens.shape[0], page_size=64, num_pages=2,
        )  # fmt: skip
        hidden, pool, _ = model(tokens, step, StatePool.create(align, 2), KVPages.create(model.kv_spec(), 2, 64))
        return model.logits(hidden), pool

    return functools.partial(run, nnx.split(model)[0])


def rounded(params, seed):
    """The parameters, each changed at random by at most the distance to the next float32."""
    rng = np.random.default_rng(seed)
    change = lambda x: x * (1 + 2.0**-23 * rng.uniform(-1, 1, x.shape)).astype(x.dtype)
    return jax.tree.map(change, params)


@pytest.mark.parametrize("latent", [pytest.param(False, marks=pytest.mark.deep), True])
def test_every_kind_of_layer_does_what_one_device_does(mesh, latent):
    model, tokens = (
        randomised(functools.partial(zoo, latent)),
        np.random.default_rng(0).integers(0, 64, 50).astype(np.int32),
    )
    placed, layout = shard_model(model, mesh)
    spec_of = lambda model: AlignConfig(
        groups=model.state_groups(), block_size=64, max_num_seqs=1, max_model_len=64, mode="none"
    )
    alone = jax.jit(prompt(spec_of(model), model, tokens))
    one = alone(nnx.state(model), tokens)
    rounding = max(
        np.abs(np.asarray(alone(rounded(nnx.state(model), seed), tokens)[0]) - np.asarray(one[0])).max()
        for seed in range(4)
    )
    assert rounding < 1e-3
    params = nnx.state(placed)
    specs = jax.tree.unflatten(jax.tree.structure(params), layout.params), EVERY
    run = layout.run(prompt(spec_of(share(placed)), placed, tokens), specs, (EVERY, layout.pool))
    four = jax.jit(run)(params, tokens)
    assert_same_everywhere(four[0])
    # Devices add in another order, which is as if the weights were rounded.
    np.testing.assert_allclose(four[0], one[0], atol=rounding, rtol=0)
    for wanted, got in zip(one[1].states, four[1].states, strict=True):
        np.testing.assert_allclose(np.asarray(got[1])[:, 1], np.asarray(wanted[1])[:, 1], atol=ATOL, rtol=ATOL)


def test_ops_run_in_another_shard_map(mesh):
    """Another stack's `shard_map` needs the order of columns, a partition spec for each array, and `check_vma=False`."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    key, value = Part(4, 8), Part(8, 16)
    qkv, weight, a, b = draw(6, 192), draw(4, 192), draw(6, 8), draw(6, 8)
    A_log, dt_bias = draw(8), draw(8)
    groups = (GroupSpec("gdn", 2, (ConvState(4, 192, "float32"), RecurrentState((8, 16, 8)))),)
    align = AlignConfig(groups=groups, block_size=16, num_speculative_tokens=2, max_model_len=64)
    loc, read, write = jnp.array([0, 3, 6]), jnp.array([1, 2]), jnp.array([[3, 4, 5], [6, 7, 8]])

    def step(qkv, weight, a, b, A_log, dt_bias, pool):
        conv, recurrent = pool.states[0]
        first = jnp.zeros(2, jnp.int32)
        rows = Rows(query_start_loc=loc, layer=1, read=read, window_read=read, window_row=first, write=write)
        qkv, conv = causal_conv1d_update(qkv, conv, weight, None, rows)
        out, recurrent = gated_delta_rule_update(qkv, a, b, A_log, dt_bias, recurrent, rows)
        return out, pool.with_group(0, (conv, recurrent))

    order = columns([key, key, value], 4)
    where = pool_sharding(groups, mesh)
    one = StatePool(states=tuple(tuple(draw(*x.shape) for x in g) for g in StatePool.create(align, 9).states))
    empty = StatePool.create(align, 9, where)
    assert [x.sharding for x in empty.states[0]] == list(where.states[0])
    conv, recurrent = one.states[0]
    pool = jax.device_put(one.with_group(0, (conv[..., order], recurrent)), where)
    partition = jax.tree.map(lambda sharding: sharding.spec, where)
    channels, heads, last = P(None, AXIS), P(None, AXIS), P(AXIS)
    sharded = lambda **checks: jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(channels, channels, heads, heads, last, last, partition),
        out_specs=(P(None, AXIS), partition), **checks,
    ))  # fmt: skip
    arguments = qkv[:, order], weight[:, order], a, b, A_log, dt_bias, pool
    # docs/sharding.md says so, and need not any more once JAX takes it.
    with pytest.raises((TypeError, ValueError), match=r"check_vma|carry"):
        sharded().trace(*arguments)
    out, pool = sharded(check_vma=False)(*arguments)
    wanted, one = jax.jit(step)(qkv, weight, a, b, A_log, dt_bias, one)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    np.testing.assert_array_equal(pool.states[0][0], np.asarray(one.states[0][0])[..., order])
    np.testing.assert_allclose(pool.states[0][1], one.states[0][1], atol=1e-6)


def test_rings_of_another_step_are_split_like_its_states(mesh):
    ring = DeltaRuleRing(4, 8, 8, 16, "float32")
    groups = (GroupSpec("gdn", 2, (ConvState(4, 192, "float32"), RecurrentState((8, 16, 8))), ring),)
    align = AlignConfig(groups=groups, block_size=16, max_model_len=64, policy="deferred", fold_length=8)
    where = pool_sharding(groups, mesh, deferred=True)
    pool = StatePool.create(align, 9, where)
    assert [x.sharding for x in pool.rings[0]] == list(where.rings[0])
    assert [x.addressable_shards[0].data.shape[2] for x in pool.rings[0]] == [1, 2, 2]
    partition = pool_partition(groups, deferred=True)
    same = jax.jit(jax.shard_map(lambda pool: pool, mesh=mesh, in_specs=(partition,), out_specs=partition))(pool)
    assert jax.tree.structure(same) == jax.tree.structure(pool)
    with pytest.raises(ValueError, match="sharding must have rings under policy 'deferred'"):
        StatePool.create(align, 9, pool_sharding(groups, mesh))
    taken = StatePool.from_arrays(align, pool.states, where)
    assert [x.sharding for x in taken.rings[0]] == list(where.rings[0])
    with pytest.raises(
        ValueError, match="sharding must be given under policy 'deferred' for states on several devices"
    ):
        StatePool.from_arrays(align, pool.states)
    other = jax.devices()[1]
    moved = jax.tree.map(lambda x: jax.device_put(np.asarray(x), other), pool.states)
    assert {x.device for x in StatePool.from_arrays(align, moved).rings[0]} == {other}
    few = (dataclasses.replace(groups[0], ring=DeltaRuleRing(2, 8, 8, 16, "float32")),)
    with pytest.raises(ValueError, match="'gdn': heads of a ring must be a multiple of 4 devices"):
        pool_sharding(few, mesh, deferred=True)


def test_states_of_one_head_are_split_by_channels_in_either_layout(mesh):
    for shape, layout, axes in (((1, 8), "KV", 3), ((1, 8), "VK", 4), ((1, 8, 4), "VK", 4), ((1, 8, 4), "KV", 5)):
        where = pool_sharding((GroupSpec("m", 1, (RecurrentState(shape, layout=layout),)),), mesh)
        assert where.states[0][0].spec == P(*[None] * (axes - 1), AXIS)


def test_sizes_that_do_not_divide_are_refused_by_name(model, mesh):
    with pytest.raises(ValueError, match=r"axis 'tensor', got \('data',\)"):
        shard_model(model, Mesh(np.array(jax.devices()), ("data",)))
    with pytest.raises(ValueError, match=r"layers\.0\.linear_attn: .* multiple of 3 devices, got 8"):
        shard_model(model, Mesh(np.array(jax.devices()[:3]), (AXIS,)))
    with pytest.raises(ValueError, match=r"'m': heads and channels must be a multiple of 4 devices"):
        pool_sharding((GroupSpec("m", 1, (RecurrentState((6, 4, 4)),)),), mesh)

    class Other(nnx.Module):
        kind = "other"

        def states(self, conv_dtype, state_dtype):
            return (RecurrentState((4, 4, 4), state_dtype),)

    model.layers[0].linear_attn, kept = Other(), model.layers[0].linear_attn
    try:
        with pytest.raises(
            ValueError, match=r"must have a method split \(layers\.mixer\.SplitMixer\), got Other of kind 'other'"
        ):
            shard_model(model, mesh)
    finally:
        model.layers[0].linear_attn = kept
