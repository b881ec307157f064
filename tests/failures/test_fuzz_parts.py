"""What builds an engine of one's own refuses values of wrong types and ranges, and then nothing has changed."""

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.odd_values import GROUP, QUIET, SMALL, VALUES, assert_clear, contents
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import AlignConfig
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.checked import StepChecker
from mamba_align_jax.align.corrections import Corrections
from mamba_align_jax.align.interior import prefill_checkpoints
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import Additions, AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables, TableUpdates
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.checkpoints import Checkpoints, request_checkpoints, requested_offsets
from mamba_align_jax.cache.hashing import HashChain
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.split import next_chunk_end
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.kv import KVPages, KVSpec
from mamba_align_jax.metadata.rows import split_rows
from mamba_align_jax.metadata.step_inputs import step_inputs

SPEC = AlignConfig((GROUP,), 8, 2, 2, 64)
KV = KVSpec(1, 2, 4, 4, "float32")
TOKENS = list(range(8))


def pool():
    return StatePool.create(SPEC, 9)


def block():
    return [np.zeros(array[:, 0].shape, array.dtype) for array in pool().states[0]]


def begun():
    """A step of two rows, and where they read and write."""
    batch = StepBatch.from_host(SPEC, 2, [0, 1], [0, 3, 7], [2, -1])
    return batch, begin_step(SPEC, AlignState.create(SPEC), batch, BlockTables.create(SPEC))[1]


# What returns arrays, each with arguments that it takes.
MAKERS = {
    "StepBatch": (
        StepBatch.from_host,
        dict(align=SPEC, bucket=4, idx_mapping=[0, 1], query_start_loc=[0, 1, 4], num_drafts=[0, 2]),
    ),
    "TableUpdates": (TableUpdates.from_host, dict(align=SPEC, bucket=4, entries=[(0, 0, 0, 3)])),
    "Additions": (Additions.from_host, dict(align=SPEC, bucket=4, slots=[0, 1], num_computed_tokens=[0, 8])),
    "Corrections": (Corrections.from_host, dict(align=SPEC, bucket=4, slots=[0, 1], num_computed_tokens=[0, 8])),
    "BlockTables": (BlockTables.create, dict(align=SPEC)),
    "AlignState": (AlignState.create, dict(align=SPEC)),
    "StatePool.create": (StatePool.create, dict(align=SPEC, num_blocks=9, sharding=None)),
    "StatePool.from_arrays": (lambda **given: StatePool.from_arrays(**given), dict(align=SPEC, states=None)),
    "StatePool.read_block": (lambda **given: pool().read_block(**given), dict(group=0, block=1)),
    "StatePool.write_block": (lambda **given: pool().write_block(**given), dict(group=0, block=1, states=None)),
    "StatePool.with_group": (lambda **given: pool().with_group(**given), dict(group=0, states=None)),
    "StepChecker": (StepChecker, dict(align=SPEC, num_blocks=9)),
    "KVSpec": (KVSpec, dict(num_layers=1, num_heads=2, key_dim=4, value_dim=4, dtype="float32")),
    "KVSpec.bytes_per_page": (KV.bytes_per_page, dict(page_size=4)),
    "KVPages": (KVPages.create, dict(spec=KV, num_pages=4, page_size=4)),
    "prefill_checkpoints": (
        prefill_checkpoints,
        dict(num_computed_tokens=3, num_tokens=20, block_size=8, block_row=[1, 2, 3]),
    ),
    "Checkpoints": (Checkpoints, dict(offsets=(8,), interval=8)),
    "request_checkpoints": (
        request_checkpoints,
        dict(prompt=9, block_size=8, requested=(8,), junction=0, interval=None),
    ),
    "requested_offsets": (requested_offsets, dict(wanted=(8,), prompt=9, granularity=8)),
    "split_rows": (
        lambda **given: jax.eval_shape(lambda: split_rows(*begun(), **given)),
        dict(num_decode_rows=1, num_decode_tokens=3),
    ),
    "step_inputs": (
        lambda **given: jax.eval_shape(lambda: step_inputs(*begun(), page_tables=jnp.ones((2, 8), jnp.int32), **given)),
        dict(num_decode_rows=1, num_decode_tokens=3, num_tokens=12, page_size=8, num_pages=9),
    ),
    "next_chunk_end": (next_chunk_end, dict(start=0, proposed=8, prompt=20, block_size=8, stops=(8,))),
}
# Sizes of arrays, whose memory is the caller's to judge.
SIZES = ("bucket", "num_decode_tokens", "num_blocks", "num_pages", "page_size", "key_dim", "num_tokens", "block_size")


def is_large(value):
    return isinstance(value, int | np.integer) and value > SMALL


def good_arguments(name):
    _, good = MAKERS[name]
    states = {"StatePool.from_arrays": lambda: pool().states, "StatePool.write_block": block}
    states["StatePool.with_group"] = lambda: pool().states[0]
    return good | ({"states": states[name]()} if name in states else {})


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=depth.examples(25, 250), **QUIET)
@given(data=st.data())
def test_makers_of_arrays_refuse_what_they_can_not_take(name, data):
    good = good_arguments(name)
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(good)), VALUES, min_size=1, max_size=2))
    if any(is_large(changed.get(key)) for key in SIZES):
        return
    try:
        MAKERS[name][0](**good | changed)
    except ValueError as error:
        assert_clear(error)


@pytest.mark.parametrize("name", MAKERS)
def test_makers_of_arrays_take_arrays_of_numpy(name):
    """The arguments of the fuzz are right ones, also as NumPy has them."""
    make, good = MAKERS[name][0], good_arguments(name)
    numpy = {
        key: np.int64(value)
        if type(value) is int
        else np.array(value)
        if type(value) is list and key != "states"
        else value
        for key, value in good.items()
    }
    make(**good)
    made = make(**numpy)
    if name == "StepBatch":
        assert made.idx_mapping.dtype == jnp.int32
        assert made.idx_mapping.tolist() == [0, 1, -1, -1]
    if name == "TableUpdates":
        assert made.block.tolist() == [3, -1, -1, -1]


def new_cache():
    """A cache in which request "a" runs one step of 8 tokens."""
    cache = HybridCache(StateBlockManager(9, 8, 2), KVPageManager(12, 4))
    cache.allocate("a", 0, 0, 8)
    return cache


STEP = dict(request="a", min_computed=8, max_computed=8, num_tokens=1, num_drafts=0)
# Methods of caches, each with what it is called on and with arguments that it takes.
METHODS = {
    "allocate": ("", STEP | dict(hit=None, keep=None)),
    "dispatched": ("", dict(request="a", tokens=TOKENS)),
    "commit": ("", dict(request="a", tokens=TOKENS, computed=8)),
    "free": ("", dict(request="a")),
    "forget": ("", dict(request="a")),
    "lookup": ("", dict(tokens=TOKENS, salt=b"", chain=None)),
    "chunk_end": ("", dict(start=0, budget=8, max_num_batched_tokens=8, prompt=20, stops=())),
    "checkpoints": ("", dict(prompt=20, requested=(), junction=0)),
    "requested_offsets": ("", dict(wanted=(8,), prompt=20)),
    "states.begin": ("states", STEP),
    "states.fits": ("states", STEP | dict(hit=None)),
    "states.allocate": ("states", STEP | dict(hit=None, keep=None)),
    "states.publish": ("states", dict(request="a", tokens=TOKENS)),
    "states.commit": ("states", dict(request="a", tokens=TOKENS, computed=8)),
    "states.release": ("states", dict(request="a")),
    "states.free": ("states", dict(request="a")),
    "states.forget": ("states", dict(request="a")),
    "states.columns": ("states", dict(request="a")),
    "states.lookup": ("states", dict(tokens=TOKENS, salt=b"", limit=8, chain=None)),
    "kv.holds": ("kv", dict(request="a", num_tokens=8)),
    "kv.pages_for": ("kv", dict(num_tokens=8)),
    "kv.fits": ("kv", dict(request="a", num_tokens=12, hit=())),
    "kv.allocate": ("kv", dict(request="a", num_tokens=12, hit=(), chain=None)),
    "kv.publish": ("kv", dict(request="a", tokens=TOKENS, end=8)),
    "kv.lookup": ("kv", dict(tokens=TOKENS, chain=HashChain(4))),
    "kv.free": ("kv", dict(request="a")),
    "kv.pool.fits": ("kv.pool", dict(count=1, hits=(1,))),
    "kv.pool.allocate": ("kv.pool", dict(count=1)),
    "kv.pool.hold": ("kv.pool", dict(block=1)),
    "kv.pool.release": ("kv.pool", dict(blocks=[1])),
    "kv.pool.publish": ("kv.pool", dict(block=1, key=b"a")),
    "kv.pool.unpublish": ("kv.pool", dict(key=b"a", evicted=False)),
    "kv.pool.find": ("kv.pool", dict(key=b"a")),
    "kv.pool.key_of": ("kv.pool", dict(block=1)),
    "kv.pool.was_evicted": ("kv.pool", dict(key=b"a")),
}


def method(cache, name):
    for part in name.split("."):
        cache = getattr(cache, part)
    return cache


@pytest.mark.parametrize("name", METHODS)
@settings(max_examples=depth.examples(20, 150), **QUIET)
@given(data=st.data())
def test_methods_of_caches_refuse_what_they_can_not_take(name, data):
    cache, (_, good) = new_cache(), METHODS[name]
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(good)), VALUES, min_size=1, max_size=2))
    before = contents((cache.states, cache.kv))
    try:
        method(cache, name)(**good | changed)
    except ValueError as error:
        assert_clear(error)
        assert contents((cache.states, cache.kv)) == before, f"{name} has changed something"
    if not name.startswith("kv.pool"):
        cache.states.check()
        cache.kv.check()


@pytest.mark.parametrize("name", METHODS)
def test_names_of_requests_are_hashable(name):
    """The arguments of the fuzz are right ones, and only a name that a dict can't have is refused."""
    place, good = METHODS[name]
    cache = new_cache()
    if name in ("states.release", "kv.pool.fits"):
        cache.dispatched("a", TOKENS)
    method(cache, name)(**good)
    if "request" in good:
        with pytest.raises(ValueError, match=r"request must be a hashable name, got \['a'\]"):
            method(new_cache(), name)(**good | {"request": ["a"]})
        with pytest.raises(ValueError, match="request must be a hashable name"):
            method(new_cache(), name)(**good | {"request": ("a", {})})
    assert not place or name.startswith(place)


@pytest.mark.parametrize("call", ["dispatched", "commit"])
@pytest.mark.parametrize("wrong", [None, 1.5, "a", 2**70, [1]])
@pytest.mark.parametrize("place", range(8))
def test_tokens_that_can_not_be_hashed_change_nothing(call, wrong, place):
    cache = new_cache()
    tokens = [wrong if index == place else 1 for index in range(8)]
    before = contents((cache.states, cache.kv))
    with pytest.raises(ValueError, match="tokens must be whole numbers"):
        cache.dispatched("a", tokens) if call == "dispatched" else cache.commit("a", tokens, 8)
    assert contents((cache.states, cache.kv)) == before
    cache.check()


def test_blocks_of_a_pool_are_whole_numbers():
    """True and 1.0 are equal to 1, but as block ids they would come out of the pool again."""
    blocks = BlockPool(4)
    assert blocks.allocate(1) == [1]
    for wrong in (True, 1.0, np.int64(1)):
        with pytest.raises(ValueError, match="must be held"):
            blocks.release([wrong])
        with pytest.raises(ValueError, match="must be held or cached"):
            blocks.hold(wrong)
        with pytest.raises(ValueError, match="must be held or cached"):
            blocks.hold_all([1, wrong])
        with pytest.raises(ValueError, match="must be held"):
            blocks.publish(wrong, b"key")
        assert blocks.keys_of([wrong, 1]) == [None, None]
    blocks.check({1: 1})
