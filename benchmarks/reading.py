"""Reads rows of results: which rows measured the same, which of them counts, and how a line names what it shows.

Every reader of rows uses these functions: tables, plots, figures and headlines. So a row that was measured in another way
(another GPU, more devices, other dtypes, another configuration) adds a line of its own and changes no other.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# How a case was run: for each field, its value in rows that don't have it, and what a name says of another value.
HOW: dict[str, tuple[Any, str]] = {
    "model": ("qwen3.5-4b", "{}"),
    "devices": (1, "{} devices"),
    "gpu": ("H200", "{}"),
    "configuration": ("benchmark", "{}"),  # "defaults" is what `Engine(model)` chooses
    "weights_dtype": ("bfloat16", "{} weights"),
    "activation_dtype": ("bfloat16", "{} activations"),
    "kv_dtype": ("bfloat16", "{} keys"),
    "state_dtype": ("float32", "{} states"),
    "deterministic": (False, "deterministic"),
}
_USUAL = {name: value for name, (value, _) in HOW.items()}
_USUAL_MOE = _USUAL | {"model": "qwen3.5-35b-a3b"}
_WHAT = "kind", "op", "case", "crossing", "candidate", "routing"
USUAL_TOKENS_A_STEP = 2048  # `max_num_batched_tokens` of most rows of the serving benchmark


def read_rows(file: Path) -> list[Row]:
    """Returns all rows of a results file, the oldest first; none if there is no such file yet."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def gpu(row: Row) -> str:
    """The short name of the GPU on which a row was measured: "H100"."""
    return row.get("gpu", HOW["gpu"][0]).removeprefix("NVIDIA ").split()[0]


def _usual(row: Row) -> Row:
    """How a row's case is usually run. Cases whose names begin with "moe" have a model of their own."""
    return _USUAL_MOE if row.get("case", "").startswith("moe ") else _USUAL


def how(row: Row) -> Row:
    """How a row's case was run: the fields of `HOW`, with the values that are meant where the row has none."""
    return {name: row.get(name, value) for name, value in _usual(row).items()} | {"gpu": gpu(row)}


def key(row: Row) -> tuple[Any, ...]:
    """What a row measured, and how. The newest of the rows with equal keys counts."""
    return (*map(row.get, _WHAT), *how(row).values())


def newest(rows: Iterable[Row]) -> list[Row]:
    """Returns the rows that count, in their order: the newest row of each key, and the rows that `loads` compares."""
    rows = list(rows)
    counting = [*{key(row): row for row in rows}.values(), *(row for load in loads(rows) for row in load.values())]
    places = {id(row) for row in counting}
    return [row for row in rows if id(row) in places]


def variant(row: Row, *shown: str) -> str:
    """The end of a name: how the row was run, where that isn't usual, as in ", 2 devices, H100".

    Args:
        row: The row.
        shown: Fields of `HOW` that have a column of their own.
    """
    usual = _usual(row)
    unusual = {name: value for name, value in how(row).items() if name not in shown and value != usual[name]}
    return "".join(f", {HOW[name][1].format(value)}" for name, value in unusual.items())


def named(row: Row, *shown: str) -> str:
    """The name of a row's case and how it was run. Rows with different keys have different names. See `variant`."""
    return row["case"] + variant(row, *shown)


def natural(row: Row) -> list[Any]:
    """A key that sorts rows by their names, with numbers in the order of their size."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", named(row))]


def usual(rows: Iterable[Row], /, **wanted: Any) -> list[Row]:
    """Returns the rows whose fields have the values in `wanted`, and which were run as usual in all else."""
    return [row for row in rows if (row | how(row)).items() >= (_usual(row) | wanted).items()]


def of_one_commit(rows: Iterable[Row], *wanted: Row) -> list[Row]:
    """Returns a row of each set of wanted fields (see `usual`): the newest rows of the newest commit that has them all.

    Raises:
        LookupError: No commit has them all.
    """
    commits: dict[str, list[Row]] = {}
    for row in reversed(list(rows)):
        commits.setdefault(row["commit"], []).append(row)
    for each in commits.values():
        found = [usual(each, **fields) for fields in wanted]
        if all(found):
            return [of[0] for of in found]
    raise LookupError(f"no commit has usual rows of all of {wanted}")


def tokens_a_step(row: Row) -> str:
    """The end of a load's name if its engine ran another number of tokens in a step than most rows'."""
    number = row["max_num_batched_tokens"]
    return "" if number == USUAL_TOKENS_A_STEP else f", {number} tokens a step"


def loads(rows: Iterable[Row]) -> list[dict[str, Row]]:
    """Returns the rows of the serving benchmark that compare modes: for each load the newest row of each, "none" first.

    A load is a workload, a loop, a way of drafting, the number of tokens in a step, and how it was run (`HOW`). The rows of
    a load are of one commit: the newest one that timed several of its modes, or the newest one if none did.
    """
    names = "workload", "requests", "loop", "speculation", "drafts", "async_stepping", "max_num_batched_tokens"
    found: dict[tuple[Any, ...], dict[str | None, dict[str, Row]]] = {}
    for row in rows:
        if "hit_rate_of_attainable" in row:
            load = *map(row.get, names), *how(row).values()
            found.setdefault(load, {}).setdefault(row.get("commit"), {})[row["mode"]] = row
    chosen = [max(enumerate(commits.values()), key=lambda at: (len(at[1]) > 1, at[0]))[1] for commits in found.values()]
    return [dict(sorted(modes.items(), key=lambda each: each[0] != "none")) for modes in chosen]
