"""What benchmarks share: their named cases, and for single ops also the options and the loop over the cases."""

import argparse
import json
import re
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol, TypeVar

import jax

from benchmarks.rows import Row, append, facts
from pallas_kernels import Implementation, QuantizedWeight, Run, quantize


class Named(Protocol):
    """A case: it has a name."""

    @property
    def name(self) -> str:
        """The name in the rows of results."""


C = TypeVar("C", bound=Named)

TUNE = "time several configurations"
ALWAYS_SHOWN: tuple[Implementation, ...] = ("xla", "triton")


def cases_named(cases: Iterable[C], names: Collection[str] | None, prefix: str = "") -> list[C]:
    """Returns the cases of these names, with `prefix` or without it; all if there are no names.

    Raises:
        SystemExit: There is no such case. It says which ones there are.
    """
    every = list(cases)
    unknown = [name for name in names or () if all(name not in (case.name, prefix + case.name) for case in every)]
    if unknown:
        raise SystemExit(f"--case must be one of {_listed(every, prefix)}, got {', '.join(unknown)}")
    return [case for case in every if not names or case.name in names or prefix + case.name in names]


def cases_matching(cases: Iterable[C], pattern: str) -> list[C]:
    """Returns the cases in whose names a regular expression is found.

    Raises:
        SystemExit: There is none. It says which cases there are.
    """
    every = list(cases)
    found = [case for case in every if re.search(pattern, case.name)]
    if not found:
        raise SystemExit(f"--case must be found in one of {_listed(every)}, got {pattern}")
    return found


def _listed(cases: Iterable[Named], prefix: str = "") -> str:
    return ", ".join(dict.fromkeys(repr(prefix + case.name) for case in cases))


def options_parser(description: str | None, *, budget: float, tune: str = TUNE) -> argparse.ArgumentParser:
    """Makes a parser of the options that these benchmarks have.

    Args:
        description: The benchmark's docstring.
        budget: The default of `--budget`, in seconds.
        tune: What `--tune` does.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="regular expression of case names; default: all")
    parser.add_argument("--tune", action="store_true", help=tune)
    parser.add_argument("--budget", type=float, default=budget, help="seconds after which no case is started")
    parser.add_argument("--json", help="append one JSON row per measurement to this file")
    parser.add_argument("--commit", default="unknown")
    return parser


def add_weights_dtype(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the option of the dtype in which weights are stored. Returns the parser."""
    text = "the dtype of stored weights, e4m3 in blocks of 128 x 128 for fp8; default: that of the case"
    parser.add_argument("--weights-dtype", choices=("fp8",), help=text)
    return parser


def stored(weight: jax.Array, weights_dtype: str | None) -> jax.Array | QuantizedWeight:
    """Returns a weight as the option of `add_weights_dtype` wants it."""
    return weight if weights_dtype is None else jax.jit(quantize)(weight)


def implementations(tuned: dict[str, dict[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Names the options of the implementations that are always timed, followed by those of `tuned`."""
    return {name: dict(run=Run(implementation=name)) for name in ALWAYS_SHOWN} | (tuned or {})


def run_cases(
    options: argparse.Namespace,
    cases: Iterable[Any],
    measure: Callable[[Any], list[Row]],
    *,
    copy_rate: float | None = None,
    shown: int | None = None,
) -> None:
    """Measures the cases that the options name, and writes and prints their rows, each case as soon as it is measured.

    Args:
        options: What the parser of `options_parser` returned.
        cases: The cases, which have names.
        measure: Measures a case and returns its rows.
        copy_rate: Bytes per microsecond that a copy moves, which every row then has in TB/s; None if rows don't need it.
        shown: The number of rows of a case that are printed besides those of `ALWAYS_SHOWN`; None prints all.
    """
    header, begin = facts(options.commit), time.perf_counter()
    print(header, "" if copy_rate is None else f"copy {copy_rate / 1e6:.2f} TB/s", flush=True)
    more: Row = {} if copy_rate is None else {"copy_bandwidth_tb_s": copy_rate / 1e6}
    for case in cases_matching(cases, options.case):
        if time.perf_counter() - begin > options.budget:
            print(f"{case.name}: no time left", flush=True)
            continue
        for place, row in enumerate(measure(case)):
            append(options.json, row | more | header)
            if shown is None or place < shown or row.get("candidate") in ALWAYS_SHOWN:
                print(json.dumps(row), flush=True)
