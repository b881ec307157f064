"""jax-linear-attention's Mosaic GPU kernels for Hopper GPUs (measured with 0.1.0).

`jla` must be importable, by an installation or by its wheel unpacked on the path. Rows must have equal lengths. Its states
are [key_dim, value_dim]. It returns new states and does not store them. Mamba-2's scan is its linear attention with one
decay per head. What Mamba-2 does to its inputs and outputs is compiled together with it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jla.ops.mosaic_gpu.gated_delta_rule import gated_delta_rule
from jla.ops.mosaic_gpu.kda import kda
from jla.ops.mosaic_gpu.scalar_gate import simple_gla

from benchmarks.peers import Launch, Transposed

_OF_TOKENS = "q", "k", "v", "g", "beta", "x", "z", "dt", "B", "C"


def _prefill(
    run: Callable[[dict[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array]],
    benchmark: Any,
    pools: tuple[jax.Array, ...],
) -> Launch:
    """Launches run(inputs, states), which returns outputs and new states. Inputs are [rows, tokens, ...]."""
    lengths = benchmark.case.lengths
    if len(set(lengths)) > 1:
        raise ValueError(f"rows must have equal lengths, got {lengths}")
    initial = [pools[0][0, blocks].swapaxes(-1, -2) for blocks in benchmark.given["write"]]
    in_rows = lambda x: x.reshape(len(lengths), lengths[0], *x.shape[1:])
    inputs = {name: in_rows(x) if name in _OF_TOKENS else x for name, x in benchmark.inputs.items()}

    @jax.jit
    def compiled(inputs, states):
        out, states = run(inputs, states)
        return out.reshape(-1, *out.shape[2:]), states

    def launch(turn):
        out, states = compiled(inputs, initial[turn % len(initial)])
        return Transposed(states), out

    return launch


def _delta_rule(op: Callable[..., Any], inputs: dict[str, jax.Array], states: jax.Array) -> tuple[jax.Array, jax.Array]:
    arrays = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    return op(*arrays, initial_state=states, output_final_state=True, use_qk_l2norm=True)


def _mamba2(inputs: dict[str, jax.Array], states: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, A, B, C = (inputs[name] for name in ("x", "A", "B", "C"))
    dt = jax.nn.softplus(inputs["dt"].astype(jnp.float32) + inputs["dt_bias"])
    values = (dt[..., None] * x).astype(x.dtype)
    out, states = simple_gla(C, B, values, dt * A, scale=1.0, initial_state=states, output_final_state=True)
    out = out + inputs["D"][:, None] * x
    if "z" in inputs:
        out = out * jax.nn.silu(inputs["z"].astype(jnp.float32))
    return out.astype(x.dtype), states


# The adapters, by the first word of a case's name.
ADAPTERS = {
    "gdn_prefill": functools.partial(_prefill, functools.partial(_delta_rule, gated_delta_rule)),
    "kda_prefill": functools.partial(_prefill, functools.partial(_delta_rule, kda)),
    "ssd_prefill": functools.partial(_prefill, _mamba2),
}
