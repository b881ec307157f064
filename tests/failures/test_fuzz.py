"""Values of wrong types, ranges, shapes and dtypes get a clear error before anything changes, or right behaviour."""

import math

import depth
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.odd_values import GROUP, NUMBERS, OTHERS, QUIET, SMALL, VALUES, assert_clear, contents
from fakes.speller import next_tokens
from fakes.spelling_engine import SPELLER, assert_nothing_is_held
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.every_op import OPS, arguments, on_device

from mamba_align_jax import AlignConfig, ConvState, Engine, EngineConfig, GroupSpec, RecurrentState, SamplingParams
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.cache.hashing import HashChain, HashMemo
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import Hit, StateBlockManager
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from pallas_kernels import UnsupportedError

pytestmark = pytest.mark.usefixtures("one_program")
ALIGN = dict(groups=(GROUP,), block_size=8, num_speculative_tokens=2, max_num_seqs=2, max_model_len=64, mode="align")
# The constructors, each with arguments that it takes.
MAKERS = {
    "SamplingParams": (SamplingParams, dict.fromkeys(SamplingParams.__dataclass_fields__)),
    "EngineConfig": (EngineConfig, dict.fromkeys(EngineConfig.__dataclass_fields__)),
    "ConvState": (ConvState, dict(width=4, channels=8, dtype="float32", layout="SD")),
    "RecurrentState": (RecurrentState, dict(shape=(1, 2, 3), dtype="float32", layout="VK")),
    "GroupSpec": (GroupSpec, dict(name="a", num_layers=1, states=(ConvState(4, 8),))),
    "AlignConfig": (AlignConfig, ALIGN | dict(policy="copy_free", checked=False)),
    "BlockPool": (BlockPool, dict(num_blocks=4)),
    "HashChain": (HashChain, dict(block_size=4, salt=b"", memo=None)),
    "HashMemo": (HashMemo, dict(groups=4)),
    "KVPageManager": (KVPageManager, dict(num_pages=4, page_size=4)),
    "StateBlockManager": (
        StateBlockManager,
        dict(num_blocks=9, block_size=8, num_speculative_tokens=2, mode="align", steps_in_flight=1),
    ),
    "PromptLookupDrafter": (PromptLookupDrafter, dict(longest=3, shortest=1)),
}


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=depth.examples(25, 300), **QUIET)
@given(data=st.data())
def test_constructors_refuse_what_they_can_not_take(name, data):
    """What is accepted is plain, hashable where it is frozen, and within the limits of the device."""
    make, good = MAKERS[name]
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(good)), VALUES, min_size=1, max_size=3))
    given = {key: value for key, value in good.items() if value is not None} | changed
    # A pool's blocks are listed.
    if any(isinstance(given.get(key), int | np.integer) and given[key] > SMALL for key in ("num_blocks", "num_pages")):
        return
    try:
        made = make(**given)
    except ValueError as error:
        assert_clear(error, *good, "blocks")
        return
    if name in ("SamplingParams", "EngineConfig", "ConvState", "RecurrentState", "GroupSpec", "AlignConfig"):
        assert hash(made) == hash(make(**given)) or name == "AlignConfig"
        assert made == make(**given)
        for key in changed:
            kept = getattr(made, key)
            assert not isinstance(kept, np.generic | np.ndarray)
            assert type(kept) is not float or math.isfinite(kept)


@pytest.fixture(scope="module")
def engine():
    sizes = dict(block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=64)
    sizes |= dict(num_state_blocks=12, num_kv_pages=18, prompt_lookup_min=1, num_speculative_tokens=2)
    return Engine(SPELLER, EngineConfig(**sizes, max_waiting=6))


PROMPTS = st.one_of(VALUES, st.lists(st.integers(0, 60), min_size=1, max_size=20))
FIELDS = st.dictionaries(st.sampled_from(sorted(SamplingParams.__dataclass_fields__)), VALUES, max_size=2)
# The names to abort: none, or one.
ABORTS = st.lists(st.one_of(NUMBERS, OTHERS), max_size=1)


# Everything is drawn before the engine is called. Hypothesis may end an example where it draws, and the requests that were
# added by then would stay for the next one.
@settings(max_examples=depth.examples(60, 1000), **QUIET)
@given(calls=st.lists(st.tuples(PROMPTS, FIELDS, ABORTS), min_size=1, max_size=3))
def test_requests_are_refused_or_end_well(engine, calls):
    """A request that is accepted never fails later, and its neighbours' tokens are right."""
    good = SamplingParams(max_tokens=6, ignore_eos=True)
    neighbour = engine.add_request([1, 2, 3], good)
    accepted = {}
    for prompt, fields, aborts in calls:
        try:
            params = SamplingParams(**{"max_tokens": 5} | fields)
            accepted[engine.add_request(prompt, params)] = params
        except ValueError as error:
            assert_clear(error)
        for name in aborts:
            try:
                engine.abort(name)
            except ValueError as error:
                assert_clear(error, "request_id")
    outputs = {}
    for _ in range(300):
        if not engine.has_unfinished:
            break
        outputs |= {output.request_id: output for output in engine.step()}
    assert not engine.has_unfinished
    assert all(output.error is None for output in outputs.values())
    if neighbour in outputs:
        tokens = outputs[neighbour].token_ids
        assert list(tokens) == next_tokens([1, 2, 3, *tokens[:-1]], SPELLER.stutter, SPELLER.adds)[2:]
        assert len(tokens) == 6
    for number in accepted.keys() & outputs.keys():
        assert outputs[number].finish_reason in ("length", "stop")
    assert_nothing_is_held(engine)


@settings(max_examples=depth.examples(40, 300), **QUIET)
@given(prompts=st.one_of(VALUES, st.lists(VALUES, max_size=3)), params=st.one_of(st.none(), VALUES))
def test_generate_refuses_or_answers(engine, prompts, params):
    before = engine.stats
    params = SamplingParams(max_tokens=2) if params is None else params
    try:
        assert all(output.finish_reason == "length" for output in engine.generate(prompts, params))
    except ValueError as error:
        assert_clear(error)
        assert engine.stats == before, "something has changed"
    assert_nothing_is_held(engine)


@settings(max_examples=depth.examples(60, 600), **QUIET)
@given(data=st.data())
def test_caches_refuse_what_is_no_step(data):
    """Steps with any counts, hits that are stale, results that can't be: nothing changes if a call raises."""
    states, kv = StateBlockManager(9, 8, 2), KVPageManager(12, 4)
    cache = HybridCache(states, kv)
    tokens, hits = [data.draw(st.integers(0, 2)) for _ in range(30)], [cache.lookup([0] * 20)]
    count = st.one_of(st.integers(-2, 40), NUMBERS)
    for _ in range(data.draw(st.integers(1, 12))):
        name, request = data.draw(st.sampled_from(["allocate", "dispatched", "commit", "free", "lookup"])), "ab"
        request = data.draw(st.sampled_from("ab"))
        before = contents((states, kv))
        try:
            if name == "lookup":
                hits.append(cache.lookup(tokens[: data.draw(st.integers(0, 30))]))
            elif name == "allocate":
                hit = data.draw(st.sampled_from([None, *hits]))
                low, span, size, drafts = (data.draw(count) for _ in range(4))
                high = low + span if type(low) is type(span) is int else low
                cache.allocate(request, low, high, size, drafts, hit=hit)
            elif name == "dispatched":
                cache.dispatched(request, data.draw(st.sampled_from([None, tokens, tokens[:8], tokens[:3]])))
            elif name == "commit":
                cache.commit(request, tokens, data.draw(count))
            else:
                cache.free(request)
        except ValueError as error:
            assert_clear(error)
            assert contents((states, kv)) == before, f"{name} has changed something"
        cache.check()
    for request in "ab":
        cache.free(request)
        cache.forget(request)
    cache.check()
    assert states.pool.num_held == kv.pool.num_held == 0


def test_stale_hits_are_refused():
    manager, tokens = StateBlockManager(4, 4), list(range(8))
    manager.allocate("a", 0, 0, 4)
    manager.publish("a", tokens[:4])
    manager.commit("a", tokens[:4])
    manager.free("a")
    hit = manager.lookup(tokens)
    manager.reset()
    with pytest.raises(ValueError, match="hit must be what lookup returns now"):
        manager.allocate("b", 4, 4, 4, hit=hit)
    with pytest.raises(ValueError, match="hit must be what lookup returns now"):
        manager.allocate("b", 4, 4, 4, hit=Hit(4, ((0, 3),)))
    manager.check()


SHAPES = st.lists(st.integers(0, 3), max_size=6)
DTYPES = st.sampled_from(["float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8", "bool", "complex64"])


@settings(max_examples=depth.examples(60, 800), **QUIET)
@given(data=st.data())
def test_ops_refuse_what_breaks_their_contracts(data):
    """Arrays of any shape and dtype, of JAX and of NumPy. The ops are traced and not run."""
    op = OPS[data.draw(st.sampled_from(sorted(OPS)))]
    given = on_device(arguments(op))
    for key in data.draw(st.lists(st.sampled_from(sorted(given)), min_size=1, max_size=2)):
        if data.draw(st.booleans()):
            given[key] = data.draw(VALUES)
        else:
            array = np.zeros(data.draw(SHAPES), jnp.dtype(data.draw(DTYPES)))
            given[key] = array if data.draw(st.booleans()) else jnp.asarray(array)
    try:
        jax.eval_shape(lambda: op(**given))
    except (ValueError, UnsupportedError) as error:
        assert_clear(error)
