"""A server's schedules of drafts over deferred states, and the bits that they leave: for the tests of every such op."""

import jax.numpy as jnp
import numpy as np
from kernels.common import dirty_pool, pack
from kernels.deferred_rows import LAYER

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


def serve(kind, implementation, schedule, width=WIDEST, order=(0, 1, 2), padding=0, config=None):
    """Runs the rows by a schedule, with wrong tokens for rejected drafts and NaN in every place without an entry.

    The rows come in this order, with so many padding rows after them. Returns the bits of each accepted token's output, of
    each fold, and of each accepted token's entry.
    """
    rng, length = np.random.default_rng(1), kind.length
    true, wrong, both = (kind.sequences(np.random.default_rng(seed), [TOKENS] * len(STARTS)) for seed in (0, 2, 0))
    for name in both.inputs:
        setattr(both, name, getattr(true, name) + getattr(wrong, name))
    pool = dirty_pool(np.random.default_rng(3), kind.pool_shape, kind.state, (2, 3))
    rings = kind.rings(slots=len(STARTS))
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
            tokens, (pool, *map(jnp.asarray, rings)), rows, implementation, max_query_tokens=width, config=config
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


def assert_same_bits(found, wanted, length):
    """Fails unless a schedule has left the bits of another one, for every output, entry and fold that it must have."""
    for key, bits in found.items():
        assert bits == wanted[key], key
    # A fold comes with the first step after the group's end, so the last ones may be missing.
    expected = {("fold", r, n * length) for r, s in enumerate(STARTS) for n in range(s // length + 1, 20)}
    missing = {key for key in expected if key[2] <= TOKENS - WIDEST} - set(found)
    assert not missing
    assert {name for name, *_ in found} == {"fold", "output", "entry"}
    assert len([key for key in found if key[0] == "output"]) == 3 * TOKENS - sum(STARTS)
