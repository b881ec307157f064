"""The depthwise causal convolution before a recurrence, as a module over a pool of windows.

Source: Gu, Dao, "Mamba" (2023), section 3.4.
"""

import functools
from typing import Any, Literal

import jax

from mamba_align_jax.align.config import ConvState
from mamba_align_jax.layers.linear import ConvTaps
from mamba_align_jax.metadata.layer_step import LayerStep
from pallas_kernels import Rows, WindowLayout, causal_conv1d_prefill, causal_conv1d_update


class CausalConv1d(ConvTaps):
    """Computes silu(bias + weighted sum of the last `width` inputs) in each channel by itself.

    With `activation` None it leaves the SiLU out. Its state is the window of the last width - 1 inputs, with one row more
    per draft token: [window, channels], or [channels, window] if `window_layout` is "DS".
    """

    activation: Literal["silu"] | None = "silu"
    window_layout: WindowLayout = "SD"

    def state(self, dtype: str) -> ConvState:
        """Describes the window that a block holds for this layer. `dtype` is the window's dtype."""
        width, channels = self.weight.shape
        return ConvState(width, channels, dtype, self.window_layout)

    def __call__(self, x: jax.Array, at: LayerStep, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Runs a step's packed tokens.

        Args:
            x: Inputs, those of decode and verify rows first. [tokens, channels]
            at: The step's rows, and the layer's index in the pool.
            pool: Windows [layers, blocks, *window], in the order of `window_layout`. `pool` is donated.

        Returns:
            The outputs [tokens, channels], which are 0 for padding tokens, and the updated pool.
        """
        decode, prefill = (functools.partial(run, at) for run in (self.decode, self.prefill))
        out, pool = at.apply(decode, prefill, (x,), (pool,))
        return out, pool

    def decode(
        self, at: LayerStep, rows: Rows, x: jax.Array, pool: jax.Array, *, parts: tuple[int, ...] | None = None
    ) -> tuple[Any, jax.Array]:
        """Runs the tokens of decode and verify rows: see `causal_conv1d_update`."""
        return self._run(causal_conv1d_update, at, rows, x, pool, parts=parts)

    def prefill(
        self, at: LayerStep, rows: Rows, x: jax.Array, pool: jax.Array, *, parts: tuple[int, ...] | None = None
    ) -> tuple[Any, jax.Array]:
        """Runs the tokens of prefill rows: see `causal_conv1d_prefill`."""
        return self._run(causal_conv1d_prefill, at, rows, x, pool, parts=parts)

    def _run(self, op: Any, at: LayerStep, rows: Rows, x: jax.Array, pool: jax.Array, **options: Any) -> Any:
        weight, bias = self.weight[...], None if self.bias is None else self.bias[...]
        return op(
            x, pool, weight, bias, rows, activation=self.activation, layout=self.window_layout, run=at.run, **options
        )
