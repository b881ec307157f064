"""The depthwise causal convolution before a recurrence, with silu, as a module over pools of windows."""

import functools

import jax

from mamba_align_jax.align.config import ConvState
from mamba_align_jax.layers.linear import ConvTaps
from mamba_align_jax.metadata.layer_step import LayerStep
from mamba_align_jax.metadata.rows import LayerRows
from pallas_kernels import causal_conv1d_prefill, causal_conv1d_update


class CausalConv1d(ConvTaps):
    """silu(bias + weighted sum of the last `width` inputs), each channel on its own."""

    def state(self, dtype: str) -> ConvState:
        """The window that a block holds for this layer."""
        width, channels = self.weight.shape
        return ConvState(width, channels, dtype)

    def __call__(self, x: jax.Array, at: LayerStep, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs a step's packed tokens.

        Args:
            x: Inputs, decode and verify rows first. [tokens, channels]
            at: The step's rows, and the layer's place in the pool.
            pool: Windows [layers, blocks, window, channels]. It is donated.

        Returns:
            The outputs [tokens, channels], 0 for padding tokens, and the pool.
        """
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]

        def run(op, rows: LayerRows, x, pool):
            return op(
                x, pool, at.layer, weight, bias, rows.query_start_loc, rows.conv_read, rows.window_row, rows.write[:, 0],
                implementation=at.implementation,
            )  # fmt: skip

        decode, prefill = (functools.partial(run, op) for op in (causal_conv1d_update, causal_conv1d_prefill))
        out, pool = at.apply(decode, prefill, (x,), (pool,))
        return out, pool
