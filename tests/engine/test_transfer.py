"""A prefix that another engine computed is what this one would have computed, and bad bytes change nothing."""

import dataclasses
import functools
import gc
import itertools
import os
import struct
import threading
import time
from pathlib import Path

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.engines import poison
from fakes.raising import Interrupt
from fakes.speller import VOCAB, Speller, next_tokens
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device import pool_entries
from mamba_align_jax.engine.device.pool_entries import ArrayForm, entry_bytes, read_entries
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.running import transfer
from mamba_align_jax.models import load_model, qwen3_5

pytestmark = pytest.mark.usefixtures("one_program")
SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64)
SIZES |= dict(num_state_blocks=12, num_kv_pages=40, checkpoint_interval=8)
STEPPING = {
    "sync": dict(checked=True),
    "async": dict(async_stepping=True, num_speculative_tokens=2, prompt_lookup_min=1),
    "all": dict(prefix_cache="all", checkpoint_interval=None, checked=True),
    "pre_copy": dict(policy="pre_copy", num_speculative_tokens=2, checked=True),
}
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
SPELLER = Speller(1)
RNG = np.random.default_rng(5)
PROMPT = RNG.integers(0, VOCAB, 45).tolist()
LIVE = 40  # the last boundary of the prompt


def make(model=SPELLER, **fields):
    engine = Engine(model, EngineConfig(**SIZES | fields))
    poison(engine)
    return engine


def filled(prompt=PROMPT, salt="", **fields):
    """An engine that has run a prompt."""
    engine = make(**fields)
    engine.generate(prompt, dataclasses.replace(GREEDY, cache_salt=salt))
    return engine


def entries(engine):
    """The bytes of everything that an engine has cached, by kind and key."""
    found = {}
    for kind, pool in (("pages", engine.cache.kv.pool), ("states", engine.cache.states.pool)):
        forms, published = engine.runner.entry_forms[kind], pool.published
        take = functools.partial(engine.runner.take_entries, kind)
        parts = read_entries(take, entry_bytes(forms), [number for _, number in published])
        rows = [row.tobytes() for part in parts for row in part]
        found |= {(kind, key): row for (key, _), row in zip(published, rows, strict=True)}
    return found


@pytest.fixture(scope="module")
def data():
    """The bundle of the prompt."""
    return filled().export_prefix(PROMPT)


@pytest.fixture(scope="module")
def target():
    """An engine that has run another prompt."""
    return filled(PROMPT[::-1])


def account(engine):
    """What must not change when bytes are refused."""
    pools = [
        (pool.published, pool.num_available, pool.num_held) for pool in (engine.cache.states.pool, engine.cache.kv.pool)
    ]
    return pools, engine.stats, engine.runner.device_state


def assert_whole(engine):
    engine.cache.check()
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == 0
    assert not engine.core.changing.is_torn


def continued(prompt, count):
    """The tokens that the speller generates after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_tokens(tokens, SPELLER.stutter)[-1])
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("stepping", STEPPING)
def test_an_imported_prefix_has_the_bits_and_gives_the_tokens_of_the_original(stepping):
    first, second = filled(**STEPPING[stepping]), make(**STEPPING[stepping])
    data = first.export_prefix(PROMPT)
    assert second.import_prefix(data) == LIVE == first.cached_prefix(PROMPT).num_tokens
    assert second.cached_prefix(PROMPT).boundaries == first.cached_prefix(PROMPT).boundaries
    assert len(second.cached_prefix(PROMPT).boundaries) > 1
    ours, theirs = entries(second), entries(first)
    assert ours
    assert all(theirs[key] == row for key, row in ours.items())
    assert second.export_prefix(PROMPT) == data
    for engine in (first, second):
        (output,) = engine.generate(PROMPT, GREEDY)
        assert (output.token_ids, output.num_cached_tokens) == (continued(PROMPT, 6), LIVE)
        assert_whole(engine)


def test_what_is_published_but_not_read_is_exported():
    """Under asynchronous stepping a prompt's states are published when their step is dispatched."""
    first = make(async_stepping=True)
    first.add_request(PROMPT, GREEDY)
    while first.cached_prefix(PROMPT).num_tokens < LIVE:
        first.step()
    assert first.unread_steps
    second = make(async_stepping=True)
    assert second.import_prefix(first.export_prefix(PROMPT)) == LIVE
    assert second.generate(PROMPT, GREEDY)[0].token_ids == continued(PROMPT, 6)


def test_states_can_be_imported_while_requests_run():
    data = filled().export_prefix(PROMPT)
    engine = make(checked=True)
    other = PROMPT[::-1]
    number, found = engine.add_request(other, GREEDY), []
    engine.step()
    assert engine.import_prefix(data) == LIVE
    while engine.has_unfinished:
        found += engine.step()
    assert [(each.request_id, each.token_ids) for each in found] == [(number, continued(other, 6))]
    assert engine.generate(PROMPT, GREEDY)[0].num_cached_tokens == LIVE
    assert_whole(engine)


@pytest.mark.deep
def test_drafts_of_the_head_are_those_of_the_original(tmp_path):
    from fakes.draft_head_weights import write_small_with_head

    path = write_small_with_head(Path(__file__).parents[1] / "data" / "qwen3_5_text", tmp_path)
    config = EngineConfig(**SIZES | dict(num_speculative_tokens=2, speculation="mtp", num_state_blocks=20))
    engines = [Engine(load_model(path), config) for _ in range(2)]
    prompt = [token % engines[0].model_config.vocab_size for token in PROMPT]
    engines[0].generate(prompt, GREEDY)
    assert engines[1].import_prefix(engines[0].export_prefix(prompt)) == LIVE
    ours, theirs = entries(engines[1]), entries(engines[0])
    assert all(theirs[key] == row for key, row in ours.items())
    params = dataclasses.replace(GREEDY, max_tokens=12)
    before = [engine.stats for engine in engines]
    wanted, got = (engine.generate(prompt, params)[0] for engine in engines)
    assert (got.token_ids, got.num_cached_tokens) == (wanted.token_ids, LIVE)
    drafted = [
        [a - b for a, b in zip(engine.stats.accepted_tokens, old.accepted_tokens, strict=True)]
        for engine, old in zip(engines, before, strict=True)
    ]
    assert drafted[0] == drafted[1]
    assert engines[1].stats.draft_tokens


def test_a_salted_prefix_stays_salted():
    salt = "a very secret salt"
    data = filled(salt=salt).export_prefix(PROMPT, cache_salt=salt)
    assert salt.encode() not in data
    engine = make()
    for wrong in ({}, {"cache_salt": "other"}):
        with pytest.raises(ValueError, match="data must be a bundle of a prefix of tokens under this cache_salt"):
            engine.import_prefix(data, PROMPT, **wrong)
    with pytest.raises(ValueError, match="under this cache_salt"):
        engine.import_prefix(data, PROMPT[1:], cache_salt=salt)
    assert not engine.cache.kv.pool.keys
    assert engine.import_prefix(data, PROMPT, cache_salt=salt) == LIVE
    assert engine.cached_prefix(PROMPT).num_tokens == engine.cached_prefix(PROMPT, "other").num_tokens == 0
    assert engine.cached_prefix(PROMPT, salt).num_tokens == LIVE
    assert filled(salt=salt).export_prefix(PROMPT) == make().export_prefix(PROMPT)


def test_nothing_cached_is_exported_as_nothing():
    data = make().export_prefix(PROMPT)
    engine = make()
    assert engine.import_prefix(data) == 0
    assert engine.import_prefix(data, []) == 0
    assert not engine.cache.kv.pool.keys


def test_a_state_after_the_last_token_is_exported():
    engine = make()
    assert engine.import_prefix(filled().export_prefix(PROMPT[:LIVE])) == LIVE


@pytest.mark.parametrize(
    ("sizes", "wanted"), [({"num_kv_pages": 8}, 24), ({"num_kv_pages": 2}, 0), ({"num_state_blocks": 3}, 40)]
)
def test_small_pools_take_the_longest_beginning_that_fits(sizes, wanted):
    """With two blocks, the deepest states are taken."""
    engine = make(**sizes)
    assert engine.import_prefix(filled().export_prefix(PROMPT)) == wanted == engine.cached_prefix(PROMPT).num_tokens
    assert_whole(engine)


def test_an_import_evicts_what_was_used_least_recently():
    others = [RNG.integers(0, VOCAB, 45).tolist() for _ in range(4)]
    engine, data = make(num_kv_pages=30), filled().export_prefix(PROMPT)
    for prompt in others:
        engine.generate(prompt, GREEDY)
    before = engine.stats.evicted_kv_pages
    assert engine.import_prefix(data) == LIVE
    assert engine.stats.evicted_kv_pages > before
    assert engine.cached_prefix(others[0]).num_tokens == 0
    assert engine.cached_prefix(others[-1]).num_tokens > 0
    assert_whole(engine)


def test_what_is_there_already_is_not_written_again(monkeypatch):
    first = filled()
    data, before = first.export_prefix(PROMPT), account(first)
    assert first.import_prefix(data) == LIVE
    assert account(first)[2] is before[2]
    # Half of it is there.
    second, written = make(), []
    second.import_prefix(filled(PROMPT[:21]).export_prefix(PROMPT[:21]))
    put = StepRunner.put_entries
    monkeypatch.setattr(StepRunner, "put_entries", lambda *a: written.append(len(a[2])) or put(*a))
    assert second.import_prefix(data) == LIVE
    assert written == [(40 - 16) // 4, 3]
    assert second.generate(PROMPT, GREEDY)[0].token_ids == continued(PROMPT, 6)


@given(st.integers(0, 2**30), st.integers(1, 255), st.booleans())
@settings(max_examples=depth.examples(150, 3000), deadline=None)
def test_a_flipped_or_cut_byte_is_refused_and_changes_nothing(data, target, place, flip, cut):
    before, place = account(target), place % len(data)
    bad = data[:place] if cut else data[:place] + bytes([data[place] ^ flip]) + data[place + 1 :]
    with pytest.raises(ValueError, match=r"^data must be "):
        target.import_prefix(bad)
    assert account(target)[:2] == before[:2]
    assert account(target)[2] is before[2]
    assert not target.core.changing.is_torn


def test_other_bytes_are_refused_by_name(data, target):
    before = account(target)
    version = data[:8] + struct.pack("<I", 2) + data[12:]
    for bad, text in (
        (b"", "a bundle of at least 112 bytes, got 0"),
        (b"PK" + data[2:], "a bundle that an engine has written"),
        (version, "a bundle of version 1, got 2"),
        (data + b"\0", f"a bundle of {len(data)} bytes, as its header says, got {len(data) + 1}"),
        (data[:-1] + bytes([data[-1] ^ 1]), "a bundle whose checksum is"),
        ("text", "bytes or bytearray"),
        (None, "bytes or bytearray"),
        (memoryview(data)[::2], "contiguous"),
    ):
        with pytest.raises(ValueError, match=rf"^data must be .*{text}"):
            target.import_prefix(bad)
    assert account(target)[:2] == before[:2]


@pytest.mark.parametrize(
    "other",
    [
        dict(block_size=16, checkpoint_interval=16),
        dict(kv_page_size=8),
        dict(num_speculative_tokens=1),
        dict(state_dtype="bfloat16"),
    ],
    ids=str,
)
def test_another_configuration_is_refused(data, other):
    engine = make(**other)
    before = account(engine)
    with pytest.raises(ValueError, match=r"^data must be a bundle of this model, these weights and these sizes"):
        engine.import_prefix(data)
    assert account(engine)[:2] == before[:2]


def test_prefixes_move_between_layouts():
    """A bundle is in the default layout. One key head of 8 dims by 8 has the same shape in both layouts."""
    config = qwen3_5.Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, dtype="float32",
        layer_types=(qwen3_5.LINEAR, qwen3_5.FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        max_position_embeddings=256,
    )  # fmt: skip
    model = qwen3_5.Model(config, nnx.Rngs(0))
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96, num_state_blocks=20, num_kv_pages=40)
    sizes |= dict(block_size=16, num_speculative_tokens=2, checked=True)
    layouts = {}, dict(window_layout="DS", state_layout="KV"), dict(window_layout="DS"), dict(state_layout="KV")
    engines = [Engine(model, EngineConfig(**sizes, **layout)) for layout in layouts]
    for engine in engines:
        poison(engine)
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    for turn, first in enumerate(engines[:2]):
        prompt = [(7 * i + turn) % 64 for i in range(53)]
        first.generate(prompt, greedy)
        data = first.export_prefix(prompt)
        (wanted,) = first.generate(prompt, greedy)
        for other in engines:
            assert other.import_prefix(data, prompt) == 48
            assert other.export_prefix(prompt) == data
            (output,) = other.generate(prompt, greedy)
            assert (output.token_ids, output.num_cached_tokens) == (wanted.token_ids, 48)
        assert not any(engine.stats.null_reads for engine in engines)


def test_other_weights_and_other_fields_of_a_configuration_are_refused():
    path = Path(__file__).parents[1] / "data" / "mamba"
    config = EngineConfig(max_num_seqs=1, max_model_len=64, num_state_blocks=8, num_kv_pages=8)
    model = load_model(path)
    data = Engine(model, config).export_prefix([1])
    assert Engine(load_model(path), config).import_prefix(data) == 0
    other = load_model(path)
    other.config = dataclasses.replace(other.config, rms_norm_eps=1e-3)
    changed = load_model(path)
    weight = changed.layers[1].mixer.D
    weight.set_value(weight[...].at[-1].multiply(1.0001))
    for each in (other, changed):
        with pytest.raises(ValueError, match="these weights"):
            Engine(each, config).import_prefix(data)
    # After a reset the weights are read again.
    engine = Engine(load_model(path), config)
    assert engine.import_prefix(data) == 0
    engine.runner.params = [leaf + 1 for leaf in engine.runner.params]
    engine.reset_prefix_cache()
    with pytest.raises(ValueError, match="these weights"):
        engine.import_prefix(data)


def test_mode_none_refuses(data, tmp_path):
    engine = make(prefix_cache="none", checkpoint_interval=None)
    for call in (
        lambda: engine.export_prefix(PROMPT),
        lambda: engine.import_prefix(data),
        lambda: engine.save_cache(tmp_path),
        lambda: engine.load_cache(tmp_path),
    ):
        with pytest.raises(
            ValueError, match="prefix_cache must be 'align' or 'all' to move what is cached, got 'none'"
        ):
            call()


@jax.jit
def slowed(state):
    """The same state after a while."""
    late = jax.lax.fori_loop(0, 2000, lambda _, x: x @ x, jnp.eye(100))[0, 1]
    return jax.tree.map(lambda array: array + late.astype(array.dtype), state)


def test_a_buffer_may_be_used_again_after_an_import(monkeypatch):
    """XLA may read eight pages in place where they begin here, and the device is late."""
    data = filled().export_prefix(PROMPT[:32])
    room = np.zeros(len(data) + 128, np.uint8)
    keys_end = 80 + 32 * sum(struct.unpack("<QQ", data[48:64]))
    begin = -(room.ctypes.data + keys_end) % 64
    buffer, put, engine = room[begin : begin + len(data)], StepRunner.put_entries, make()
    buffer[:] = np.frombuffer(data, np.uint8)

    def late(runner, *arguments):
        runner.device_state = slowed(runner.device_state)
        put(runner, *arguments)

    # What it takes is compiled first.
    assert engine.import_prefix(data) == 32
    jax.block_until_ready(slowed(engine.runner.device_state))
    engine.reset_prefix_cache()
    monkeypatch.setattr(StepRunner, "put_entries", late)
    assert engine.import_prefix(memoryview(buffer)) == 32
    buffer[:] = 0
    assert engine.export_prefix(PROMPT) == data


def test_a_failure_while_the_pools_are_written_loses_no_request(monkeypatch):
    data = filled().export_prefix(PROMPT)
    for turn in range(2):
        engine = make(checked=True)
        other, third = PROMPT[::-1], [7] * 20
        engine.generate(third, GREEDY)
        engine.add_request(other, GREEDY)
        engine.step()
        turns, put = itertools.count(), StepRunner.put_entries

        def fail(*arguments, turns=turns, turn=turn, put=put):
            if next(turns) == turn:
                raise MemoryError("no room on the device")
            return put(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(StepRunner, "put_entries", fail)
            with pytest.raises(MemoryError):
                engine.import_prefix(data)
        assert engine.cached_prefix(PROMPT).num_tokens == 0
        assert engine.cached_prefix(third).num_tokens == 16
        found = []
        while engine.has_unfinished:
            found += engine.step()
        assert [each.token_ids for each in found] == [continued(other, 6)]
        assert engine.import_prefix(data) == LIVE
        assert_whole(engine)


@pytest.mark.parametrize("call", ["import", "export", "load", "save"])
def test_an_interrupt_at_any_line_loses_nothing(data, tmp_path, call):
    """One request is running meanwhile, and an engine that has been interrupted can be used as before."""
    other, stride = PROMPT[::-1], 11 if depth.is_full() else 37
    engine = make()
    engine.import_prefix(data)
    engine.save_cache(tmp_path)
    calls = {
        "import": lambda: engine.import_prefix(data),
        "export": lambda: engine.export_prefix(PROMPT),
        "load": lambda: engine.load_cache(tmp_path),
        "save": lambda: engine.save_cache(tmp_path),
    }
    for turn in itertools.count(0, stride):
        engine.reset_prefix_cache()
        if call in ("export", "save"):
            engine.import_prefix(data)
        number, found = engine.add_request(other, GREEDY), []
        engine.step()
        with Interrupt(turn) as interrupt:
            calls[call]()
        assert not engine.core.turns._lock._is_owned()
        while engine.has_unfinished:
            found += engine.step()
        assert [(each.request_id, each.token_ids) for each in found] == [(number, continued(other, 6))]
        (output,) = engine.generate(PROMPT, GREEDY)
        assert output.token_ids == continued(PROMPT, 6)
        assert_whole(engine)
        # A file is there as a whole, or as it was before.
        assert [path.name for path in tmp_path.iterdir()] == [transfer.FILE_NAME]
        assert transfer.read_file(tmp_path).page_keys
        if interrupt.place is None:
            assert output.num_cached_tokens == LIVE
            break
    assert turn > 100


def test_an_interrupt_at_any_line_of_a_new_file_leaves_none_open(tmp_path):
    """The lines are taken one after the other, with those at which contexts are entered and left."""
    path, opened = tmp_path / "whole", set(os.listdir("/proc/self/fd"))
    path.write_bytes(b"before")
    for turn in itertools.count():
        with Interrupt(turn, transfer.__file__) as interrupt, transfer.new_file(path) as file:
            file.write(b"after")
        gc.collect()
        assert set(os.listdir("/proc/self/fd")) == opened
        assert [each.name for each in tmp_path.iterdir()] == ["whole"]
        if interrupt.place is None:
            break
        assert path.read_bytes() == b"before"
    assert turn > 5
    assert path.read_bytes() == b"after"


def test_writing_entries_copies_no_pool():
    """The pools are donated, and what a write needs besides them is small."""
    array = jnp.zeros((3, 1000, 4, 5))
    form = (ArrayForm((3, 4, 5), "float32"),)
    entries = np.zeros((2, form[0].num_bytes), np.uint8)
    compiled = pool_entries._put.lower((array,), np.zeros(2, np.int32), entries, form).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == array.nbytes
    assert memory.temp_size_in_bytes < array.nbytes / 4


def test_any_thread_may_move_prefixes():
    """Two engines exchange what they have while both run requests."""
    engines, errors = [make(num_kv_pages=80), make(num_kv_pages=80)], []

    def work(here, there, seed):
        rng = np.random.default_rng(seed)
        try:
            for _ in range(depth.examples(4, 20)):
                prompt = PROMPT[: rng.integers(9, 45)]
                (output,) = here.generate(prompt, GREEDY)
                assert output.token_ids == continued(prompt, 6)
                there.import_prefix(here.export_prefix(prompt))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(engines[n % 2], engines[1 - n % 2], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for engine in engines:
        assert_whole(engine)


def test_a_saved_cache_is_restored_whole_and_in_order(tmp_path):
    engine, prompts = make(), [RNG.integers(0, VOCAB, 30).tolist() for _ in range(3)]
    for salt, prompt in zip(("", "a", ""), prompts, strict=True):
        engine.generate(prompt, dataclasses.replace(GREEDY, cache_salt=salt))
    # One request is still running.
    engine.add_request(PROMPT, GREEDY)
    engine.step()
    engine.step()
    wanted = entries(engine)
    engine.save_cache(tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == [transfer.FILE_NAME]
    assert (tmp_path / "new" / transfer.FILE_NAME).stat().st_mode & 0o777 == 0o600
    second = make()
    assert second.load_cache(str(tmp_path / "new")) == len(engine.cache.states.pool.keys)
    assert entries(second) == wanted
    for mine, theirs in (
        (engine.cache.kv.pool, second.cache.kv.pool),
        (engine.cache.states.pool, second.cache.states.pool),
    ):
        assert [key for key, _ in mine.published] == [key for key, _ in theirs.published]
    assert_whole(second)
    for salt, prompt in zip(("", "a", "", ""), [*prompts, PROMPT], strict=True):
        # The second engine doesn't know what the first has evicted.
        mine, theirs = (dataclasses.replace(each.cached_prefix(prompt, salt), miss=None) for each in (engine, second))
        assert mine == theirs
    hits = []
    for salt, prompt in reversed([*zip(("", "a", ""), prompts, strict=True)]):
        (output,) = second.generate(prompt, dataclasses.replace(GREEDY, cache_salt=salt))
        assert output.token_ids == continued(prompt, 6)
        hits.append(output.num_cached_tokens)
    assert hits[:2] == [24, 24]
    # A smaller engine keeps what was used last, and what it keeps can be used.
    small = make(num_kv_pages=20)
    assert 0 < small.load_cache(tmp_path / "new") < len(engine.cache.states.pool.keys)
    assert_whole(small)
    assert small.cached_prefix(PROMPT).num_tokens > 0
    assert small.generate(PROMPT, GREEDY)[0].token_ids == continued(PROMPT, 6)


def test_a_saved_prefix_whose_pages_have_spares_loses_its_last_page_first(tmp_path):
    """Two requests compute the same pages. The first one ends, and its pages would be evicted, were there no spares."""
    engine, prompt = make(num_kv_pages=60, max_num_batched_tokens=64), PROMPT[:17]
    engine.add_request(prompt, dataclasses.replace(GREEDY, max_tokens=1))
    engine.add_request([*prompt, 5, 6, 7], dataclasses.replace(GREEDY, max_tokens=30))
    for _ in range(12):
        engine.step()
    assert engine.has_unfinished
    engine.save_cache(tmp_path)
    for num_kv_pages in range(4, 9):
        small = make(num_kv_pages=num_kv_pages, max_model_len=12)
        small.load_cache(tmp_path)
        longest = small.cached_prefix([*prompt, 5, 6, 7])
        assert longest.num_paged_tokens == min(4 * (num_kv_pages - 1), 20), "of pages that are kept, none is lost"
        assert longest.num_tokens == longest.num_paged_tokens // 8 * 8 > 0, "the states of these pages can be used"


def test_a_cache_that_cannot_be_saved_leaves_the_last_one(tmp_path, monkeypatch):
    engine = filled()
    engine.save_cache(tmp_path)
    before = (tmp_path / transfer.FILE_NAME).read_bytes()
    engine.generate(PROMPT[::-1], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(transfer.os, "fsync", lambda number: (_ for _ in ()).throw(OSError("no space left")))
        with pytest.raises(OSError, match="no space left"):
            engine.save_cache(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [transfer.FILE_NAME]
    assert (tmp_path / transfer.FILE_NAME).read_bytes() == before
    engine.save_cache(tmp_path)
    assert (tmp_path / transfer.FILE_NAME).read_bytes() != before


def test_what_a_killed_process_left_is_removed_later(tmp_path):
    """A file that another process may still be writing stays."""
    paths = [tmp_path / f".cache.{name}" for name in ("old", "new")]
    for path in paths:
        path.write_bytes(b"half")
    os.utime(paths[0], (time.time() - 7200,) * 2)
    with transfer.new_file(tmp_path / "cache") as file:
        file.write(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".cache.new", "cache"]


def test_bad_files_are_refused(data, tmp_path):
    engine = make()
    with pytest.raises(FileNotFoundError):
        engine.load_cache(tmp_path)
    for bad in (b"", data):
        (tmp_path / transfer.FILE_NAME).write_bytes(bad)
        with pytest.raises(ValueError, match=f"{transfer.FILE_NAME} must be a bundle"):
            engine.load_cache(tmp_path)
    filled().save_cache(tmp_path)
    with pytest.raises(ValueError, match="data must be a bundle of kind 'prefix', got 'cache'"):
        engine.import_prefix((tmp_path / transfer.FILE_NAME).read_bytes())
    assert not engine.cache.kv.pool.keys


def test_moving_prefixes_compiles_no_other_step(data):
    """A step that comes after an import runs the program of the step before it."""
    from mamba_align_jax.engine.device.program import run_step

    engine = filled()
    programs = run_step._cache_size()
    engine.reset_prefix_cache()
    engine.import_prefix(data)
    engine.generate(PROMPT, GREEDY)
    assert run_step._cache_size() == programs
    jax.block_until_ready(engine.runner.device_state)
