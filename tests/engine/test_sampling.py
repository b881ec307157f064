"""Verify rows sample from the model's distribution, which is computed here one token at a time."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_align_jax.engine.sampling.draw import count_sampled, sample

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

VOCAB, K, ROWS = 5, 2, 12_000
OPTIONS = {
    "plain": dict(temperature=1.0),
    "warm": dict(temperature=1.7),
    "top_k": dict(temperature=0.8, top_k=3),
    "top_p": dict(temperature=1.2, top_p=0.7),
    "both": dict(temperature=1.0, top_k=4, top_p=0.9),
    "greedy": dict(temperature=0.0),
}


def target(logits, temperature, top_k=0, top_p=1.0):
    """Computes the distribution of one token from the definitions."""
    if temperature == 0:
        return np.eye(VOCAB)[np.argmax(logits)]
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum()
    order = np.argsort(-p)[: top_k or VOCAB]
    kept, mass = np.zeros(VOCAB), 0.0
    for token in order:
        if mass >= top_p * p[order].sum():
            break
        kept[token], mass = p[token], mass + p[token]
    return kept / kept.sum()


@pytest.fixture(scope="module")
def verified():
    """Every option's rows in one call: a chain whose next token depends on the last one alone, and any drafts."""
    rng = np.random.default_rng(3)
    chain = rng.normal(0, 0.7, (1 + VOCAB, VOCAB)).astype(np.float32)
    rows = ROWS * len(OPTIONS)
    drafts = rng.integers(0, 3, (rows, K)).astype(np.int32)
    num_drafts = rng.integers(0, K + 1, rows).astype(np.int32)
    before = np.concatenate([np.full((rows, 1), VOCAB), drafts], axis=1)
    each = lambda name, default, dtype: np.repeat(
        np.array([options.get(name, default) for options in OPTIONS.values()], dtype), ROWS * (1 + K)
    )

    @jax.jit
    def verify(logits, temperature, top_k, top_p, seed, position, drafts, num_drafts):
        sampled = sample(logits, temperature, top_k, top_p, seed, position).reshape(rows, 1 + K)
        return sampled, count_sampled(sampled, drafts, num_drafts)

    seed = np.repeat(np.arange(rows, dtype=np.int32), 1 + K)
    position = np.tile(np.arange(50, 51 + K, dtype=np.int32), rows)
    sampled, counts = verify(
        chain[before].reshape(-1, VOCAB),
        each("temperature", 0, np.float32),
        each("top_k", 0, np.int32),
        each("top_p", 1, np.float32),
        seed,
        position,
        drafts,
        num_drafts,
    )
    shape = lambda x: np.asarray(x).reshape(len(OPTIONS), ROWS, *x.shape[1:])
    return chain, *map(shape, (before, sampled, counts, num_drafts))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_token_has_the_distribution_of_the_model(verified, name):
    """Chi-square per token before, draft and place: what is sampled follows the target whatever was drafted there.

    The bound holds for a chi-square of `freedom` degrees but with probability e^-9 (Laurent and Massart, 2000).
    """
    chain, *arrays = verified
    before, sampled, counts, num_drafts = (array[list(OPTIONS).index(name)] for array in arrays)
    statistic, freedom = 0.0, 0
    for place, last in itertools.product(range(1 + K), range(1 + VOCAB)):
        reached = (counts > place) & (before[:, place] == last)
        p = target(chain[last], **OPTIONS[name])
        # The draft in this place, or none of them.
        for draft in (None, *range(3)) if place < K else (None,):
            drafted = num_drafts > place
            mine = reached & (~drafted if draft is None else drafted & (before[:, min(place + 1, K)] == draft))
            observed = np.bincount(sampled[mine, place], minlength=VOCAB)
            assert not observed[p == 0].any()
            expected = mine.sum() * p[p > 0]
            if len(expected) > 1 and expected.min() >= 5:
                statistic += float(((observed[p > 0] - expected) ** 2 / expected).sum())
                freedom += len(expected) - 1
    assert freedom >= 15 or name == "greedy"
    assert statistic <= freedom + 2 * math.sqrt(9 * freedom) + 18


def test_a_draft_is_accepted_with_its_probability(verified):
    chain, before, _, counts, num_drafts = verified
    for number, options in enumerate(OPTIONS.values()):
        p = target(chain[VOCAB], **options)
        for draft in range(3):
            mine = (before[number, :, 1] == draft) & (num_drafts[number] > 0)
            deviation = (counts[number][mine] > 1).mean() - p[draft]
            # Six standard deviations.
            assert abs(deviation) <= 6 * math.sqrt(p[draft] * (1 - p[draft]) / mine.sum())


def test_drafts_after_a_rejected_one_are_rejected():
    cases = list(
        itertools.product(itertools.product(range(2), repeat=3), itertools.product(range(2), repeat=2), range(3))
    )
    sampled, drafts, number = (jnp.array(column, jnp.int32) for column in zip(*cases, strict=True))
    expected = []
    for said, guesses, known in cases:
        count = 1
        for place in range(known):
            if said[place] != guesses[place]:
                break
            count += 1
        expected.append(count)
    assert count_sampled(sampled, drafts, number).tolist() == expected


def test_one_token_is_kept_for_top_k_of_1_and_for_any_top_p(rng):
    logits = jnp.asarray(rng.normal(0, 8, (40, 3000)), jnp.float32)
    rows = functools.partial(jnp.full, (40,))
    arguments = rows(1.5), rows(0), jnp.arange(40, dtype=jnp.int32), rows(7)
    wanted = jnp.argmax(logits, axis=1)
    for top_k, top_p in ((1, 1.0), (0, 2.0**-126), (5, 1e-6)):
        got = sample(logits, arguments[0], rows(top_k), rows(top_p, jnp.float32), *arguments[2:])
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("temperature", [1e-6, 1.0, 1e37, 1e38, 3e38])
@pytest.mark.parametrize("scale", [1.0, 1e37])
def test_what_is_forbidden_is_not_drawn_at_any_temperature(rng, temperature, scale):
    logits = rng.normal(size=(200, 6)) * scale
    logits[:, [0, 4]] = -np.inf
    rows = functools.partial(jnp.full, (200,))
    given = rows(temperature, jnp.float32), rows(0), rows(1.0), jnp.arange(200, dtype=jnp.int32), rows(7)
    drawn = sample(jnp.asarray(logits, jnp.float32), *given)
    assert set(np.asarray(drawn).tolist()) == {1, 2, 3, 5}


def test_drawing_does_not_sort():
    arguments = (
        jax.ShapeDtypeStruct((4, 1000), jnp.float32),
        *(jax.ShapeDtypeStruct((4,), dtype) for dtype in ("float32", "int32", "float32", "int32", "int32")),
    )
    program = jax.jit(sample).lower(*arguments).as_text()
    assert "stablehlo.reduce" in program
    for name in ("stablehlo.sort", "top_k("):
        assert name not in program


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("generator", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_seeds_tokens_depend_on_no_other_row_whatever_jax_draws_with(generator, partitionable):
    logits = np.random.default_rng(0).normal(size=(1, 61)).astype(np.float32).repeat(3, axis=0)
    rows = np.full(3, 1.0, np.float32), np.zeros(3, np.int32), np.ones(3, np.float32), np.arange(1, 4, dtype=np.int32)
    arguments = [jnp.asarray(each) for each in (logits, *rows, np.full(3, 9, np.int32))]
    with jax.threefry_partitionable(partitionable):
        wanted = sample(*arguments).tolist()
        with jax.default_prng_impl(generator):
            assert sample(*arguments).tolist() == wanted
            assert [sample(*(each[row : row + 1] for each in arguments)).item() for row in range(3)] == wanted
