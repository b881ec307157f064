"""Deferred states of the gated delta rule have the same bits under every schedule of drafts."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import dirty_pool, pack
from kernels.deferred_rows import (
    BLOCKS,
    DIMS,
    LAYER,
    LAYERS,
    Kind,
    Sequences,
    dirty_rings,
    skip_if_unavailable,
)

STARTS = (0, 5, 19)  # where the rows' prompts end
TOKENS = 44
WIDEST = 8


def schedules(length):
    """(tokens of a step, accepted tokens) by name: for each a function of a random generator."""
    widest = min(WIDEST, (length + 1) // 2)
    return {
        "one": lambda rng: (1, 1),
        "all accepted": lambda rng: (widest, widest),
        "three, all accepted": lambda rng: (min(3, widest), min(3, widest)),
        "one accepted": lambda rng: (widest, 1),
        "random": lambda rng: (int(n := rng.integers(1, widest + 1)), int(rng.integers(1, n + 1))),
    }


def serve(kind, implementation, schedule, width=WIDEST, order=(0, 1, 2), padding=0):
    """Runs the rows by a schedule, with wrong tokens for rejected drafts and NaN in every place without an entry.

    The rows come in this order, with so many padding rows after them. Returns the bits of each accepted token's output, of
    each fold, and of each accepted token's entry.
    """
    rng, dims, length = np.random.default_rng(1), DIMS[kind.dims], kind.length
    true = Sequences(np.random.default_rng(0), kind, [TOKENS] * len(STARTS))
    wrong = Sequences(np.random.default_rng(2), kind, [TOKENS] * len(STARTS))
    both = Sequences(np.random.default_rng(0), kind, [TOKENS] * len(STARTS))
    for name in ("qkv", "a", "b"):
        setattr(both, name, getattr(true, name) + getattr(wrong, name))
    shape = (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim)
    pool = dirty_pool(np.random.default_rng(3), shape, kind.state, (2, 3))
    rings = dirty_rings(kind, slots=len(STARTS))
    base, position, read = list(STARTS), list(STARTS), [0, 2, 3]
    found = {}
    width = min(width, (length + 1) // 2)
    while any(p < TOKENS for p in position):
        steps = [schedule(rng) if p < TOKENS else (0, 0) for p in position]
        counts = [min(n, TOKENS - p) for (n, _), p in zip(steps, position, strict=True)]
        accepted = [min(n, count) for (_, n), count in zip(steps, counts, strict=True)]
        # Tokens behind the accepted ones are wrong drafts.
        tokens = [(r + len(STARTS) * (t >= accepted[r]), position[r] + t) for r in order for t in range(counts[r])]
        tokens += [None] * (len(STARTS) * width + padding - len(tokens))
        ends = [(b // length + 1) * length for b in base]
        # Every second fold goes to the block that it reads.
        fold = [read[r] if ends[r] // length % 2 and read[r] else 4 + r + 3 * (ends[r] // length % 3) for r in range(3)]
        lists = range(len(STARTS)), base, position, read, fold
        rows = pack([counts[r] for r in order], padding)
        rows = rows, *(jnp.asarray([x[r] for r in order] + [0] * padding, jnp.int32) for x in lists)
        out, pool, *rings = both.call(
            tokens, (pool, *map(jnp.asarray, rings)), rows, implementation, max_query_tokens=width
        )
        rings = [np.array(ring) for ring in rings]
        for r, p in enumerate(position):
            first = sum(counts[other] for other in order[: order.index(r)])
            if counts[r] and p >= ends[r]:
                base[r], read[r] = ends[r], fold[r]
                found["fold", r, ends[r]] = np.asarray(pool[LAYER, fold[r]]).tobytes()
            for t in range(accepted[r]):
                found["output", r, p + t] = np.asarray(out[first + t]).tobytes()
                entry = [ring[LAYER, r, :, (p + t) % (2 * length)] for ring in rings]
                found["entry", r, p + t] = b"".join(x.tobytes() for x in entry)
            position[r] = p + accepted[r]
            kept = [i % (2 * length) for i in range(base[r], position[r])]
            for ring in rings:
                ring[:, r, :, [i for i in range(2 * length) if i not in kept]] = np.nan
    return found


@functools.cache
def wanted_bits(kind, implementation):
    return serve(kind, implementation, schedules(kind.length)["one"])


MOSAIC_GPU_BITS = [
    Kind("64 x 128", "bfloat16"),
    Kind("64 x 128", "bfloat16", "bfloat16"),
    Kind("kimi", "bfloat16", length=32),
]
BITS = [Kind("grouped", "bfloat16"), Kind("grouped", "bfloat16", "bfloat16"), Kind("narrow", length=4), Kind("kimi")]
KDA_BITS = [
    Kind("grouped", "bfloat16", kda=True),
    Kind("grouped", "bfloat16", "bfloat16", length=8, kda=True),
    Kind("kimi", kda=True),
]


CASES = [
    *((kind, implementation) for kind in BITS + KDA_BITS for implementation in ("xla", "interpret")),
    *(pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in BITS + KDA_BITS),
    *(pytest.param(kind, "mosaic_gpu", marks=pytest.mark.gpu) for kind in MOSAIC_GPU_BITS),
]


# One kind of each decay, and for Mosaic GPU, which has no decay per key channel, of the other one.
OF_EACH = [(kind, implementation) for kind in (BITS[0], KDA_BITS[0]) for implementation in ("xla", "interpret")]
OF_EACH += [pytest.param(kind, "triton", marks=pytest.mark.gpu) for kind in (BITS[0], KDA_BITS[0])]
OF_EACH += [pytest.param(MOSAIC_GPU_BITS[0], "mosaic_gpu", marks=pytest.mark.gpu)]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(("kind", "implementation"), CASES, ids=str)
@pytest.mark.parametrize("schedule", ["all accepted", "three, all accepted", "one accepted", "random"])
def test_schedules_of_drafts_change_no_bit(kind, schedule, implementation):
    """Folds, outputs and entries of accepted tokens are those of one token at a time.

    A CPU's programs are optimized, because in others the rows of a product of tiles may be summed in different ways.
    """
    skip_if_unavailable(implementation)
    found = serve(kind, implementation, schedules(kind.length)[schedule])
    wanted = wanted_bits(kind, implementation)
    for key, bits in found.items():
        assert bits == wanted[key], key
    # A fold comes with the first step after the group's end, so the last ones may be missing.
    expected = {("fold", r, n * kind.length) for r, s in enumerate(STARTS) for n in range(s // kind.length + 1, 20)}
    missing = {key for key in expected if key[2] <= TOKENS - WIDEST} - set(found)
    assert not missing
    assert {name for name, *_ in found} == {"fold", "output", "entry"}
    assert len([key for key in found if key[0] == "output"]) == 3 * TOKENS - sum(STARTS)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(("kind", "implementation"), OF_EACH, ids=str)
def test_a_program_for_single_tokens_gives_the_bits_of_one_for_drafts(kind, implementation):
    skip_if_unavailable(implementation)
    found = serve(kind, implementation, schedules(kind.length)["one"], width=1)
    assert found == wanted_bits(kind, implementation)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize(("kind", "implementation"), OF_EACH, ids=str)
def test_a_row_depends_on_that_row_alone(kind, implementation):
    """Neither the order of rows nor padding changes a bit."""
    skip_if_unavailable(implementation)
    schedule = schedules(kind.length)["three, all accepted"]
    found = serve(kind, implementation, schedule, order=(2, 0, 1), padding=4)
    assert found == serve(kind, implementation, schedule)
