import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, run_by
from kernels.mixtures import HIDDEN, SMALL, assert_is_mixture, draw_tokens, make
from oracles import ops as oracle

from pallas_kernels import (
    Routing,
    Run,
    choose_experts,
    mixture_of_experts,
    mixture_of_experts_sums,
    routed_experts_sums,
)
from pallas_kernels.mixture_of_experts import pallas_triton
from pallas_kernels.mixture_of_experts._tiles import Tiles, tiles, tiles_by_kernels
from pallas_kernels.mixture_of_experts.config import default_config

NO_TILE = -2


def by_small_tiles(implementation):
    """With the small configuration where the kernel runs."""
    return run_by(implementation, None if implementation == "xla" else SMALL)


def choose(rng, tokens, experts, top_k):
    """Different experts for each token."""
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k].astype(np.int32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "activation", "dtype"),
    [
        (37, 6, 3, "swiglu", jnp.float32),
        (1, 64, 2, "swiglu", jnp.float32),
        (9, 4, 1, "relu2", jnp.float32),
        (20, 1, 1, "swiglu", jnp.bfloat16),
        (21, 7, 4, "relu2", jnp.float16),
        pytest.param(300, 5, 2, "swiglu", jnp.bfloat16, marks=pytest.mark.deep),
        pytest.param(260, 3, 2, "swiglu", jnp.float32, marks=pytest.mark.deep),
    ],
)
def test_mixture_of_experts_is_the_equation(rng, tokens, experts, top_k, activation, dtype, implementation):
    """Some tokens have no experts and are NaN; an expert has no pairs, one or many tiles of them."""
    weights = make(rng, experts, dtype, activation)
    x, chosen = np.array(draw_tokens(rng, tokens)), choose(rng, tokens, experts, top_k)
    factors = rng.uniform(0, 1, (tokens, top_k)).astype(np.float32)
    chosen[tokens // 2 :: 5] = -1
    x[tokens // 2 :: 5] = np.nan
    factors[tokens // 2 :: 5] = np.nan
    x = jnp.asarray(x, dtype)
    arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.asarray(factors)
    out = mixture_of_experts(*arguments, activation=activation, run=by_small_tiles(implementation))
    assert_is_mixture(x, weights, chosen, factors, out, activation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_searched_and_sorted_tiles_give_the_same_bits(rng, implementation):
    """An expert's pairs are in several tiles, which lie in several of the blocks that are searched."""
    weights, tokens = make(rng, 5), 110
    x, chosen = draw_tokens(rng, tokens), choose(rng, tokens, 5, 3)
    chosen[20:90, 1:], chosen[95] = 4, -1
    factors = rng.uniform(0, 1, (tokens, 3)).astype(np.float32)
    arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.asarray(factors)
    searched, in_order = (
        mixture_of_experts(*arguments, run=run_by(implementation, dataclasses.replace(SMALL, searched_pairs=pairs)))
        for pairs in (1024, 0)
    )
    np.testing.assert_array_equal(searched, in_order)
    assert_is_mixture(x, weights, chosen, factors, searched)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_weights_are_read_once_for_each_tile_of_chosen_experts_and_no_others(rng, is_sorted):
    """As many programs have a tile as there are begun tiles of the experts that are chosen."""
    rows, experts, pt = 16, 6, pallas_triton.pt
    chosen = rng.choice([-1, 0, 2, 2, 2, 5, 6, 99], 200).astype(np.int32)
    pairs = jnp.asarray(chosen)
    cut = tiles(pairs, experts, rows)._asdict() if is_sorted else dict(chosen=pairs)
    slots = cut["start"].shape[0] if is_sorted else chosen.size

    def kernel(refs):
        tile = pallas_triton._sorted_tile(refs, experts) if is_sorted else pallas_triton._own_tile(refs, rows, experts)
        pt.store(refs.expert_of.at[pt.program_id(1)], jnp.where(tile.any_exists, tile.expert, NO_TILE))

    launch = dict(name="tiles", grid=(1, slots), updates={}, num_warps=1, interpret=True)
    outputs = dict(expert_of=jax.ShapeDtypeStruct((slots,), jnp.int32))
    found = np.asarray(pt.call(kernel, inputs=cut, outputs=outputs, **launch)["expert_of"])
    assert set(found) <= {NO_TILE, *range(experts)}
    for expert in range(experts):
        assert (found == expert).sum() == -(-(chosen == expert).sum() // rows)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_any_routing(rng, tokens, implementation):
    """All tokens choose one expert, some experts twice, and others partly none."""
    weights, x = make(rng, 4), draw_tokens(rng, tokens)
    for chosen in (
        np.full((tokens, 2), 3),
        np.stack([np.arange(tokens) % 4, np.arange(tokens) // 7 % 4], axis=1),
        np.where(rng.random((tokens, 2)) < 0.5, -1, rng.integers(0, 4, (tokens, 2))),
        np.full((tokens, 2), -1),
        np.stack([np.full(tokens, 4), np.arange(tokens) % 5], axis=1),  # there is no expert 4
    ):
        chosen, factors = chosen.astype(np.int32), rng.uniform(0, 1, (tokens, 2)).astype(np.float32)
        arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.asarray(factors)
        out = mixture_of_experts(*arguments, run=by_small_tiles(implementation))
        assert_is_mixture(x, weights, np.where(chosen < 4, chosen, -1), factors, out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [24, 300])
def test_token_does_not_depend_on_other_tokens(rng, tokens, implementation, optimized_programs):
    """Among other tokens, elsewhere among them, and beside tokens without experts."""
    weights, x, chosen = make(rng, 4), draw_tokens(rng, tokens), choose(rng, tokens, 4, 2)
    factors = jnp.asarray(rng.uniform(0, 1, (tokens, 2)), jnp.float32)
    run = lambda x, chosen, factors: np.asarray(
        mixture_of_experts(
            x, weights.up, weights.down, jnp.asarray(chosen), factors, run=by_small_tiles(implementation)
        )
    )
    together = run(x, chosen, factors)
    order = rng.permutation(tokens)
    np.testing.assert_array_equal(run(x[order], chosen[order], factors[order]), together[order])
    alone = np.where(np.arange(tokens)[:, None] == tokens // 2, chosen, -1)
    np.testing.assert_array_equal(run(x, alone, factors)[tokens // 2], together[tokens // 2])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "activation", "dtype"),
    [
        (37, 6, 3, "swiglu", jnp.bfloat16),
        (9, 4, 1, "relu2", jnp.float16),
        (65, 4, 2, "swiglu", jnp.float32),
    ],
)
def test_total_of_the_sums_is_the_mixture(rng, tokens, experts, top_k, activation, dtype, implementation):
    """Some tokens have no experts and are NaN, some lack one expert, and one names an expert that does not exist."""
    weights = make(rng, experts, dtype, activation)
    chosen, factors = choose(rng, tokens, experts, top_k), rng.uniform(0, 1, (tokens, top_k)).astype(np.float32)
    chosen[1::5], factors[1::5] = -1, np.nan
    chosen[2::7, 0], chosen[3:4, -1] = -1, experts
    x = np.array(draw_tokens(rng, tokens))
    x[1::5] = np.nan
    x = jnp.asarray(x, dtype)
    arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.asarray(factors)
    sums = mixture_of_experts_sums(*arguments, activation=activation, run=by_small_tiles(implementation))
    assert (sums.shape, sums.dtype) == ((top_k, tokens, HIDDEN), dtype)
    sums = sums.astype(jnp.float32)
    # A pair without an expert has a share of zeros, whatever its token holds.
    assert np.isfinite(np.asarray(sums)).all()
    assert not np.asarray(sums).transpose(1, 0, 2)[(chosen < 0) | (chosen >= experts)].any()
    assert_is_mixture(x, weights, chosen, factors, sums.sum(axis=0).astype(dtype), activation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_of_a_token_do_not_depend_on_other_tokens(rng, implementation, optimized_programs):
    weights, tokens = make(rng, 4), 24
    x, chosen = draw_tokens(rng, tokens), choose(rng, tokens, 4, 2)
    factors = jnp.asarray(rng.uniform(0, 1, (tokens, 2)), jnp.float32)
    run = lambda x, chosen, factors: np.asarray(
        mixture_of_experts_sums(
            x, weights.up, weights.down, jnp.asarray(chosen), factors, run=by_small_tiles(implementation)
        )
    )
    together, order = run(x, chosen, factors), rng.permutation(tokens)
    np.testing.assert_array_equal(run(x[order], chosen[order], factors[order]), together[:, order])
    alone = np.where(np.arange(tokens)[:, None] == 12, chosen, -1)
    np.testing.assert_array_equal(run(x, alone, factors)[:, 12], together[:, 12])


def test_sums_of_sorted_and_searched_pairs_have_the_same_bits(rng):
    """Tokens without experts hold NaN, tiles are short and whole, and one call has no expert at all."""
    weights, x, chosen = make(rng, 4), np.array(draw_tokens(rng, 20)), choose(rng, 20, 4, 2)
    chosen[::3], x[::3] = -1, np.nan
    factors = jnp.asarray(rng.uniform(0, 1, (20, 2)), jnp.float32)
    for chosen_ in (chosen, np.full_like(chosen, 4)):
        searched, in_order = (
            mixture_of_experts_sums(
                jnp.asarray(x), weights.up, weights.down, jnp.asarray(chosen_), factors,
                run=run_by("interpret", config),
            )
            for config in (SMALL, dataclasses.replace(SMALL, searched_pairs=0, rows=32, short_rows=16))
        )  # fmt: skip
        np.testing.assert_array_equal(searched, in_order)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("has_rest", [False, True])
@pytest.mark.parametrize(
    ("pairs", "experts", "rows"),
    [(1, 1, 16), (300, 5, 16), (1025, 257, 16), (9000, 256, 128), pytest.param(70000, 513, 128, marks=pytest.mark.gpu)],
)
def test_kernels_cut_the_tiles_that_xla_cuts(rng, pairs, experts, rows, has_rest, implementation):
    """Some pairs have no expert, some experts have no pairs, and blocks of pairs have a rest."""
    chosen = jnp.asarray(rng.integers(-1, experts + 1, pairs) * (rng.random(pairs) < 0.7), jnp.int32)
    wanted = tiles(chosen, experts, rows, has_rest=has_rest)
    found = tiles_by_kernels(chosen, experts, rows, has_rest=has_rest, interpret=implementation == "interpret")
    for name in Tiles._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "activation", "dtype"),
    [
        # Every pair of two of them.
        (tokens, ("swiglu", "relu2")[(m + n) % 2], dtype)
        for m, tokens in enumerate([1, 16, 33, 64, 65, 300, 2000])
        for n, dtype in enumerate([jnp.float32, jnp.bfloat16, jnp.float16])
    ],
)
def test_default_configuration(rng, tokens, activation, dtype):
    """The default tiles, over sizes that they divide and sizes that they do not."""
    for hidden, size in ((256, 512), (200, 136)):
        weights = make(rng, 16, dtype, activation, hidden, size)
        x, chosen = draw_tokens(rng, tokens, dtype, hidden), choose(rng, tokens, 16, 4)
        factors = rng.uniform(0, 1, (tokens, 4)).astype(np.float32)
        arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.asarray(factors)
        out = mixture_of_experts(*arguments, activation=activation, run=run_by("triton"))
        assert_is_mixture(x, weights, chosen, factors, out, activation)
        sums = mixture_of_experts_sums(*arguments, activation=activation, run=run_by("triton"))
        sums = sums.astype(jnp.float32).sum(axis=0).astype(dtype)
        assert_is_mixture(x, weights, chosen, factors, sums, activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_short_tiles_have_the_bits_of_whole_ones(rng, activation, dtype):
    """A pair is in a short tile or in a whole one, depending on how many pairs of its expert come before it."""
    weights, tokens = make(rng, 5, dtype, activation, 264, 256), 700
    x, chosen = draw_tokens(rng, tokens, dtype, 264), choose(rng, tokens, 5, 2)
    factors = jnp.asarray(rng.uniform(0, 1, (tokens, 2)), jnp.float32)
    config = default_config(8192 * 8, 256, 2)
    assert config.short_rows is not None
    assert chosen.size > config.searched_pairs
    run = lambda x, chosen, factors, config=config: np.asarray(
        mixture_of_experts_sums(
            x, weights.up, weights.down, jnp.asarray(chosen), factors, activation=activation, run=run_by("triton", config),
        ).astype(jnp.float32)
    )  # fmt: skip
    together, order = run(x, chosen, factors), rng.permutation(tokens)
    np.testing.assert_array_equal(run(x[order], chosen[order], factors[order]), together[:, order])
    np.testing.assert_array_equal(run(x, chosen, factors, dataclasses.replace(config, short_rows=None)), together)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 2000])
@pytest.mark.large_pool
def test_weights_beyond_2_to_the_31_elements(rng, tokens):
    """The last expert's weights are read, and not those whose offset is smaller by 2^31."""
    hidden, size = 1024, 512
    experts = 2**31 // (2 * size * hidden) + 2
    small = make(rng, 1, jnp.bfloat16, hidden=hidden, size=size)
    up = jnp.zeros((experts, 2 * size, hidden), jnp.bfloat16).at[-1].set(small.up[0])
    down = jnp.zeros((experts, hidden, size), jnp.bfloat16).at[-1].set(small.down[0])
    x, chosen = draw_tokens(rng, tokens, jnp.bfloat16, hidden), jnp.full((tokens, 1), experts - 1, jnp.int32)
    factors = jnp.ones((tokens, 1), jnp.float32)
    out = mixture_of_experts(x, up, down, chosen, factors, run=run_by("triton"))
    assert_is_mixture(x, small, np.zeros((tokens, 1), np.int32), np.ones((tokens, 1)), out)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("dtype", "activation"), [(jnp.float32, "swiglu"), (jnp.bfloat16, "relu2")])
def test_routed_sums_are_those_of_the_chosen_experts(rng, scores, dtype, activation, implementation):
    """The logits come in shares."""
    routed, shared, top_k, tokens = 12, 2, 3, 3
    weights, x = make(rng, routed + shared, dtype, activation), draw_tokens(rng, tokens, dtype)
    logits = jnp.asarray(rng.normal(size=(2, tokens, routed + 1)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=routed), jnp.float32)
    options = dict(scores=scores, groups=4, top_groups=2, scale=2.5, shared=shared, shared_gate=True)
    routing = Routing(top_k=top_k, logits_dtype=x.dtype.name, **options)
    arguments = x, logits, weights.up, weights.down, routing
    sums = routed_experts_sums(*arguments, bias=bias, activation=activation, run=by_small_tiles(implementation))
    assert (sums.shape, sums.dtype) == ((top_k + shared, tokens, HIDDEN), dtype)
    rounded = np.asarray(logits.sum(axis=0).astype(dtype).astype(jnp.float32))
    chosen, factors = oracle.choose_experts(rounded, top_k, bias=np.asarray(bias), **options)
    total = sums.astype(jnp.float32).sum(axis=0).astype(dtype)
    assert_is_mixture(x, weights, chosen, factors.astype(np.float32), total, activation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sums_are_rounded_once_to_the_dtype_of_the_result(rng, implementation):
    weights, x, chosen = make(rng, 4, jnp.bfloat16), draw_tokens(rng, 20, jnp.bfloat16), choose(rng, 20, 4, 2)
    arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.ones((20, 2), jnp.float32)
    wide, narrow = (
        mixture_of_experts(*arguments, out_dtype=dtype, run=by_small_tiles(implementation))
        for dtype in ("float32", None)
    )
    assert (wide.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(wide.astype(jnp.bfloat16), narrow)


def test_calls_without_tokens(rng):
    weights = make(rng, 2)
    chosen, factors = choose_experts(jnp.zeros((0, 4)), Routing(top_k=2))
    assert chosen.shape == factors.shape == (0, 2)
    arguments = draw_tokens(rng, 0), weights.up, weights.down, chosen, factors
    assert mixture_of_experts(*arguments).shape == (0, HIDDEN)
    assert mixture_of_experts_sums(*arguments).shape == (1, 0, HIDDEN)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(activation="gelu"), "activation must be one of .*, got 'gelu'"),
        (dict(activation="relu2"), "up must have 1 x 40 outputs for 'relu2', got 80"),
        (dict(up=jnp.zeros((2, 80, HIDDEN), jnp.bfloat16)), "must have the dtype of x, float32, got bfloat16 and"),
        (dict(chosen=jnp.zeros((3, 2), jnp.float32)), "chosen must be Int32"),
        (dict(weights=jnp.zeros((3, 1), jnp.float32)), "weights must be Float32"),
        (dict(run=Run(config=SMALL.up)), r"run.config must be Config or None, got Product\("),
    ],
)
def test_bad_arguments(rng, change, message):
    weights = make(rng, 2)
    arguments = dict(x=draw_tokens(rng, 3), up=weights.up, down=weights.down)
    arguments |= dict(chosen=jnp.zeros((3, 2), jnp.int32), weights=jnp.ones((3, 2), jnp.float32))
    for op in (mixture_of_experts, mixture_of_experts_sums):
        with pytest.raises(ValueError, match=f"^{op.__name__}: .*{message}"):
            op(**arguments | change)
