"""Every op that takes rows, with small arguments made from its annotations."""

import inspect

import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import chunk_rows

TOKENS, ROWS, LAYERS, BLOCKS, HEADS, DIM, PAGE, WINDOW = 5, 2, 3, 6, 2, 4, 4, 3
SHAPES = dict(
    tokens=TOKENS, rows=ROWS, rows_plus_1=ROWS + 1, layers=LAYERS, blocks=BLOCKS, window=WINDOW, width=WINDOW + 1,
    channels=3 * HEADS * DIM, heads=HEADS, groups=HEADS, key_heads=HEADS, value_heads=HEADS, kv_heads=1, head_dim=DIM,
    state_dim=DIM, key_dim=DIM, value_dim=DIM, pages=BLOCKS, page_size=PAGE, tables=ROWS, pages_per_row=2, shares=1,
    checkpoints=1, wide=3 * HEADS * DIM, slots=ROWS, places=16,
)  # fmt: skip
NUMBERS = dict(
    query_start_loc=[0, 2, 5], read_block=[1, 2], write_block=[3, 4], num_computed_tokens=[0, 0], slot=[0, 1]
)
OPS = {
    name: op
    for name, op in vars(pallas_kernels).items()
    if inspect.isfunction(op)
    and "query_start_loc" in inspect.signature(op).parameters
    and name not in ("chunk_rows", "spans")
} | {"state_copy": pallas_kernels.state_copy}


def arguments(op):
    """Returns small arguments of an op, by its annotations, as NumPy arrays."""
    given = {}
    for name, parameter in inspect.signature(op).parameters.items():
        members = getattr(parameter.annotation, "__args__", (parameter.annotation,))
        array = next((member for member in members if hasattr(member, "dim_str")), None)
        if name == "layer":
            given[name] = 1
        elif name == "max_query_tokens" and parameter.default is inspect.Parameter.empty:
            given[name] = 3
        elif name == "chunks":
            given[name] = chunk_rows(np.array([0, 2, 5], np.int32), np.zeros(ROWS, np.int32), TOKENS)
        elif array is not None and parameter.default is inspect.Parameter.empty:
            shape = [SHAPES[axis] for axis in array.dim_str.replace("*state", "window channels").split()]
            whole = "Int" in array.dtype.__name__
            given[name] = np.ones(shape, np.int32) if whole else np.full(shape, -0.5, np.float32)
            if name in NUMBERS:
                given[name] = np.array(NUMBERS[name], np.int32)
    return given


def on_device(given):
    return {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in given.items()}
