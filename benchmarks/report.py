"""Prints the README's tables of measurements: `python -m benchmarks.report benchmarks/results/kernels.jsonl`."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def _markdown(*lines: Iterable[str]) -> list[str]:
    """The first line is the header."""
    header, *rest = (f"| {' | '.join(line)} |" for line in lines)
    return [header, "|" + "---|" * (header.count("|") - 1), *rest]


def _kernels(rows: list[Row]) -> list[str]:
    """One table, and one of prefill's spans and errors where there are any."""
    lines = []
    for row in rows:
        # A launch with nothing to move, or next to nothing, has no bandwidth to speak of.
        share = f"{row['bandwidth_fraction']:.2f}" if row["bandwidth_fraction"] >= 0.05 else "-"
        peer = (f"{row['peer']} {row['peer_us']:.1f} us", f"{row['ratio']:.2f}") if "peer" in row else ("-", "-")
        lines.append((row["case"], f"{row['us']:.1f} us", share, *peer))
    lines = _markdown(("case", "time", "of the copy rate", "peer", "ratio"), *lines)
    spans = [row for row in rows if "span_us" in row]
    if spans:
        us, error = (lambda value: f"{value:.1f} us"), (lambda value: f"{value:.1e}")
        columns = dict(span_us=us, peer_span_us=us, rms_error=error, peer_rms_error=error)
        cells = lambda row: ["-" if row.get(name) is None else show(row[name]) for name, show in columns.items()]
        header = "case", "span", "peer's span", "rms error", "peer's rms error"
        lines += ["", *_markdown(header, *((row["case"], *cells(row)) for row in spans))]
    return lines


def _pivot(rows: list[Row], left: tuple[str, ...], top: Callable[[Row], str], show: Callable[[Row], str]) -> list[str]:
    """A line per value of `left`, a column per value of `top`, both in the order in which they come."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        cells.setdefault(tuple(str(row[name]) for name in left), {})[top(row)] = show(row)
    columns = dict.fromkeys(map(top, rows))
    return _markdown((*left, *columns), *((*key, *(each.get(c, "-") for c in columns)) for key, each in cells.items()))


def _steps(rows: list[Row]) -> list[str]:
    """Kernels' time and span of a step, then what it moves, by policy and share of crossing rows."""
    how = lambda row: row["policy"] if row["policy"] == "none" else f"{row['policy']} {row['crossing']}"
    copies = lambda row: f"{(row['state_bytes'] + row['copied_bytes']) / 1e6:.1f} MB"
    times = _pivot(rows, ("rows", "drafts"), how, lambda row: f"{row['us']:.0f} / {row['span_us']:.0f} us")
    return [*times, "", *_pivot(rows, ("rows", "drafts"), how, copies)]


def _bookkeeping(rows: list[Row]) -> list[str]:
    layers = lambda row: f"{row['layers']} layers"
    return _pivot(rows, ("policy", "drafts"), layers, lambda row: f"{row['us']:.1f} us, {row['kernels']} kernels")


def table(file: Path) -> str:
    """Markdown of the newest row of each case, a table per kind of row."""
    newest = {(row["case"], row.get("crossing")): row for row in map(json.loads, file.read_text().splitlines())}
    kinds = {"bandwidth_fraction": _kernels, "groups": _bookkeeping, "crossing": _steps}
    found = [(show, [row for row in newest.values() if mark in row]) for mark, show in kinds.items()]
    return "\n\n".join("\n".join(show(rows)) for show, rows in found if rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
