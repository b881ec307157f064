"""What the kernels of deferred states on Hopper GPUs have in common."""

import jax
import jax.numpy as jnp

from pallas_kernels.rows import Rows


def deferred_inputs(rows: Rows) -> dict[str, jax.Array]:
    """Return the indices and blocks of rows with deferred states as inputs of a kernel, by name."""
    inputs = dict(layer=jnp.reshape(rows.layer, 1), query_start_loc=rows.query_start_loc, slot=rows.fold.slot)
    inputs |= dict(base=rows.fold.base, position=rows.num_computed_tokens)
    return inputs | dict(read_block=rows.read, fold_block=rows.fold.block)
