"""What a caller passes for a request is checked before anything changes: every field by type, range and finiteness."""

import collections
import collections.abc
import functools
import math

import numpy as np
import pytest
from fakes.speller import VOCAB, Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.errors import FieldError

SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32)
SIZES |= dict(num_state_blocks=10, num_kv_pages=20)
# A list that Python can't write into an error.
NESTED = functools.reduce(lambda inner, _: [inner], range(100_000), [])
NOT_INTEGERS = (None, "a", "1", b"x", 1.5, 1.0, math.nan, math.inf, True, NESTED, {}, object(), 1 + 0j, np.float32(1))
NOT_NUMBERS = (None, "a", b"x", math.nan, math.inf, -math.inf, 10**5000, True, NESTED, {}, object(), 1j)
NOT_FLAGS = (None, "a", "", 0, 1, 1.0, [], object())
# For each field, values that it must not take.
BAD_PARAMS = {
    "max_tokens": (*NOT_INTEGERS, -1, 2**31, 10**30, 10**5000),
    "temperature": (*NOT_NUMBERS, -0.1, 1e39),
    "top_k": (*NOT_INTEGERS, -1, 2**31),
    "top_p": (*NOT_NUMBERS, 0, -0.5, 1.01, 1e-39, 5e-324),
    "seed": (*NOT_INTEGERS, -1, 2**31, 2**64),
    "stop_token_ids": (None, 3, "12", b"12", [1.5], ["a"], [None], [-1], [2**31], {1: 2}, [True], np.zeros((2, 2))),
    "stop": (None, 3, b"x", [b"x"], "", ["a", ""], [1], "\ud800", {"a": 1}, True),
    "skip_special_tokens": NOT_FLAGS,
    "ignore_eos": NOT_FLAGS,
    "min_tokens": (*NOT_INTEGERS, -1, 65, 2**31),
    "min_p": (*NOT_NUMBERS, -0.1, 1.01),
    "repetition_penalty": (*NOT_NUMBERS, 0, -1, 1e39),
    "presence_penalty": (*NOT_NUMBERS, -2.1, 2.1),
    "frequency_penalty": (*NOT_NUMBERS, -2.1, 2.1),
    "grammar": ("a", {}, {"type": "object"}, 1, True, object()),
    "logprobs": ("a", 1.5, 1.0, math.nan, True, [1], -1, 21, 2**31),
    "prompt_logprobs": ("a", 1.5, 1.0, math.nan, True, [1], -1, 21, 2**31),
    "logit_bias": (
        *(None, 3, "12", b"12", [1], [(1,)], [(1, 2, 3)], {1.5: 1}, {"1": 1}, {-1: 1}, {True: 1}, [(1, 2), (1, 3)]),
        *({1: 101}, {1: -101}, {1: math.nan}, {1: "2"}, {1: None}, dict.fromkeys(range(301), 1)),
    ),
    "cache_salt": (None, b"x", 1, ["a"], "\ud800", "a\udfff", True, object()),
    "checkpoint_at": (None, 3, "12", b"12", [1.5], [math.nan], [-1], [2**31], {1: 2}),
    "num_speculative_tokens": ("a", 1.5, 1.0, math.nan, True, [1], -1, 2**31),
    "priority": NOT_INTEGERS,
    "tenant": (None, b"x", 1, ["a"], "\ud800"),
}
BAD_CONFIGS = {
    "prefix_cache": (1, b"align", ["align"], "some", {}),
    "policy": (None, 1, ["copy_free"], "eager"),
    "speculation": (None, 1, ["mtp"], {}, "guess"),
    "state_dtype": (None, np.float32, ["float32"], "int8"),
    "window_layout": (1, True, ["SD"], {}, b"DS", "ds", "VK"),
    "state_layout": (1, True, ["VK"], {}, b"KV", "kv", "SD"),
    "memory_fraction": (*NOT_NUMBERS, 0, -1, 1.5),
    "num_speculative_tokens": (*NOT_INTEGERS, -1, 8),
    "async_stepping": tuple(value for value in NOT_FLAGS if value is not None),
    "checked": NOT_FLAGS,
    "checkpoint_interval": ("a", 1.5, 0, -8, 12, True, [8]),
    "prompt_lookup_max": (*NOT_INTEGERS, 0, 1),
    **dict.fromkeys(("fold_length", "prompt_lookup_min"), (*NOT_INTEGERS, 0, -1, 2**31)),
    **dict.fromkeys(
        (
            *("block_size", "kv_page_size", "max_num_seqs", "max_num_batched_tokens", "max_mixed_tokens"),
            *("max_prefill_rows", "num_state_blocks", "num_kv_pages", "max_model_len", "max_waiting"),
            "overtaking_limit",
        ),
        ("a", 1.5, 0, -1, 2**31, True, [1]),
    ),
}


@pytest.fixture(scope="module")
def engine():
    return Engine(Speller(), EngineConfig(**SIZES))


@pytest.mark.parametrize(
    ("kind", "field"),
    [(kind, f) for kind in ("request", "engine") for f in (BAD_PARAMS, BAD_CONFIGS)[kind == "engine"]],
)
def test_bad_field_is_refused_by_its_name(kind, field):
    make, bad = (SamplingParams, BAD_PARAMS) if kind == "request" else (EngineConfig, BAD_CONFIGS)
    sizes = {} if kind == "request" else SIZES
    for value in bad[field]:
        with pytest.raises(FieldError, match=" must be ") as raised:
            make(**{**sizes, field: value})
        # Blocks that are too short for the drafts are named instead of the drafts.
        assert raised.value.field in (field, *(["block_size"] if field == "num_speculative_tokens" else []))
        assert str(raised.value) == f"{raised.value.field} must be {raised.value.wanted}, got {raised.value.got}"


def test_every_field_is_checked():
    assert BAD_PARAMS.keys() == SamplingParams.__dataclass_fields__.keys()
    assert BAD_CONFIGS.keys() == EngineConfig.__dataclass_fields__.keys()


def test_numpy_values_become_plain_values():
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=np.int8(2),
        top_p=1,
        stop_token_ids=np.arange(2),
        ignore_eos=np.True_,
        checkpoint_at={4},
        priority=np.int32(-2),
    )
    assert params == SamplingParams(
        max_tokens=3,
        temperature=0.5,
        top_k=2,
        top_p=1.0,
        stop_token_ids=(0, 1),
        ignore_eos=True,
        checkpoint_at=(4,),
        priority=-2,
    )
    given = (params.max_tokens, params.temperature, params.top_p, *params.stop_token_ids, params.ignore_eos)
    assert [type(value) for value in given] == [int, float, float, int, int, bool]


BAD_PROMPTS = (
    *(None, 3, 1.5, object(), "12", b"12", bytearray(b"1"), {1: 2}, {1, 2}, iter([1]), [1.5], ["a"], [None], [[1]]),
    *(
        [True],
        [math.nan],
        [-1],
        [VOCAB],
        [2**40],
        [],
        (),
        np.zeros(2),
        np.zeros((2, 2), int),
        np.array(3),
        range(-1, 2),
    ),
)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda value: type(value).__name__)
def test_bad_prompt_is_refused_and_changes_nothing(engine, prompt):
    with pytest.raises(ValueError, match="prompt_token_ids must"):
        engine.add_request(prompt)
    assert not engine.has_unfinished
    assert len(engine.scheduler.waiting) == 0


@pytest.mark.parametrize(
    "params", [{}, dict(max_tokens=3), 3, "greedy", SamplingParams], ids=lambda value: type(value).__name__
)
def test_params_of_another_type_are_refused(engine, params):
    with pytest.raises(ValueError, match="params must be SamplingParams or None"):
        engine.add_request([1], params)


class Endless(collections.abc.Sequence):
    """A sequence that would need all memory if it were copied."""

    def __len__(self):
        return 2**40

    def __getitem__(self, index):
        return 1


@pytest.mark.parametrize(
    "prompt", [range(10**12), range(10**30), Endless(), np.broadcast_to(np.int32(1), 2**40)], ids=type
)
def test_a_prompt_is_measured_before_it_is_copied(engine, prompt):
    with pytest.raises(ValueError, match=r"must fit in max_model_len = 32, got \d+ \+ 64"):
        engine.add_request(prompt)
    with pytest.raises(ValueError, match=r"must fit in max_model_len = 32, got \d+ \+ 3"):
        engine.generate([[1], prompt], SamplingParams(max_tokens=3))
    assert not engine.has_unfinished


@pytest.mark.parametrize("numbers", [range(10**12), range(-1, 10**30), range(10**12, 0, -1)], ids=str)
def test_a_range_is_looked_at_before_it_is_copied(engine, numbers):
    calls = (
        engine.cached_prefix,
        engine.export_prefix,
        lambda tokens: engine.import_prefix(b"", tokens),
        engine.generate,
    )
    for call in calls:
        with pytest.raises(ValueError, match="must"):
            call(numbers)
    for field in ("stop_token_ids", "checkpoint_at", "stop", "logit_bias"):
        with pytest.raises(ValueError, match=f"{field} must"):
            SamplingParams(**{field: numbers})


@pytest.mark.parametrize("kind", [list, tuple, np.array, collections.deque, lambda tokens: np.array(tokens, np.uint8)])
def test_prompts_of_every_kind_of_sequence_are_equal(engine, kind):
    params = SamplingParams(max_tokens=3)
    (expected,) = engine.generate([1, 2, 3], params)
    several = engine.generate([kind([1, 2, 3]), kind([1, 2, 3])], params)
    for output in (*engine.generate(kind([1, 2, 3]), params), *several):
        assert (output.prompt_token_ids, output.token_ids) == ((1, 2, 3), expected.token_ids)
        assert {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    "prompts",
    [None, 3, [], (), b"12", np.zeros((0, 3), int), {1: 2}, {1}, iter([[1]])],
    ids=lambda value: type(value).__name__,
)
def test_prompts_that_are_none_are_refused(engine, prompts):
    with pytest.raises(ValueError, match="prompts must be one prompt or several"):
        engine.generate(prompts, SamplingParams(max_tokens=3))


@pytest.mark.parametrize(
    "prompts", [[[1], 2], [1, [2]], [[1], []], [[1], None], [[1], [VOCAB]]], ids=lambda value: type(value).__name__
)
def test_one_bad_prompt_of_several_is_refused_and_none_runs(engine, prompts):
    before = engine.stats
    with pytest.raises(ValueError, match="prompt_token_ids must"):
        engine.generate(prompts, SamplingParams(max_tokens=3))
    assert not engine.has_unfinished
    assert engine.stats == before
