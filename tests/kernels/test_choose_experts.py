import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.common import IMPLEMENTATIONS, run_by
from kernels.grouped import call
from oracles import ops as oracle

from pallas_kernels import Routing, choose_experts


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("experts", "groups", "top_groups", "top_k", "renormalise", "scale"),
    [
        (12, 4, 2, 3, True, 2.5),
        (12, 1, 1, 3, True, 1.0),
        (12, 2, 1, 6, False, 1.0),
        (10, 5, 5, 1, False, 0.5),
        (256, 8, 4, 8, True, 2.5),
    ],
)
def test_choose_experts_is_the_equation(
    rng, experts, groups, top_groups, top_k, renormalise, scale, scores, implementation
):
    logits, bias = rng.normal(size=(20, experts)).astype(np.float32), rng.normal(size=experts).astype(np.float32)
    valid = np.arange(20) % 6 != 5
    logits[~valid] = np.nan
    options = dict(scores=scores, groups=groups, top_groups=top_groups, renormalise=renormalise, scale=scale)
    with_gate = np.concatenate([logits, rng.normal(size=(20, 1)).astype(np.float32)], axis=1)
    for outputs, given, shared in (
        (logits, dict(bias=bias, valid=valid), {}),
        (logits, dict(valid=valid), dict(shared=2)),
        (with_gate, dict(valid=valid), dict(shared=1, shared_gate=True)),
    ):
        arrays = {name: jnp.asarray(array) for name, array in given.items()}
        options |= shared
        routing = Routing(top_k=top_k, **options)
        chosen, weights = choose_experts(jnp.asarray(outputs), routing, **arrays, run=run_by(implementation))
        wanted, wanted_weights = oracle.choose_experts(outputs, top_k, **options, **given)
        np.testing.assert_array_equal(chosen, wanted)
        assert (chosen.dtype, weights.dtype) == (jnp.int32, jnp.float32)
        np.testing.assert_allclose(np.asarray(weights)[valid], wanted_weights[valid], rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shares_of_logits_are_added_and_rounded(rng, dtype, implementation, optimized_programs):
    """The kernel's result has the bits of a call with their total, also if that has been rounded."""
    shares = jnp.asarray(rng.normal(size=(3, 20, 13)), jnp.float32).at[:, 7].set(jnp.nan)
    routing, options = Routing(top_k=3, shared=2, shared_gate=True), dict(valid=jnp.arange(20) != 7)
    options |= dict(run=run_by(implementation))
    total = ((shares[0] + shares[1]) + shares[2]).astype(dtype)
    wanted = choose_experts(total, routing, **options)
    found = choose_experts(shares, dataclasses.replace(routing, logits_dtype=str(total.dtype)), **options)
    np.testing.assert_array_equal(found[0], wanted[0])
    # XLA may leave out a rounding whose result is widened at once. Interpreted, it may add lanes in another order.
    tolerance = {"xla": jnp.finfo(dtype).eps, "interpret": jnp.finfo(jnp.float32).eps, "triton": 0}[implementation]
    np.testing.assert_allclose(found[1], wanted[1], rtol=8 * float(tolerance))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("groups", [1, 4])
def test_equal_scores_choose_the_first_experts(implementation, groups):
    routing = Routing(top_k=3, groups=groups, top_groups=min(groups, 2))
    chosen, _ = choose_experts(jnp.zeros((2, 16)), routing, run=run_by(implementation))
    assert np.array_equal(chosen, [[0, 1, 2]] * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(scores="relu"), "routing.scores must be 'softmax' or 'sigmoid', got 'relu'"),
        (dict(groups=5), "routing.groups must divide 12 experts, got 5"),
        (dict(groups=4, top_groups=5), "routing.top_groups must be from 1 to groups = 4, got 5"),
        (dict(groups=4, top_groups=1, top_k=4), "routing.top_k must be from 1 to 3, got 4"),
        (dict(groups=12, top_groups=3), "a group must have at least 2 experts, got 12 experts in 12 groups"),
        (dict(valid=jnp.ones(3, bool)), "valid must be Bool"),
        (dict(bias=jnp.zeros(11)), "bias must have an element for each of 12 experts, got 11"),
        (dict(shared=-1), "routing.shared must be at least 0, and at least 1 with shared_gate, got -1"),
        (dict(logits=jnp.zeros((0, 2, 12))), "logits must have at least one partial sum, got none"),
        (dict(logits=jnp.zeros(12)), r"logits must be Float\[tokens outputs\] or Float\[splits tokens outputs\], got"),
        (dict(top_k=None), "routing.top_k must be int, got None"),
        (dict(renormalise=1), "routing.renormalise must be bool, got 1"),
        (
            dict(logits_dtype="bf16"),
            "routing.logits_dtype must be the name of a floating-point dtype or None, got 'bf16'",
        ),
        (dict(config=3), "run.config must be None, got 3"),
        (dict(shared_gate=True), "routing.shared must be at least 0, and at least 1 with shared_gate, got 0"),
    ],
)
def test_bad_arguments_of_choose_experts(change, message):
    arguments = dict(logits=jnp.zeros((2, 12)), top_k=2) | change
    with pytest.raises(ValueError, match=f"^choose_experts: {message}"):
        call(choose_experts, **arguments)
