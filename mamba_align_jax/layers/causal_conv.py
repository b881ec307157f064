"""The depthwise causal convolution ahead of a recurrence, with silu, as a module over pools of windows."""

import functools

import jax

from mamba_align_jax.align.config import ConvState
from mamba_align_jax.layers.linear import ConvTaps
from mamba_align_jax.metadata.rows import Rows, RowSplit
from pallas_kernels import Implementation, causal_conv1d_prefill, causal_conv1d_update


class CausalConv1d(ConvTaps):
    """silu(bias + taps of the last `width` inputs), channel by channel."""

    def state(self, dtype: str) -> ConvState:
        """What a block holds of this layer."""
        width, channels = self.weight.shape
        return ConvState(width, channels, dtype)

    def __call__(
        self,
        x: jax.Array,
        split: RowSplit,
        pool: jax.Array,
        layer: jax.Array,
        *,
        group: int = 0,
        num_decode_tokens: int = 0,
        implementation: Implementation | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Runs packed tokens [tokens, channels], decode and verify rows first.

        Args:
            x: Inputs.
            split: The step's rows.
            pool: Windows [layers, blocks, window, channels]. Donate it.
            layer: This layer's place in the pool.
            group: This layer's place among the groups of block ids.
            num_decode_tokens: Static bound on the tokens of decode and verify rows.
            implementation: Of the ops.

        Returns:
            [tokens, channels], 0 behind the last row of each kind, and the pool.
        """
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]

        def run(op, rows: Rows, x, pool):
            loc, read, write = rows.query_start_loc, rows.conv_read[group], rows.write[group, :, 0]
            return op(x, pool, layer, weight, bias, loc, read, rows.window_row, write, implementation=implementation)

        decode, prefill = (functools.partial(run, op) for op in (causal_conv1d_update, causal_conv1d_prefill))
        out, pool = split.apply(decode, prefill, (x,), (pool,), num_decode_tokens)
        return out, pool
