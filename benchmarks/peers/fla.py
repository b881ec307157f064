"""flash-linear-attention's Triton kernels (fla-core, measured with 0.6.0).

`fla` must be importable, by an installation or by its wheel unpacked on the path. By default its states are [key_dim,
value_dim]. It returns new states and does not store them.
"""

from collections.abc import Callable
from typing import Any

import jax
import torch
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda

from benchmarks.peers import Launch, gathered, views


def _prefill(op: Callable[..., Any], benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given = views(benchmark)
    initial = [states.transpose(-1, -2).contiguous() for states in gathered(benchmark, pools[0])]
    inputs = [given[name][None] for name in ("q", "k", "v", "g", "beta")]
    starts = given["query_start_loc"].long()

    @torch.no_grad()
    def launch(turn):
        out, state = op(
            *inputs, initial_state=initial[turn % len(initial)], output_final_state=True, cu_seqlens=starts,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return state.transpose(-1, -2), out[0]

    return launch


def gdn_prefill(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    return _prefill(chunk_gated_delta_rule, benchmark, pools)


def kda_prefill(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    return _prefill(chunk_kda, benchmark, pools)


# The adapters, by the first word of a case's name.
ADAPTERS = {"gdn_prefill": gdn_prefill, "kda_prefill": kda_prefill}
