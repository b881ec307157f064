"""vLLM's Triton kernels (measured with 0.33.0).

`vllm` must be importable, by an installation or by its wheel unpacked on the path.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import torch
from vllm.model_executor.layers.mamba.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllm.model_executor.layers.mamba.ops.mamba_ssm import selective_state_update
from vllm.model_executor.layers.mamba.ops.ssd_combined import mamba_chunk_scan_combined_varlen
from vllm.third_party.flash_linear_attention.ops.chunk import chunk_gated_delta_rule
from vllm.third_party.flash_linear_attention.ops.fused_recurrent import (
    fused_recurrent_gated_delta_rule_packed_decode,
)
from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import fused_sigmoid_gating_delta_rule_update
from vllm.third_party.flash_linear_attention.ops.kda import chunk_kda, fused_recurrent_kda
from vllm.v1.worker.mamba_utils import precopy_mamba_align_fused_kernel

from benchmarks.peers import Launch, gathered, view, views
from pallas_kernels import chunk_rows


def state_copy(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    """Copies all layers and both kinds of state in one launch. Block ids come from a table of two columns per row."""
    case, given = benchmark.case, views(benchmark)
    layers = [
        (pool[layer], len(state)) for pool, (state, _) in zip(map(view, pools), case.states, strict=True)
        for layer in range(case.layers)
    ]  # fmt: skip
    i64 = functools.partial(torch.tensor, dtype=torch.int64, device="cuda")
    i32 = functools.partial(torch.tensor, dtype=torch.int32, device="cuda")
    tables = [
        torch.stack([read, write], dim=1).contiguous()
        for read, write in zip(given["read"], given["write"], strict=True)
    ]
    pointers = [i64([table.data_ptr()]) for table in tables]
    crosses = given["read"][0] != given["write"][0]
    target = torch.ones(case.rows, dtype=torch.int32, device="cuda")
    source = torch.where(crosses, 0, 1).to(torch.int32)
    rows, bias = torch.arange(case.rows, dtype=torch.int32, device="cuda"), torch.full_like(target, case.offset)
    metadata = (
        i64([state.data_ptr() for state, _ in layers]),
        i64([state.stride(0) * state.element_size() for state, _ in layers]),
        i32([state.element_size() for state, _ in layers]),
        i64([state[0, 0].numel() if ndim == 2 else state[0].numel() for state, ndim in layers]),
        i32([state.shape[1] if ndim == 2 else 0 for state, ndim in layers]),
        i32([0] * len(layers)),
        i32([0] * len(layers)),
        i64([0] * len(layers)),
    )

    def launch(turn):
        chosen = turn % len(tables)
        precopy_mamba_align_fused_kernel[(case.rows, len(layers), 16)](
            target, source, bias, pointers[chosen], tables[chosen].stride(0),
            *metadata, rows, case.rows,
            COPY_BLOCK_SIZE=1024, CONV_STATE_DIM_FIRST=False, HAS_IDX_MAPPING=True, TEMPORAL_TILES=16,
        )  # fmt: skip
        return ()

    return launch


def conv_update(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given = views(benchmark)
    windows, weight = view(pools[0])[0].transpose(1, 2), given["weight"].T.contiguous()
    x, out = given["x"], torch.empty_like(given["x"])
    verify = {}
    if benchmark.case.num_speculative_tokens:
        accepted = torch.ones(len(benchmark.case.lengths), dtype=torch.int32, device="cuda")
        verify = dict(
            num_accepted_tokens=accepted,
            query_start_loc=given["query_start_loc"],
            max_query_len=max(benchmark.case.lengths),
        )

    def launch(turn):
        read = given["read"][turn % len(given["read"])]
        causal_conv1d_update(x, windows, weight, None, "silu", conv_state_indices=read, out=out, **verify)
        return (out,)

    return launch


def gdn_decode(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given, case = views(benchmark), benchmark.case
    pool = view(pools[0])[0]
    out = given["qkv"].new_empty(len(case.lengths), 1, case.value_heads, case.value_dim)
    rows = given["write"][..., 0].contiguous()

    def launch(turn):
        fused_recurrent_gated_delta_rule_packed_decode(
            given["qkv"], given["a"], given["b"], given["A_log"], given["dt_bias"], case.key_dim**-0.5, pool, out,
            rows[turn % len(rows)], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return (out[:, 0],)

    return launch


def gdn_verify(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given, case = views(benchmark), benchmark.case
    pool, blocks = view(pools[0])[0], given["write"]
    keys = case.key_heads * case.key_dim

    def heads(x, dim):
        return x.reshape(1, x.shape[0], -1, dim).contiguous()

    q, k, v = given["qkv"].split([keys, keys, case.value_heads * case.value_dim], dim=1)
    q, k, v = heads(q, case.key_dim), heads(k, case.key_dim), heads(v, case.value_dim)
    accepted = torch.ones(len(case.lengths), dtype=torch.int32, device="cuda")

    def launch(turn):
        out, _ = fused_sigmoid_gating_delta_rule_update(
            given["A_log"], given["a"], given["b"], given["dt_bias"], q, k, v,
            initial_state=pool, cu_seqlens=given["query_start_loc"], ssm_state_indices=blocks[turn % len(blocks)],
            num_accepted_tokens=accepted, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return (out[0],)

    return launch


def kda_decode(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given = views(benchmark)
    pool, rows = view(pools[0])[0], given["write"][..., 0].contiguous()
    inputs = [given[name][None] for name in ("q", "k", "v", "g", "beta")]

    def launch(turn):
        out, _ = fused_recurrent_kda(
            *inputs,
            initial_state=pool,
            cu_seqlens=given["query_start_loc"],
            ssm_state_indices=rows[turn % len(rows)],
            use_qk_l2norm_in_kernel=True,
        )
        return (out[0],)

    return launch


def state_space_update(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given, case = views(benchmark), benchmark.case
    pool, out = view(pools[0])[0], torch.empty_like(given["x"])
    channel = case.heads, case.head_dim

    def per_channel(v):
        return v if v.shape[-2:] == channel else v[..., None].expand(*v.shape, case.head_dim)

    A = given["A"] if case.is_mamba1 else given["A"][:, None, None].expand(*channel, case.state_dim)
    dt, D, dt_bias = (per_channel(given[name]) for name in ("dt", "D", "dt_bias"))
    read, write = given["read"], given["write"][..., 0].contiguous()

    def launch(turn):
        chosen = turn % len(read)
        selective_state_update(
            pool, given["x"], dt, A, given["B"], given["C"], D, dt_bias, dt_softplus=True,
            state_batch_indices=read[chosen], dst_state_batch_indices=write[chosen], out=out,
        )  # fmt: skip
        return (out,)

    return launch


def conv_prefill(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    """Runs in place, with programs of eight tokens and the metadata that vLLM's server builds for each step."""
    given = views(benchmark)
    windows, weight = view(pools[0])[0].transpose(1, 2), given["weight"].T.contiguous()
    x, loc = given["x"].T, given["query_start_loc"]
    counts = [-(-length // 8) for length in loc.diff().tolist()]
    programs = np.array([(row, n) for row, count in enumerate(counts) for n in range(count)], np.int32)
    row_of, number_of = (torch.from_numpy(column.copy()).cuda() for column in programs.T)
    of_eight = dict(batch_ptr=row_of, token_chunk_offset_ptr=number_of, tot=len(programs), nums=counts)
    of_eight |= dict(mlist=programs[:, 0], mlist_len=len(programs), offsetlist=programs[:, 1])
    metadata = SimpleNamespace(nums_dict={8: of_eight}, batch_ptr=row_of, token_chunk_offset_ptr=number_of)
    has_initial_state = torch.ones(len(counts), dtype=torch.bool, device="cuda")

    def launch(turn):
        rows = given["write"][turn % len(given["write"])]
        out = causal_conv1d_fn(
            x, weight, None, windows, loc, cache_indices=rows, has_initial_state=has_initial_state,
            activation="silu", metadata=metadata,
        )  # fmt: skip
        return (out.T,)

    return launch


def gdn_prefill(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    given, initial = views(benchmark), gathered(benchmark, pools[0])
    inputs = [given[name][None] for name in ("q", "k", "v", "g", "beta")]

    @torch.no_grad()
    def launch(turn):
        out, state = chunk_gated_delta_rule(
            *inputs, initial_state=initial[turn % len(initial)], output_final_state=True,
            cu_seqlens=given["query_start_loc"], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return state, out[0]

    return launch


def kda_prefill(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    """The outputs overwrite the values, so each turn restores them first.

    The restoring copy is not a kernel, so it does not count in the time. It does count in the span, about 2 %.
    """
    given, initial = views(benchmark), gathered(benchmark, pools[0])
    q, k, v, g, beta = (given[name][None] for name in ("q", "k", "v", "g", "beta"))
    values = v.clone()

    @torch.no_grad()
    def launch(turn):
        values.copy_(v)
        out, state = chunk_kda(
            q, k, values, g, beta, initial_state=initial[turn % len(initial)], output_final_state=True,
            cu_seqlens=given["query_start_loc"], use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        return state, out[0]

    return launch


def ssd_prefill(benchmark: Any, pools: tuple[jax.Array, ...]) -> Launch:
    """Chunks of 128 tokens are cut on the host. New states are stored in the pool."""
    given, initial = views(benchmark), gathered(benchmark, pools[0])
    pool, out, loc = view(pools[0])[0], torch.empty_like(given["x"]), given["query_start_loc"]
    chunks = chunk_rows(loc.cpu().numpy(), np.zeros(len(loc) - 1, np.int32), len(out), 128)
    count = int(chunks.last_chunk_indices[-1]) + 1
    arrays = chunks.cu_chunk_seqlens[: count + 1], chunks.last_chunk_indices, chunks.seq_idx[:count]
    metadata = [torch.from_numpy(np.array(array)).cuda() for array in arrays]
    inputs = [given[name] for name in ("x", "dt", "A", "B", "C")]

    def launch(turn):
        chosen = turn % len(initial)
        mamba_chunk_scan_combined_varlen(
            *inputs, 128, loc, *metadata, out, D=given["D"], z=given.get("z"), dt_bias=given["dt_bias"],
            initial_states=initial[chosen], dt_softplus=True, state_dtype=pool.dtype, final_states_out=pool,
            final_state_indices=given["write"][chosen],
        )  # fmt: skip
        return (out,)

    return launch


# The adapters, by the first word of a case's name. There is none for vLLM's selective scan, which is compiled C++ and
# not part of what an unpacked wheel needs.
ADAPTERS = {
    "state_copy": state_copy,
    "conv_update": conv_update,
    "conv_verify": conv_update,
    "gdn_decode": gdn_decode,
    "gdn_verify": gdn_verify,
    "kda_decode": kda_decode,
    "mamba1_update": state_space_update,
    "mamba2_update": state_space_update,
    "conv_prefill": conv_prefill,
    "gdn_prefill": gdn_prefill,
    "kda_prefill": kda_prefill,
    "ssd_prefill": ssd_prefill,
}
