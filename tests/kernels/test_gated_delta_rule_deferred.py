"""Deferred states of the gated delta rule: against the oracle, and the same bits under every schedule of drafts."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, assert_close, assert_untouched, dirty_pool, how, pack
from kernels.test_gated_delta_rule import DIMS, unpack
from oracles.ops import gated_delta_rule_entries, gates

from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred
from pallas_kernels.gated_delta_rule.deferred.config import DeferredConfig

LAYER, LAYERS, BLOCKS, SLOTS = 1, 2, 16, 9


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a call: the arguments of its slot, and how many tokens it has."""

    base: int
    position: int
    count: int
    read: int
    fold: int


# In groups of 16 tokens. Slots are given in reverse order.
ROWS = {
    "fresh": Row(0, 0, 4, 0, 10),
    "decode": Row(16, 20, 1, 1, 10),
    "folds into the block that it reads": Row(16, 32, 4, 2, 2),
    "folds a short group, after a prefill": Row(5, 18, 3, 3, 11),
    "crosses the end of its group": Row(7, 14, 4, 4, 10),
    "has no tokens": Row(3, 10, 0, 5, 10),
    "folds only": Row(16, 33, 0, 6, 12),
    "folds nowhere": Row(16, 34, 2, 7, 0),
    "could fold and need not": Row(16, 34, 0, 8, 0),
}
PADDING = Row(0, 0, 0, 9, 10)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Sizes and dtypes of a test."""

    dims: str = "grouped"
    dtype: str = "float32"
    state: str = "float32"
    ring: str = "float32"
    length: int = 16
    l2norm: bool = True
    lower_bound: float | None = None
    beta_max: int = 1


KINDS = [
    Kind(),
    Kind("grouped", "bfloat16"),
    Kind("grouped", "bfloat16", "bfloat16"),
    Kind("grouped", "bfloat16", "bfloat16", "bfloat16"),
    Kind("96 x 192", "bfloat16"),
    Kind("odd", length=32),
    Kind("equal heads", "float16", "float16"),
    Kind("grouped", l2norm=False),
    Kind("grouped", lower_bound=-5.0, beta_max=2),
    Kind("kimi", "bfloat16"),
    Kind("narrow"),
]


class Sequences:
    """What the rows of a call have read and will read: random projections of all tokens from each row's base on."""

    def __init__(self, rng, kind, lengths, head_rng=None):
        self.kind, self.dims = kind, DIMS[kind.dims]
        dims, dtype = self.dims, kind.dtype
        self.channels = 2 * dims.key_heads * dims.key_dim + dims.value_heads * dims.value_dim
        draw = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype))
        # Keys that are not normalised must be short, or states grow without a bound.
        shrink = 1 if kind.l2norm else self.dims.key_dim**-0.5
        self.qkv = [draw(n, self.channels) * np.asarray(shrink, dtype) for n in lengths]
        self.a, self.b = ([draw(n, dims.value_heads) for n in lengths] for _ in range(2))
        self.A_log, self.dt_bias = (jnp.asarray(rng.normal(size=dims.value_heads), jnp.float32) for _ in range(2))
        self.scale = dims.key_dim**-0.5

    def parts(self, row, tokens):
        """q, k, v, g and beta of some tokens of a row, float64."""
        bounds = self.kind.lower_bound, self.kind.beta_max
        a, b = (np.asarray(x[row][tokens], np.float64) for x in (self.a, self.b))
        q, k, v = unpack(jnp.asarray(self.qkv[row][tokens]), self.dims)
        return q, k, v, *gates(a, b, self.A_log, self.dt_bias, *bounds)

    def oracle(self, row, tokens, state):
        """Outputs, states and corrections of some tokens of a row."""
        return gated_delta_rule_entries(*self.parts(row, tokens), state, self.scale, self.kind.l2norm)

    def call(self, tokens, arrays, rows, implementation, max_query_tokens=4, **options):
        """Runs the op on packed tokens, each of which is (row, token) or None for padding."""

        def packed(x):
            padding = np.full_like(x[0][0], np.nan)
            return jnp.asarray(np.stack([padding if at is None else x[at[0]][at[1]] for at in tokens]))

        kind = self.kind
        return gated_delta_rule_deferred(
            *(packed(x) for x in (self.qkv, self.a, self.b)),
            self.A_log,
            self.dt_bias,
            *arrays,
            LAYER,
            *rows,
            max_query_tokens=max_query_tokens,
            use_qk_l2norm=kind.l2norm,
            lower_bound=kind.lower_bound,
            allow_neg_eigval=kind.beta_max == 2,
            **how(implementation),
            **options,
        )


def dirty_rings(kind, slots=SLOTS):
    """NaN in every place of every ring."""
    dims, places = DIMS[kind.dims], 2 * kind.length
    full = lambda dtype, *shape: np.array(jnp.full((LAYERS, slots, *shape), jnp.nan, dtype))
    return [
        full(kind.dtype, dims.key_heads, places, dims.key_dim),
        full(kind.ring, dims.value_heads, places, dims.value_dim),
        full("float32", dims.value_heads, places),
    ]


def exact(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def coarsest(*dtypes):
    return max((jnp.dtype(dtype) for dtype in dtypes), key=lambda dtype: float(jnp.finfo(dtype).eps))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_in_every_phase_match_the_oracle(rng, kind, implementation):
    """Outputs, folds and new entries, and that nothing else changes, with pools and rings of NaN."""
    grow = lambda x: x + x // 16 * (kind.length - 16)  # the same places in groups of another length
    cases = [dataclasses.replace(row, base=grow(row.base), position=grow(row.position)) for row in ROWS.values()]
    sequences = Sequences(rng, kind, [row.position - row.base + row.count for row in cases])
    dims = DIMS[kind.dims]
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state, range(1, 10))
    rings, wanted = dirty_rings(kind), []
    for r, row in enumerate(cases):
        end = (row.base // kind.length + 1) * kind.length - row.base  # in tokens of the row
        state = exact(pool)[LAYER, row.read] if row.read else np.zeros(pool.shape[2:])
        outs, states, corrections = sequences.oracle(r, slice(0, end), state)
        if len(outs) == end:  # the rest starts from the fold, rounded as it is stored
            rounded = exact(jnp.asarray(states[-1], jnp.float32).astype(kind.state))
            rest = sequences.oracle(r, slice(end, None), rounded)
            outs, corrections = np.concatenate([outs, rest[0]]), np.concatenate([corrections, rest[2]])
        wanted.append((outs, states[-1] if len(states) == end else None, corrections))
        _, k, _, g, _ = sequences.parts(r, slice(None))
        for t in range(row.position - row.base):
            at = LAYER, SLOTS - 1 - r, slice(None), (row.base + t) % (2 * kind.length)
            rings[0][at], rings[1][at], rings[2][at] = k[t], corrections[t], g[t]
    tokens = [(r, row.position - row.base + t) for r, row in enumerate(cases) for t in range(row.count)]
    arrays = pool, *map(jnp.asarray, rings)
    every = [*cases, PADDING, PADDING]
    column = lambda name: jnp.asarray([getattr(row, name) for row in every], jnp.int32)
    slots = jnp.asarray([*range(SLOTS - 1, -1, -1), 0, 0], jnp.int32)
    where = pack([row.count for row in cases], padding_rows=2), slots
    where += tuple(column(name) for name in ("base", "position", "read", "fold"))
    out, after, *kept = sequences.call([*tokens, None, None, None], arrays, where, implementation)

    width, written = coarsest(kind.dtype, kind.state, kind.ring), []
    places = set()
    for r, row in enumerate(cases):
        outs, fold, corrections = wanted[r]
        first = sum(other.count for other in cases[:r])
        known = row.position - row.base
        terms = 4 * (known + row.count + 1) * dims.key_dim
        assert_close(out[first : first + row.count], outs[known:], width, terms, f"outputs of row {r}")
        end = (row.base // kind.length + 1) * kind.length
        if row.position >= end and row.fold:
            written.append(row.fold)
            narrow = coarsest(kind.state, kind.ring)
            assert_close(exact(after)[LAYER, row.fold], fold, narrow, terms, f"fold of row {r}")
        _, k, _, g, _ = sequences.parts(r, slice(known, None))
        for t in range(row.count):
            at = LAYER, SLOTS - 1 - r, slice(None), (row.position + t) % (2 * kind.length)
            places.add((SLOTS - 1 - r, at[-1]))
            np.testing.assert_array_equal(exact(kept[0])[at], k[t])
            assert_close(exact(kept[1])[at], corrections[known + t], width, terms, f"correction of row {r}")
            assert_close(kept[2][at], g[t], jnp.float32, 16, f"decay of row {r}")
    assert not exact(out[len(tokens) :]).any()
    assert len(places) == len(tokens)
    assert_untouched(pool, after, written)
    assert_untouched(pool[:LAYER], after[:LAYER], written=())
    for before, now in zip(rings, kept, strict=True):
        now = np.array(now)
        for slot, place in places:
            now[LAYER, slot, :, place] = before[LAYER, slot, :, place]
        np.testing.assert_array_equal(now.view(np.uint8), before.view(np.uint8))


STARTS = (0, 5, 19)  # where the rows' prompts end
TOKENS = 44
WIDEST = 8


def schedules(length):
    """(tokens of a step, accepted tokens) by name: for each a function of a random generator."""
    widest = (length + 1) // 2
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


@functools.cache
def wanted_bits(kind, implementation):
    return serve(kind, implementation, schedules(kind.length)["one"])


BITS = [Kind("grouped", "bfloat16"), Kind("grouped", "bfloat16", "bfloat16"), Kind("narrow", length=4), Kind("kimi")]


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", BITS, ids=str)
@pytest.mark.parametrize("schedule", ["all accepted", "three, all accepted", "one accepted", "random"])
def test_schedules_of_drafts_change_no_bit(kind, schedule, implementation):
    """Folds, outputs and entries of accepted tokens are those of one token at a time.

    A CPU's programs are optimized, because in others the rows of a product of tiles may be summed in different ways.
    """
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
@pytest.mark.parametrize("implementation", ["xla", pytest.param("triton", marks=pytest.mark.gpu)])
def test_a_program_for_single_tokens_gives_the_bits_of_one_for_drafts(implementation):
    kind = BITS[0]
    found = serve(kind, implementation, schedules(kind.length)["one"], width=1)
    assert found == wanted_bits(kind, implementation)


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_depends_on_that_row_alone(implementation):
    """Neither the order of rows nor padding changes a bit."""
    kind = BITS[0]
    schedule = schedules(kind.length)["three, all accepted"]
    found = serve(kind, implementation, schedule, order=(2, 0, 1), padding=4)
    assert found == serve(kind, implementation, schedule)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Kind("kimi", "bfloat16"), Kind("kimi", "bfloat16", "bfloat16")], ids=str)
@pytest.mark.parametrize("is_split", [False, True])
def test_the_number_of_tiles_of_a_program_changes_no_bit(kind, is_split):
    schedule = schedules(kind.length)["random"]
    configs = [DeferredConfig(block, 32, 128, 4, 3, is_split=is_split) for block in (32, 64, 128)]
    found = [serve(kind, "triton", schedule, config=config) for config in configs]
    assert found[0] == found[1] == found[2]


@pytest.mark.deep
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("slow", [False, True])
def test_errors_do_not_grow_with_the_number_of_tokens(rng, slow, implementation):
    """After 1200 tokens the state is as near to float64 as after 80, with decays of few and of some hundred tokens."""
    kind, number, width = Kind("grouped", "bfloat16"), 1216, 3
    sequences, dims = Sequences(rng, kind, [number]), DIMS[kind.dims]
    if slow:
        sequences.A_log = sequences.A_log - 6.0
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state)
    arrays, ints = (pool, *map(jnp.asarray, dirty_rings(kind))), lambda *values: jnp.asarray(values, jnp.int32)
    _, states, _ = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    base, position, errors = 0, 0, {}
    while position < number - width:
        rows = ints(0, width), ints(0), ints(base), ints(position), ints(3 if base else 0), ints(3)
        _, *arrays = sequences.call([(0, position + t) for t in range(width)], arrays, rows, implementation)
        if position >= base + kind.length:
            base += kind.length
            wanted = states[base - 1]
            errors[base] = np.linalg.norm(exact(arrays[0])[LAYER, 3] - wanted) / np.linalg.norm(wanted)
        position += int(rng.integers(1, width + 1))
    early, late = (max(errors[n] for n in errors if low < n <= high) for low, high in ((0, 80), (1100, number)))
    assert late <= 2 * early + 1e-7, (early, late)
    assert late <= 2e-6


@pytest.mark.parametrize("implementation", ["interpret", pytest.param("triton", marks=pytest.mark.gpu)])
def test_every_config_computes_the_same_numbers(rng, implementation):
    kind = Kind("grouped", "bfloat16")
    sequences, dims = Sequences(rng, kind, [3, 2]), DIMS[kind.dims]
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state, (1, 2))
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    tokens = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    rows = ints(0, 3, 5), ints(0, 1), ints(14, 14), ints(14, 14), ints(1, 2), ints(3, 4)
    arrays = pool, *map(jnp.asarray, dirty_rings(kind))
    configs = [
        DeferredConfig(16, 16, 128, 1, 3),
        DeferredConfig(32, 16, 16, 2, 3),
        DeferredConfig(32, 32, 32, 4, 3, values_first=True),
        DeferredConfig(32, 16, 16, 2, 3, is_split=True),
    ]
    results = [sequences.call(tokens, arrays, rows, implementation, config=config)[0] for config in configs]
    for out in results[1:]:
        assert_close(exact(out), exact(results[0]), jnp.bfloat16, dims.key_dim, "outputs")


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_a_call_without_tokens_folds(rng, implementation):
    kind = Kind()
    sequences, dims = Sequences(rng, kind, [17]), DIMS[kind.dims]
    pool = dirty_pool(rng, (LAYERS, BLOCKS, dims.value_heads, dims.value_dim, dims.key_dim), kind.state)
    arrays = pool, *map(jnp.asarray, dirty_rings(kind))
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    for t in range(17):
        rows = ints(0, 1), ints(0), ints(0), ints(t), ints(0), ints(0)
        _, *arrays = sequences.call([(0, t)], arrays, rows, implementation)
    _, states, _ = sequences.oracle(0, slice(None), np.zeros(pool.shape[2:]))
    rows = ints(0, 0), ints(0), ints(0), ints(17), ints(0), ints(3)
    empty = [jnp.zeros((0, x[0].shape[1]), kind.dtype) for x in (sequences.qkv, sequences.a, sequences.b)]
    out, after, *kept = gated_delta_rule_deferred(
        *empty, sequences.A_log, sequences.dt_bias, *arrays, LAYER, *rows, max_query_tokens=4, **how(implementation)
    )
    assert out.shape[0] == 0
    assert_close(after[LAYER, 3], states[15], jnp.float32, 64 * dims.key_dim, "fold")
    assert_untouched(pool, after, [3])
    for before, now in zip(arrays[1:], kept, strict=True):
        np.testing.assert_array_equal(np.asarray(before).view(np.uint8), np.asarray(now).view(np.uint8))


def refused(**changes):
    """Calls the op with zeros, of which some arguments are changed."""
    given = dict(
        qkv=jnp.zeros((3, 96)),
        a=jnp.zeros((3, 2)),
        b=jnp.zeros((3, 2)),
        A_log=jnp.zeros(2),
        dt_bias=jnp.zeros(2),
        pool=jnp.zeros((1, 4, 2, 16, 16)),
        ring_k=jnp.zeros((1, 3, 2, 32, 16)),
        ring_u=jnp.zeros((1, 3, 2, 32, 16)),
        ring_g=jnp.zeros((1, 3, 2, 32)),
        layer=0,
        query_start_loc=jnp.arange(3, dtype=jnp.int32),
        slot=jnp.arange(2, dtype=jnp.int32),
        base=jnp.zeros(2, jnp.int32),
        position=jnp.zeros(2, jnp.int32),
        read_block=jnp.zeros(2, jnp.int32),
        fold_block=jnp.zeros(2, jnp.int32),
        max_query_tokens=8,
    )
    return gated_delta_rule_deferred(**given | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(max_query_tokens=9), r"at most 8 for groups of 16 tokens \(2 \* max_query_tokens - 2 < 16\), got 9"),
        (dict(max_query_tokens=0), "max_query_tokens must be at least 1, got 0"),
        (dict(qkv=jnp.zeros((3, 80))), r"qkv must have 2 \* 2 \* 16 \+ 2 \* 16 channels, got 80"),
        (dict(ring_k=jnp.zeros((1, 3, 2, 32, 16), jnp.bfloat16)), "ring_k must have qkv's dtype float32, got bfloat16"),
        (dict(ring_k=jnp.zeros((1, 3, 2, 30, 16))), "ring_u must be"),
        (dict(ring_g=jnp.zeros((1, 3, 2, 32), jnp.bfloat16)), "ring_g must be"),
        (dict(ring_k=jnp.zeros((1, 3, 3, 32, 16))), "the key heads of ring_k must divide the 2 value heads, got 3"),
        (dict(base=jnp.zeros(3, jnp.int32)), "base must be"),
        (dict(query_start_loc=jnp.zeros(5, jnp.int32)), "query_start_loc must have 3 entries"),
        (dict(layer=1), r"layer must be in \[0, 1\)"),
        (dict(lower_bound=1.0), "lower_bound must be negative or None, got 1.0"),
        (dict(implementation="cuda"), "implementation must be"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        refused(**changes)


def test_calls_without_rows_change_nothing():
    none = jnp.zeros(0, jnp.int32)
    names = ("slot", "base", "position", "read_block", "fold_block")
    out, *_ = refused(**dict.fromkeys(names, none), query_start_loc=jnp.zeros(1, jnp.int32))
    assert out.shape == (3, 2, 16)
    assert not out.any()
