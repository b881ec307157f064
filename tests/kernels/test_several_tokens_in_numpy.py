"""product_chain's launch for several tokens, all of whose CTAs run in NumPy, against float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import programs_in_numpy
from kernels.chains import OF_TOKENS, draw, drawn_clearly, oracle, whole
from kernels.common import assert_close

from pallas_kernels.product_chain.few_tokens import offsets
from pallas_kernels.product_chain.schedule import FEW_TOKENS, OWNERS, schedule

PROGRAMS = 132
# Both halves of a thread's tokens, in full and in part, and one half alone.
QUICK = [
    ("parts of one block", 16),
    ("three products", 3),
    ("sums of four splits", 5),
    ("more pairs than threads", 14),
    ("heads of 128 channels", 8),
    ("heads of 32 channels", 9),
]
DEEP = [(case.name, tokens) for case in OF_TOKENS for tokens in (2, 16)]


@pytest.mark.parametrize(
    ("name", "tokens"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.deep) for each in DEEP if each not in QUICK)]
)
def test_all_programs_together_match_the_oracle(rng, monkeypatch, name, tokens):
    (case,) = (case for case in OF_TOKENS if case.name == name)
    (x, steps, residual), (wanted, wanted_total) = drawn_clearly(rng, case, tokens)
    found, total = programs_in_numpy.run(monkeypatch, x, steps, residual, case.parts, PROGRAMS)
    found = whole(tuple(found) if case.parts else jnp.asarray(found))
    roundings, terms = 2 * len(steps), max(step.weight.shape[-1] for step in steps)
    assert_close(found / roundings, wanted / roundings, case.dtype, terms, "results")
    if residual is not None:
        total = np.asarray(total, np.float64)
        assert_close(total / roundings, wanted_total / roundings, case.dtype, terms, "residual")


def test_a_large_residual_stream_fits_in_float16(rng, monkeypatch):
    """Programs send each other the stream times the norm's weights, before it is normalised."""
    case = dataclasses.replace(OF_TOKENS[0], inputs=512, dtype="float16")
    x, steps, residual = draw(rng, case, 3)
    product, norm, *others = steps
    steps = product, dataclasses.replace(norm, weight=norm.weight + jnp.asarray(5, norm.weight.dtype)), *others
    residual = residual * jnp.asarray(6e4 / np.abs(residual).max(), residual.dtype)
    wanted, wanted_total, _ = oracle(x, steps, residual, case.dtype)
    found, total = programs_in_numpy.run(monkeypatch, x, steps, residual, case.parts, PROGRAMS)
    # Numbers are those of unit scale times the weights.
    assert_close(whole(jnp.asarray(found)) / 6, wanted / 6, case.dtype, 512, "results")
    assert_close(np.asarray(total, np.float64), wanted_total, case.dtype, 512, "residual")


@pytest.mark.parametrize("tokens", [2, 16])
@pytest.mark.parametrize("case", OF_TOKENS, ids=lambda case: case.name)
def test_results_of_different_phases_are_sent_to_different_words(case, tokens):
    _, steps, _ = case.arguments(lambda shape, dtype, _: jnp.zeros(shape, dtype), tokens)
    plan = schedule(steps, case.parts, 2, FEW_TOKENS)
    end = 0
    for phase, own in zip(plan.phases[:-1], offsets(plan, tokens), strict=True):
        words = tokens * phase.outputs // 2
        sizes = (words,) if phase.sends == "results" else (2 * words * phase.splits, words, tokens * OWNERS)
        starts = (own.results, own.stream, own.squares)
        for start, size in zip(starts, sizes, strict=False):
            assert start == end
            assert start % 4 == 0, "sixteen bytes are read at once"
            end = start + size
        assert own.end == end
