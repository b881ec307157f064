"""A linear-attention backend for tpu-inference: its gated delta nets run on this library's ops.

`register` gives the backend a name, by which tpu-inference selects it. docs/integrations.md says against which version
this was tested, and has the lines that a user adds.
"""

import functools
import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import pallas_kernels as ops
from mamba_align_jax.integrations.delta_rule_step import window_checkpoints
from pallas_kernels import Implementation, Rows, Run

# tpu-inference's null block, which is NULL_BLOCK here.
_NULL = 0
_ATTENTION = "tpu_inference.layers.common.attention_backend"
_STOCK_ATTENTION = "tpu_inference.layers.vllm.backends.flash_attn.PallasAttentionBackend"


def register(name: str = "mamba_align", *, implementation: Implementation | None = None) -> None:
    """Makes `--attention-backend NAME` run tpu-inference's gated delta nets on this library's ops.

    Call it from an entry point of the group `vllm.general_plugins`, which vLLM runs in every process before it reads its
    command line. It may be called again. The full-attention layers keep tpu-inference's own backend.

    Args:
        name: The name of the backend. It must not be one that vLLM has already.
        implementation: "xla" or "triton" for all ops. None lets each op choose: a kernel on NVIDIA GPUs where one can
            run the arguments, and XLA otherwise.

    Raises:
        ImportError: if tpu-inference cannot be imported.
        ValueError: if `implementation` is not a known name, or, from tpu-inference, if vLLM has a backend called `name`.
    """
    backend = linear_attention_backend(implementation)
    tpu_inference: Any = _module()
    tpu_inference.register_attention_backend(
        name,
        attention=tpu_inference.RPAAttentionBackend,
        vllm_backend=_STOCK_ATTENTION,
        linear_attention=backend,
    )


def linear_attention_backend(implementation: Implementation | None = None) -> type:
    """Makes the backend of gated delta nets, a subclass of tpu-inference's `LinearAttentionBackend`, for `register`.

    Calls with the same argument return the same class, which is constructed without arguments.

    Raises:
        ImportError: if tpu-inference cannot be imported.
        ValueError: if `implementation` is not a known name.
    """
    if implementation not in ("xla", "triton", None):
        raise ValueError(f"implementation must be 'xla', 'triton' or None, got {implementation!r}")
    return _backend(_module().LinearAttentionBackend, implementation)


@functools.cache
def _backend(base: type, implementation: Implementation | None) -> type:
    class MambaAlignLinearAttentionBackend(base):
        """Gated delta nets on this library's ops."""

        def conv1d_gdn_kernel(self):
            """Returns the function that tpu-inference calls on each device's heads."""
            return functools.partial(conv1d_gdn, implementation=implementation)

    return MambaAlignLinearAttentionBackend


@functools.partial(
    jax.jit,
    donate_argnames=("conv_state", "recurrent_state"),
    static_argnames=(
        *("n_kq", "n_v", "d_k", "d_v", "kernel_size", "num_spec_tokens", "zero_initialize_out", "compute_precision"),
        *("decode_tile_size", "mixed_tile_size", "implementation"),
    ),
)
def conv1d_gdn(
    qkv: Float[Array, "tokens channels"],
    b: Float[Array, "tokens value_heads"],
    a: Float[Array, "tokens value_heads"],
    conv_state: Float[Array, "slots width_minus_1 channels"],
    recurrent_state: Float[Array, "slots value_heads key_dim value_dim"],
    conv_weight: Float[Array, "channels 1 width"],
    conv_bias: Float[Array, " channels"] | None,
    a_log: Float[Array, " value_heads"],
    dt_bias: Float[Array, " value_heads"],
    query_start_loc: Int[Array, " rows_plus_1"],
    state_indices: Int[Array, " rows"],
    distribution: Int[Array, "3"],
    seq_lens: Int[Array, " rows"],
    read_state_indices: Int[Array, " rows"],
    read_offsets: Int[Array, " rows"] | None = None,
    *,
    n_kq: int,
    n_v: int,
    d_k: int,
    d_v: int,
    kernel_size: int,
    num_spec_tokens: int = 0,
    zero_initialize_out: bool = True,
    compute_precision: Any = jnp.float32.dtype,
    decode_tile_size: int = 4,
    mixed_tile_size: int = 64,
    implementation: Implementation | None = None,
) -> tuple[tuple[Float[Array, "..."], Float[Array, "..."]], Float[Array, "tokens value_channels"]]:
    """Runs the convolution and the gated delta rule of a step, as tpu-inference's `fused_conv1d_gdn` does.

    Rows are decode or verify rows up to `distribution[0]`, prefill rows up to `distribution[2]`, and padding after it. A
    slot is a block, and slot 0 is NULL_BLOCK: it reads as zeros and is never written. A row of which nothing was
    computed before this step reads zeros, whatever its slot holds.

    The equations are those of `pallas_kernels.causal_conv1d_prefill` with a SiLU and `gated_delta_rule_update`. The
    convolution's outputs have qkv's dtype, and all other arithmetic is float32.

    Args:
        qkv: Projected queries, keys and values side by side, before the convolution. All rows, packed.
        b: Raw projection of beta.
        a: Raw decay projection.
        conv_state: Pool of windows, the oldest input first, in qkv's dtype. It is donated.
        recurrent_state: Pool of states. It is donated.
        conv_weight: Taps; the last one is for the current token.
        conv_bias: Bias that is added before the SiLU, or None.
        a_log: Logarithm of the decay rate, per value head.
        dt_bias: Bias that is added to `a`.
        query_start_loc: Index of each row's first token, then the end of the last row. Entries after
            `distribution[2]` are ignored.
        state_indices: The slot that receives a prefill row's window and state after its last token. A decode or verify
            row writes those after its token t to slot `state_indices + t`.
        distribution: The number of decode and verify rows, an end that is ignored, and the number of all rows.
        seq_lens: Each row's tokens at the end of the step.
        read_state_indices: The slot that each row reads. It may be one that the row writes.
        read_offsets: Decode and verify rows read slot `read_state_indices + read_offsets`. It is the number of tokens
            accepted in the last step, minus one. None means 0, which only steps without drafts may pass.
        n_kq: Key heads, here and below on this device.
        n_v: Value heads.
        d_k: Key dims of a head.
        d_v: Value dims of a head.
        kernel_size: Taps of the convolution.
        num_spec_tokens: The most draft tokens of a verify row, which has one token more than drafts.
        zero_initialize_out: Ignored. Outputs of tokens of no row are always 0.
        compute_precision: Ignored.
        decode_tile_size: Ignored.
        mixed_tile_size: Ignored.
        implementation: "xla" or "triton" for all ops. None lets each op choose.

    Returns:
        The updated pools (windows, states), and the outputs in qkv's dtype.

    Raises:
        ValueError: if a shape or dtype breaks the contract, or if `num_spec_tokens` is positive and there are no
            `read_offsets`.
    """
    channels = 2 * n_kq * d_k + n_v * d_v
    _require_shape("qkv", qkv, (qkv.shape[0], channels))
    _require_shape("conv_state", conv_state, (conv_state.shape[0], kernel_size - 1, channels))
    _require_shape("recurrent_state", recurrent_state, (conv_state.shape[0], n_v, d_k, d_v))
    _require_shape("conv_weight", conv_weight, (channels, 1, kernel_size))
    if conv_state.dtype != qkv.dtype:
        raise ValueError(f"conv_state must have qkv's dtype {qkv.dtype}, got {conv_state.dtype}")
    if read_offsets is None:
        if num_spec_tokens > 0:
            raise ValueError(
                f"read_offsets must be given if num_spec_tokens is positive, got None and {num_spec_tokens}"
            )
        read_offsets = jnp.zeros_like(state_indices)

    rows = state_indices.shape[0]
    is_decode = jnp.arange(rows, dtype=jnp.int32) < distribution[0]  # decode and verify rows
    starts = query_start_loc[jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), distribution[2])].astype(jnp.int32)
    length = jnp.diff(starts)
    position = seq_lens.astype(jnp.int32) - length

    slot, read = state_indices.astype(jnp.int32), read_state_indices.astype(jnp.int32)
    read_slot = read + jnp.where(is_decode, read_offsets.astype(jnp.int32), 0)
    read = jnp.where((position > 0) & (read != _NULL), read_slot, _NULL)
    # The slot after each token of a decode or verify row, and the one after the last token of any row.
    token = jnp.arange(num_spec_tokens + 1, dtype=jnp.int32)[None]
    write = jnp.where((is_decode & (slot != _NULL))[:, None], slot[:, None] + token, _NULL)
    last = jnp.where(is_decode & (slot != _NULL), slot + length - 1, slot)

    # A slot holds a single window, so a verify row keeps one per token: as a prefill row keeps its checkpoints.
    run, first = Run(implementation=implementation), jnp.zeros_like(slot)
    checkpoints = window_checkpoints(write, length)
    of_windows = Rows(
        query_start_loc=starts,
        layer=0,
        window_read=read,
        window_row=first,
        write=last[:, None],
        checkpoints=checkpoints,
    )
    qkv, windows = ops.causal_conv1d_prefill(qkv, conv_state[None], conv_weight[:, 0].T, conv_bias, of_windows, run=run)

    q, k, v = jnp.split(qkv, [n_kq * d_k, 2 * n_kq * d_k], axis=1)
    q, k, v = q.reshape(-1, n_kq, d_k), k.reshape(-1, n_kq, d_k), v.reshape(-1, n_v, d_v)
    inputs = q, k, v, *ops.gated_delta_rule_gates(a, b, a_log, dt_bias)
    # Each op gets the rows of the other kind without tokens.
    split = starts[distribution[0]]
    decode = Rows(query_start_loc=jnp.minimum(starts, split), layer=0, read=read, write=write)
    out, states = ops.gated_delta_rule_recurrent(*inputs, recurrent_state[None], decode, layout="KV", run=run)
    loc = jnp.maximum(starts, split)
    chunks = ops.chunk_rows(loc, position, v.shape[0])
    prefill = Rows(query_start_loc=loc, layer=0, read=read, write=slot[:, None], chunks=chunks)
    out_prefill, states = ops.gated_delta_rule_prefill(*inputs, states, prefill, layout="KV", run=run)
    out = jnp.where((jnp.arange(v.shape[0], dtype=jnp.int32) < split)[:, None, None], out, out_prefill)
    return (windows[0], states[0]), out.reshape(-1, n_v * d_v)


def _require_shape(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} must have the shape {shape}, got {array.shape}")


def _module() -> ModuleType:
    try:
        return importlib.import_module(_ATTENTION)
    except ImportError as error:
        raise ImportError(
            f"mamba_align_jax.integrations.tpu_inference needs tpu-inference, whose module {_ATTENTION} could not be "
            f"imported: {error}. docs/integrations.md names the version."
        ) from error
