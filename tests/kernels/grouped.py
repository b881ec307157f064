"""Calls an op with its arguments by name, each array and option by itself, although ops take some of them in groups.

Tests that go through all arguments of an op change one at a time.
"""

import dataclasses
import inspect

from pallas_kernels import BoundaryWindow, Fold, Gates, HeadNorms, PageIndices, Routing, RowCheckpoints, Rows, Run

# The fields of `Rows` by the names under which tests give them.
PLAIN = {"layer": "layer", "query_start_loc": "query_start_loc", "window_row": "window_row", "chunks": "chunks"}
PLAIN |= {"num_computed_tokens": "num_computed_tokens", "position": "num_computed_tokens"}
PLAIN |= {"max_query_tokens": "max_query_tokens", "write_blocks": "write"}
GROUPS = {
    "checkpoints": (RowCheckpoints, {"checkpoint_offset": "offset", "checkpoint_block": "block"}),
    "boundary": (BoundaryWindow, {"boundary_row": "row", "boundary_block": "block"}),
    "fold": (Fold, {"slot": "slot", "base": "base", "fold_block": "block"}),
}
OF_GATES = ("lower_bound", "allow_neg_eigval")
# The parameters that are a value of a class with the same fields, by the names under which tests give them.
VALUES = {"run": Run, "routing": Routing, "norms": HeadNorms}
INDICES = {"layer": "layer", "kv_page": "page", "kv_offset": "offset"}


def taken(given, names):
    """Removes arguments and returns them by other names."""
    return {other: given.pop(name) for name, other in names.items() if name in given}


def rows_of(given, of_windows):
    """Removes the arguments that are fields of `Rows`, and returns the rows."""
    fields = taken(given, PLAIN) | taken(given, {"read_block": "window_read" if of_windows else "read"})
    if "write_block" in given:
        block = given.pop("write_block")
        fields["write"] = block[:, None] if getattr(block, "ndim", 0) == 1 else block
    for group, (kind, names) in GROUPS.items():
        found = taken(given, names)
        if any(value is not None for value in found.values()):
            fields[group] = kind(**{other: found.get(other) for other in names.values()})
    return Rows(**fields)


def call(op, **given):
    """Calls `op`, whose arguments are given by themselves."""
    parameters = inspect.signature(op).parameters
    if "rows" in parameters:
        given["rows"] = rows_of(given, op.__name__.startswith("causal_conv1d"))
    if "ring" in parameters:
        kind = parameters["ring"].annotation
        given["ring"] = kind(**taken(given, {f"ring_{field.name}": field.name for field in dataclasses.fields(kind)}))
    if any(name in given for name in OF_GATES):
        given["gates"] = Gates(**taken(given, {name: name for name in OF_GATES}))
    if "indices" in parameters:
        given["indices"] = PageIndices(**taken(given, INDICES))
    for name in parameters.keys() & VALUES.keys():
        fields = dataclasses.fields(VALUES[name])
        given[name] = VALUES[name](**taken(given, {field.name: field.name for field in fields}))
    return op(**given)
