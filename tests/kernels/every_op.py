"""Every op that takes rows, with small arguments made from its annotations."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from pallas_kernels import Fold, Rows, chunk_rows

TOKENS, ROWS, LAYERS, BLOCKS, HEADS, DIM, PAGE, WINDOW = 5, 2, 3, 6, 2, 4, 4, 3
SHAPES = dict(
    tokens=TOKENS, rows=ROWS, rows_plus_1=ROWS + 1, layers=LAYERS, blocks=BLOCKS, window=WINDOW, width=WINDOW + 1,
    channels=3 * HEADS * DIM, heads=HEADS, groups=HEADS, key_heads=HEADS, value_heads=HEADS, kv_heads=1, head_dim=DIM,
    state_dim=DIM, key_dim=DIM, value_dim=DIM, pages=BLOCKS, page_size=PAGE, tables=ROWS, pages_per_row=2,
    splits=1, checkpoints=1, writes=WINDOW, wide=3 * HEADS * DIM, slots=ROWS, ring_slots=16,
)  # fmt: skip
NUMBERS = dict(
    query_start_loc=[0, 2, 5], read=[1, 2], window_read=[1, 2], write=[[3, 5, 0], [4, 0, 0]], num_computed_tokens=[0, 0],
    slot=[0, 1],
)  # fmt: skip
OPS = {
    name: op
    for name, op in vars(pallas_kernels).items()
    if inspect.isfunction(op) and "rows" in inspect.signature(op).parameters
} | {"state_copy": pallas_kernels.state_copy}
# The fields of `Rows` that ops may be given, besides `query_start_loc` and `layer`.
FIELDS = ("num_computed_tokens", "read", "window_read", "window_row", "write", "fold", "chunks", "max_query_tokens")


def _array(annotation, name):
    """Returns a small array of an annotation of jaxtyping, and None for another annotation."""
    members = getattr(annotation, "__args__", (annotation,))
    array = next((member for member in members if hasattr(member, "dim_str")), None)
    if array is None:
        return None
    shape = [SHAPES[axis] for axis in array.dim_str.replace("*state", "window channels").split()]
    if name in NUMBERS:
        return np.array(NUMBERS[name], np.int32)
    return np.ones(shape, np.int32) if "Int" in array.dtype.__name__ else np.full(shape, -0.5, np.float32)


def group(kind):
    """Returns a value that groups arguments of ops, made of small arrays."""
    return kind(**{field.name: _array(field.type, field.name) for field in dataclasses.fields(kind)})


def rows():
    """Returns rows that have every field."""
    arrays = {field.name: _array(field.type, field.name) for field in dataclasses.fields(Rows)}
    arrays = {name: x for name, x in arrays.items() if name in ("query_start_loc", *FIELDS) and x is not None}
    chunks = chunk_rows(np.array([0, 2, 5], np.int32), np.zeros(ROWS, np.int32), TOKENS)
    return Rows(**arrays, layer=1, fold=group(Fold), chunks=chunks, max_query_tokens=3)


def needed(op):
    """Returns the fields of `Rows` without which an op refuses its rows."""
    found = []
    for name in ("layer", *FIELDS):
        given = arguments(op)
        given["rows"] = dataclasses.replace(given["rows"], **{name: None})
        try:
            jax.eval_shape(lambda given=given: op(**on_device(given)))
        except ValueError as error:
            found += re.findall(r"rows\.(\w+) must be given, got None", str(error))
    return found


def arguments(op):
    """Returns small arguments of an op, by its annotations, as NumPy arrays."""
    given = {}
    for name, parameter in inspect.signature(op).parameters.items():
        if name == "rows":
            given[name] = rows()
        elif parameter.default is inspect.Parameter.empty:
            kind = parameter.annotation
            given[name] = group(kind) if dataclasses.is_dataclass(kind) else _array(kind, name)
    return given


def on_device(given):
    """Returns the arguments with JAX's arrays in place of NumPy's."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, given)
