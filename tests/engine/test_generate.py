"""`Engine.generate` takes parameters for each prompt, and makes several outputs of each prompt with seeds of their own."""

from dataclasses import replace

import pytest
from fakes.letters import Letters
from fakes.spelling_engine import PARAMS, SIZES, SPELLER, assert_nothing_is_held, assert_right, prompts

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.running.admission import seeded

pytestmark = pytest.mark.usefixtures("fewest_programs")
DRAWN = SamplingParams(max_tokens=8, temperature=60.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def engine():
    return Engine(SPELLER, EngineConfig(**SIZES), tokenizer=Letters())


def test_each_prompt_has_its_own_parameters(engine, rng):
    asked = prompts(rng)[:3]
    first, second, third = engine.generate(
        asked, [PARAMS, replace(PARAMS, max_tokens=7), replace(PARAMS, max_tokens=3)]
    )
    assert_right([first], asked[:1])
    assert [len(output.token_ids) for output in (first, second, third)] == [18, 7, 3]


def test_outputs_of_a_prompt_have_the_seeds_after_its_own(engine, rng):
    asked = prompts(rng)[:2]
    params = [DRAWN, replace(DRAWN, seed=100)]
    outputs = engine.generate(asked, params, n=3)
    alone = [
        engine.generate(prompt, replace(own, seed=own.seed + number))[0]
        for prompt, own in zip(asked, params, strict=True)
        for number in range(3)
    ]
    assert [output.token_ids for output in outputs] == [output.token_ids for output in alone]
    assert [list(output.prompt_token_ids) for output in outputs] == [asked[0]] * 3 + [asked[1]] * 3
    assert len({output.token_ids for output in outputs}) == 6
    (one, other) = engine.generate("abc", PARAMS, n=2)
    assert one.token_ids == other.token_ids, "the most likely tokens need no seed"
    assert [each.seed for each in seeded(replace(PARAMS, seed=2**31 - 2), 3)] == [2**31 - 2, 2**31 - 1, 0]


@pytest.mark.parametrize(
    ("params", "n", "wanted"),
    [
        ([PARAMS], 1, "params must be one, or one for each of 2 prompts, got 1"),
        ([PARAMS, 3], 1, "params must be SamplingParams or None, got 3"),
        ([PARAMS, 3], 2, "params must be SamplingParams or None, got 3"),
        (PARAMS, 0, "n must be at least 1, got 0"),
        (PARAMS, 1.5, "n must be a whole number"),
    ],
)
def test_wrong_parameters_change_nothing(engine, params, n, wanted):
    with pytest.raises(ValueError, match=wanted):
        engine.generate([[1, 2], [3]], params, n)
    assert not engine.has_unfinished
    assert_nothing_is_held(engine)
