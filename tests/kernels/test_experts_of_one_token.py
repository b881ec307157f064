"""The experts of a single token: its own kernels, its one share, and the choice inside the first product."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import run_by
from kernels.mixtures import SMALL, Weights, assert_is_mixture, draw_tokens, make
from oracles import ops as oracle

from pallas_kernels import Routing, choose_experts, mixture_of_experts, mixture_of_experts_sums, routed_experts_sums
from pallas_kernels.mixture_of_experts.config import Config, Product

# All inputs at once; in turns, of which the last one has a rest; and the tiles of more tokens.
CONFIGS = {
    "at once": Config(1, Product(1, 32, 1, 99), Product(2, 32, 1, 99)),
    "in turns": Config(1, Product(2, 32, 1, 2), Product(4, 32, 1, 3)),
    "tiles": SMALL,
}
RUNS = [("xla", None), *(("interpret", name) for name in CONFIGS)]
RUNS += [pytest.param("triton", name, marks=pytest.mark.gpu) for name in (None, *CONFIGS)]
RULES = [
    dict(scores="softmax"),
    dict(scores="softmax", renormalise=False, scale=0.5),
    dict(scores="sigmoid", groups=4, top_groups=2, scale=2.5),
    dict(scores="sigmoid", shared=1),
    dict(scores="softmax", shared=2, shared_gate=True),
]


def configured(implementation, name):
    return run_by(implementation, None if name is None else CONFIGS[name])


def with_nan(weights, chosen):
    """The same weights with NaN in all experts that are not chosen."""
    unread = ~np.isin(np.arange(weights.up.shape[0]), chosen)
    return Weights(*(jnp.where(unread[:, None, None], jnp.nan, x).astype(x.dtype) for x in (weights.up, weights.down)))


@pytest.mark.parametrize(("implementation", "name"), RUNS)
@pytest.mark.parametrize(
    ("hidden", "size", "activation", "dtype"),
    [
        (72, 40, "swiglu", jnp.float32),
        (256, 64, "swiglu", jnp.bfloat16),
        (96, 160, "swiglu", jnp.float16),
        (203, 131, "relu2", jnp.bfloat16),
        (96, 33, "relu2", jnp.float16),
    ],
)
def test_token_gets_the_sum_of_its_experts_in_one_share(rng, hidden, size, activation, dtype, implementation, name):
    """It has an expert twice, none, one that does not exist, or no expert at all; the other experts' weights are NaN."""
    whole, x = make(rng, 7, dtype, activation, hidden, size), draw_tokens(rng, 1, dtype, hidden)
    for chosen in ([5, 0, 2], [3, -1, 3], [7, 6, -2], [-1, -1, -1]):
        chosen = np.asarray([chosen], np.int32)
        exists = (chosen >= 0) & (chosen < 7)
        # The weight of none is never used.
        factors = np.where(exists, rng.uniform(0, 1, chosen.shape), np.nan).astype(np.float32)
        weights = with_nan(whole, chosen)
        arguments = x, weights.up, weights.down, jnp.asarray(chosen), jnp.asarray(factors)
        options = dict(activation=activation, run=configured(implementation, name))
        sums = mixture_of_experts_sums(*arguments, **options)
        assert (sums.shape, sums.dtype) == ((1, 1, hidden), jnp.float32)
        wanted = x, whole, np.where(exists, chosen, -1), np.nan_to_num(factors)
        assert_is_mixture(*wanted, sums[0].astype(dtype), activation)
        out = mixture_of_experts(*arguments, **options)
        assert_is_mixture(*wanted, out, activation)
        wide = mixture_of_experts(*arguments, out_dtype="float32", **options)
        np.testing.assert_array_equal(wide.astype(dtype), out)


@pytest.mark.parametrize(("implementation", "name"), RUNS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.values())))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_rule_chooses_inside_the_first_product(rng, rule, dtype, implementation, name):
    """The logits come in shares, some rules have a bias, and the experts that are not chosen are NaN."""
    routed, top_k, shared = 44, 5, rule.get("shared", 0)
    whole, x = make(rng, routed + shared, dtype), draw_tokens(rng, 1, dtype)
    logits = rng.normal(size=(3, 1, routed + rule.get("shared_gate", False))).astype(np.float32)
    bias = rng.normal(size=routed).astype(np.float32) if rule["scores"] == "sigmoid" else None
    total = jnp.asarray(logits.sum(axis=0)).astype(dtype).astype(jnp.float32)
    chosen, factors = oracle.choose_experts(np.asarray(total), top_k, bias=bias, **rule)
    weights = with_nan(whole, chosen)
    sums = routed_experts_sums(
        x, jnp.asarray(logits), weights.up, weights.down,
        Routing(top_k=top_k, logits_dtype=jnp.dtype(dtype).name, **rule),
        bias=None if bias is None else jnp.asarray(bias), valid=jnp.ones(1, bool), run=configured(implementation, name),
    )  # fmt: skip
    assert (sums.shape, sums.dtype) == ((1, 1, x.shape[1]), jnp.float32)
    assert_is_mixture(x, whole, chosen, factors.astype(np.float32), sums[0].astype(dtype))


@pytest.mark.parametrize(("implementation", "name"), RUNS)
@pytest.mark.parametrize("groups", [1, 4])
def test_choice_in_the_kernel_is_that_of_choose_experts(rng, groups, implementation, name):
    """Equal scores choose the first experts, whose bits are then those of a call that has the choice."""
    weights, x = make(rng, 65), draw_tokens(rng, 1)
    drawn = rng.integers(-2, 3, (1, 64)).astype(np.float32)
    for logits in (np.zeros((1, 64), np.float32), drawn, np.where(drawn > 1, -np.inf, drawn)):
        logits, options = jnp.asarray(logits), dict(groups=groups, top_groups=max(1, groups // 2), shared=1)
        routing = Routing(top_k=8, **options)
        chosen, factors = choose_experts(logits, routing, run=run_by(implementation))
        wanted, _ = oracle.choose_experts(np.asarray(logits), 8, **options)
        np.testing.assert_array_equal(chosen, wanted)
        run = configured(implementation, name)
        found = routed_experts_sums(x, logits, weights.up, weights.down, routing, run=run)
        apart = mixture_of_experts_sums(x, weights.up, weights.down, chosen, factors, run=run)
        if implementation == "triton":
            np.testing.assert_array_equal(found, apart)
        else:  # XLA may add in another order.
            np.testing.assert_allclose(found, apart, atol=1e-5)


@pytest.mark.parametrize(("implementation", "name"), RUNS)
def test_padding_token_has_no_routed_sums(rng, implementation, name):
    """It holds NaN, and so do its logits and all weights."""
    weights = with_nan(make(rng, 6), [])
    arguments = draw_tokens(rng, 1) * jnp.nan, jnp.full((2, 1, 6), jnp.nan), weights.up, weights.down
    routing = Routing(top_k=2, shared=1, shared_gate=True)
    sums = routed_experts_sums(*arguments, routing, valid=jnp.zeros(1, bool), run=configured(implementation, name))
    assert (sums.shape, sums.dtype) == ((1, 1, weights.up.shape[2]), jnp.float32)
    assert not np.asarray(sums).any()
