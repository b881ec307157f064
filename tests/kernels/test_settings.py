"""JAX's global settings, 64-bit mode and matmul precision, do not change the ops' results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    add_rms_norm,
    causal_conv1d_prefill,
    causal_conv1d_update,
    chunk_rows,
    gated_delta_rule_deferred,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
    linear,
    linear_sums,
    paged_attention,
    rotate_and_store,
    selective_scan,
    selective_scan_deferred,
    selective_state_deferred,
    selective_state_update,
    ssd,
    state_copy,
)

HEADS, DIM = 2, 16
CHANNELS = 3 * HEADS * DIM


def run(draw, implementation):
    """Runs every op once, on the same numbers."""
    array = lambda *shape: jnp.asarray(draw.normal(size=shape), jnp.float32)
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    x, weight, loc = array(6, CHANNELS), array(4, CHANNELS), ints(0, 1, 6)
    conv, recurrent = array(1, 6, 5, CHANNELS), array(1, 6, HEADS, DIM, DIM)
    a, b, A_log, dt_bias = array(6, HEADS), array(6, HEADS), array(HEADS), array(HEADS)
    rows = 0, weight, None, loc, ints(1, 0), ints(1, 0), ints(2, 3)
    how = dict(implementation="triton", interpret=True) if implementation == "interpret" else dict(implementation="xla")
    q, k, v = jnp.split(x.reshape(6, 3 * HEADS, DIM), 3, axis=1)
    g, beta = gated_delta_rule_gates(a, b, A_log, dt_bias)
    rates = -jnp.abs(recurrent[0, 0])
    states = recurrent, 0, loc, ints(1, 0), jnp.pad(ints(2, 3)[:, None], ((0, 0), (0, 4)))
    chunks = chunk_rows(loc, ints(3, 0), 6, 16)  # short chunks make small programs
    prefill = recurrent, 0, loc, chunks, ints(1, 0), ints(2, 3), ints(1, 0)[:, None], ints(4, 0)[:, None]
    narrow = lambda *arrays: [x.astype(jnp.bfloat16) for x in arrays]
    rings = array(1, 2, HEADS, 32, DIM), array(1, 2, HEADS, 32, DIM), -jnp.abs(array(1, 2, HEADS, 32))
    deferred = 0, loc, ints(0, 1), ints(3, 0), ints(17, 14), ints(1, 0), ints(2, 3)  # folds, and crosses a group's end
    of_scan = rings[0], rings[1], rings[1]
    of_mamba = (
        array(1, 2, HEADS, 32, DIM),
        array(1, 2, 1, 32, DIM),
        *(-jnp.abs(array(1, 2, HEADS, 32)) for _ in range(2)),
    )
    pages = array(1, 6, 4, HEADS, DIM)
    attention = pages, pages, 0, loc, ints(3, 9), ints(1, 2, 3, 4, 5, 0).reshape(2, 3).repeat(2, axis=1)
    return (
        state_copy(recurrent, ints(1, 2), ints(3, 4), **how),
        state_copy(conv, ints(1, 2), ints(3, 2), ints(1, 2), **how),
        causal_conv1d_update(x[:3], conv, 0, weight, None, ints(0, 1, 3), *rows[4:], **how),
        gated_delta_rule_update(x, a, b, A_log, dt_bias, *states, **how),
        gated_delta_rule_deferred(x, a, b, A_log, dt_bias, recurrent, *rings, *deferred, max_query_tokens=5, **how),
        selective_state_deferred(
            x[:, : 4 * DIM], a, -jnp.exp(A_log), recurrent, *of_mamba, *deferred, max_query_tokens=5, D=dt_bias, **how
        ),
        gated_delta_rule_recurrent(q, k, v, -jnp.abs(k), beta, *states, **how),
        selective_state_update(v, a, -jnp.exp(A_log), q, k, *states, D=dt_bias, z=k, dt_bias=dt_bias, **how),
        ssd(*narrow(v, a), -jnp.exp(A_log), *narrow(q, k), *prefill, D=dt_bias, z=k.astype(jnp.bfloat16), **how),
        gated_delta_rule_prefill(*narrow(q, k, v), g, beta, *prefill, **how),
        gated_delta_rule_prefill(q, k, v, -jnp.abs(k), beta, *prefill, **how),
        causal_conv1d_prefill(x, conv, *rows, ints(0, 3)[:, None], ints(0, 4)[:, None], **how),
        paged_attention(q, *attention, max_query_tokens=5, **how),
        paged_attention(*narrow(q, pages, pages), *attention[2:], **how),
        rotate_and_store(
            q, k, v, a, b, pages, pages, 0, ints(*range(6)), ints(0, 1, 2, 3, 0, 1), q[0, 0], k[0, 0], **how
        ),
        linear(a, b, a[:, 0], parts=(2, 4), **how),
        linear(*narrow(a, b), is_gated=True, **how),
        linear_sums(a, b, **how),
        add_rms_norm(a, b[None], A_log, epsilon=1e-6, **how),
        selective_scan_deferred(
            v, k, rates, q, k, recurrent, *of_scan, *deferred, max_query_tokens=5, D=k[1], z=k, **how
        ),
        selective_scan(v, k, rates, q, k, *states[:4], ints(2, 3), D=k[1], z=k, **how),
    )


@pytest.mark.usefixtures("optimized_programs")
@pytest.mark.parametrize("implementation", ["xla", pytest.param("interpret", marks=pytest.mark.deep)])
def test_global_settings_change_no_bit(implementation):
    wanted = run(np.random.default_rng(0), implementation)
    with jax.enable_x64(True), jax.default_matmul_precision("bfloat16"):
        actual = run(np.random.default_rng(0), implementation)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
