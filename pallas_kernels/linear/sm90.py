"""Products of many tokens by FP8 weights on Hopper GPUs, with FP8 inputs.

A CTA for each SM computes tiles [128 tokens, 128 outputs] one after the other. One warpgroup copies blocks of 128 inputs to
SMEM; the other two multiply 64 tokens each. Hopper's FP8 products keep about 14 bits of their sums, so every block's product
is added to a float32 sum in registers, times the scale of the token's inputs and that of the weights' block.

Source: DeepSeek-AI, "DeepSeek-V3" (2024), section 3.3.2, for blocks of 128 and for sums outside the tensor cores.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device
from pallas_kernels import hopper as hp
from pallas_kernels.linear import xla
from pallas_kernels.linear.config import Options
from pallas_kernels.quantized import Part, QuantizedWeight, quantize_activations

BLOCK = 128  # inputs and outputs that share a scale, and tokens of a tile
_ROWS = 64  # tokens of a warpgroup
_STAGES = 5
_GROUP = 16  # tiles of tokens whose CTAs share the same weights at about the same time


class _Cta:
    """The work of a CTA: every `ctas`-th tile, in an order in which CTAs share tokens and weights in the L2."""

    def __init__(self, refs: Any, ctas: int) -> None:
        self.refs, self.ctas = refs, ctas
        self.cta = hp.axis_index("cta")
        self.token_tiles = -(-refs.x.shape[0] // BLOCK)
        self.output_tiles = -(-refs.weight.shape[0] // BLOCK)
        self.blocks = refs.x.shape[1] // BLOCK
        tiles = self.token_tiles * self.output_tiles
        self.count = jax.lax.div(jnp.int32(tiles + ctas - 1) - self.cta, jnp.int32(ctas))

    def tile(self, n: Any) -> tuple[Any, Any]:
        """Return the tile of tokens and the tile of outputs of the CTA's n-th tile."""
        index = self.cta + n * self.ctas
        of_group = jnp.int32(_GROUP * self.output_tiles)
        first = jax.lax.div(index, of_group) * _GROUP
        size = jnp.minimum(self.token_tiles - first, _GROUP)
        rest = jax.lax.rem(index, of_group)
        return first + jax.lax.rem(rest, size), jax.lax.div(rest, size)

    def fetch(self) -> None:
        """Copy the blocks of all tiles to SMEM."""
        hp.set_max_registers(40, action="decrease")
        refs = self.refs

        def copy_tile(n: Any, step: Any) -> Any:
            token_tile, output_tile = self.tile(n)
            tokens, outputs = hp.ds(token_tile * BLOCK, BLOCK), hp.ds(output_tile * BLOCK, BLOCK)

            def copy(block: Any, step: Any) -> Any:
                at, inputs = jax.lax.rem(step, jnp.int32(_STAGES)), hp.ds(block * BLOCK, BLOCK)
                hp.when(step >= _STAGES)(lambda: hp.barrier_wait(refs.free.at[at]))
                hp.copy_gmem_to_smem(refs.x.at[tokens, inputs], refs.x_tiles.at[at], refs.full.at[at])
                hp.copy_gmem_to_smem(refs.weight.at[outputs, inputs], refs.weight_tiles.at[at], refs.full.at[at])
                hp.copy_gmem_to_smem(refs.x_scales.at[block, tokens], refs.scale_tiles.at[at], refs.full.at[at])
                return step + 1

            return jax.lax.fori_loop(0, self.blocks, copy, step)

        steps = jax.lax.fori_loop(0, self.count, copy_tile, jnp.int32(0))
        hp.wait_for_last(steps, _STAGES, refs.free)

    def multiply(self, warpgroup: Any) -> None:
        """Compute 64 tokens of all tiles."""
        hp.set_max_registers(232, action="increase")
        refs, own = self.refs, hp.ds(warpgroup * _ROWS, _ROWS)
        out_tile = refs.out_tiles.at[warpgroup]

        def run(n: Any, step: Any) -> Any:
            token_tile, output_tile = self.tile(n)

            def add(block: Any, carry: Any) -> Any:
                step, total, scale = carry
                at, following = jax.lax.rem(step, jnp.int32(_STAGES)), jnp.minimum(block + 1, self.blocks - 1)
                # The next scale is loaded while the tensor cores work.
                next_scale = refs.weight_scales[output_tile, following]
                hp.barrier_wait(refs.full.at[at])
                operands = refs.x_tiles.at[at, own], refs.weight_tiles.at[at].T
                load = lambda: [hp.load_per_row(refs.scale_tiles.at[at, own])]
                product, of_tokens = hp.multiply_all((_ROWS, BLOCK), [[operands]], load)
                hp.barrier_arrive(refs.free.at[at])
                return step + 1, total + product * hp.along_rows(of_tokens * scale, BLOCK), next_scale

            first = refs.weight_scales[output_tile, 0]
            carry = step, hp.zeros((_ROWS, BLOCK), jnp.float32), first
            step, total, _ = jax.lax.fori_loop(0, self.blocks, add, carry)
            hp.wait_smem_to_gmem(0, wait_read_only=True)
            for half in range(2):
                columns = slice(half * 64, half * 64 + 64)
                hp.store_tiles([total[:, columns].astype(refs.out.dtype)], [out_tile.at[half]])
            hp.commit_smem()
            for half in range(2):
                target = refs.out.at[
                    hp.ds(token_tile * BLOCK + warpgroup * _ROWS, _ROWS), hp.ds(output_tile * BLOCK + half * 64, 64)
                ]
                hp.copy_smem_to_gmem(out_tile.at[half], target)
            return step

        jax.lax.fori_loop(0, self.count, run, jnp.int32(0))
        hp.wait_smem_to_gmem(0)


def unsupported(x: jax.Array, weight: Any, *others: Any, **options: Any) -> str | None:
    """Return why the kernel cannot run these arguments, or None if it can."""
    if not isinstance(weight, QuantizedWeight) or weight.activation_dtype != "fp8":
        return "the kernel is for quantised weights with activation_dtype 'fp8'"
    if weight.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the kernel is for weights of bfloat16 or float16, got {weight.dtype}"
    if weight.shape[1] % BLOCK:
        return f"inputs must be a multiple of {BLOCK}, got {weight.shape[1]}"
    for part in weight.parts:
        if part.scales is not None and (part.block != (BLOCK, BLOCK) or part.values.shape[0] % _ROWS):
            return f"parts must have blocks of {BLOCK} x {BLOCK} and a multiple of {_ROWS} outputs, got {part.block}"
    return None


def linear(x: jax.Array, weight: QuantizedWeight, bias: jax.Array | None, *, options: Options) -> tuple[jax.Array, ...]:
    """See api.py. Products are rounded to the weight's dtype before bias and gate."""
    return xla.finish(_total(x, weight).astype(jnp.float32), bias, options)


def linear_sums(x: jax.Array, weight: QuantizedWeight, *, splits: int) -> jax.Array:
    """See api.py. There is one split."""
    assert splits == 1, splits
    return _total(x, weight).astype(xla.dtype_of_sums(x))[None]


def _total(x: jax.Array, weight: QuantizedWeight) -> jax.Array:
    """Return the product [tokens, outputs], rounded to the weight's dtype. Parts without scales are XLA's."""
    tokens = x.shape[0]
    rounded = quantize_activations(x)
    # Tiles are whole: there are as many tokens as rows.
    rows = -(-tokens // BLOCK) * BLOCK
    values = jnp.pad(rounded.values, ((0, rows - tokens), (0, 0)))
    scales = jnp.pad(rounded.scales, ((0, rows - tokens), (0, 0))).T

    def of_part(part: Part) -> jax.Array:
        if part.scales is None:
            return xla.product(x.astype(weight.dtype), part.values, weight.dtype)
        return product(values, scales, part.values, part.scales, weight.dtype)[:tokens]

    found = [of_part(part) for part in weight.parts]
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=1)


def product(
    x: jax.Array, x_scales: jax.Array, weight: jax.Array, weight_scales: jax.Array, out_dtype: Any
) -> jax.Array:
    """Return x weight^T of quantised inputs and weights, [tokens, outputs].

    Args:
        x: e4m3 [tokens, inputs]. Both are multiples of 128.
        x_scales: The scales of each token's blocks of 128 inputs. float32 [inputs / 128, tokens]
        weight: e4m3 [outputs, inputs]. `outputs` is a multiple of 64.
        weight_scales: The scales of blocks of 128 x 128. float32 [ceil(outputs / 128), inputs / 128]
        out_dtype: bfloat16 or float16.
    """
    ctas, array = device.sm_count(), jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), out_dtype)

    def body(refs: Any) -> None:
        cta, warpgroup = _Cta(refs, ctas), hp.axis_index(hp.WARPGROUP)
        hp.when(warpgroup < 2)(lambda: cta.multiply(warpgroup))
        hp.when(warpgroup == 2)(cta.fetch)
        hp.finish_together(refs.done)

    found = hp.launch(
        body,
        name="linear_fp8",
        grid=dict(cta=ctas),
        inputs=dict(x=x, x_scales=x_scales, weight=weight, weight_scales=weight_scales),
        outputs=dict(out=array),
        scratch=dict(
            x_tiles=hp.tiled(_STAGES, BLOCK, BLOCK, dtype=x.dtype),
            weight_tiles=hp.tiled(_STAGES, BLOCK, BLOCK, dtype=x.dtype),
            scale_tiles=hp.SMEM((_STAGES, BLOCK), jnp.float32),
            out_tiles=hp.tiled(2, 2, _ROWS, 64, dtype=out_dtype),
            full=hp.Barrier(num_arrivals=3, num_barriers=_STAGES),
            free=hp.Barrier(num_arrivals=2, num_barriers=_STAGES),
            done=hp.Barrier(num_arrivals=3),
        ),
        warpgroups=3,
    )
    return found["out"]
