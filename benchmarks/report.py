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


# Of https://github.com/vllm-project/vllm/pull/42406: mean TTFT, TPOT, ITL in ms and output tokens per second.
_VLLM = {
    "v2, no cache": (212.02, 9.73, 19.75, 1558.75),
    "v2, align": (174.29, 9.68, 19.68, 1583.50),
    "v1, no cache": (216.91, 9.92, 20.38, 1538.68),
    "v1, align": (174.91, 10.33, 21.32, 1483.84),
}


def _drafts(row: Row) -> str:
    return f"{row['drafts']}, {row['speculation']}" if row["drafts"] else "0"


def _serving(rows: list[Row]) -> list[str]:
    """Means, the tails, and what the cache is worth: ratios to mode "none" under the same load. Then vLLM's own table."""
    names = "workload", "requests", "loop", "speculation", "drafts", "async_stepping"
    load = lambda row: tuple(row[name] for name in names)
    without = {load(row): row for row in rows if row["mode"] == "none"}

    def line(row: Row) -> tuple[str, ...]:
        def ratio(name: str) -> str:
            return f"{row[name] / without[load(row)][name]:.2f}" if load(row) in without else "-"

        latency = lambda name: f"{row[f'{name}_ms_mean']:.1f} / {row[f'{name}_ms_p99']:.1f}"
        return (
            f"{row['workload']} x{row['requests']}", row["loop"], row["mode"], _drafts(row), latency("ttft"),
            f"{row['tpot_ms_mean']:.2f}", latency("itl"), f"{row['e2e_ms_mean']:.0f}",
            f"{row['output_tokens_per_s']:.0f}", f"{row['hit_rate_of_attainable']:.3f}", ratio("ttft_ms_mean"),
            ratio("tpot_ms_mean"),
        )  # fmt: skip

    header = (
        "workload", "loop", "mode", "drafts", "TTFT mean / p99 ms", "TPOT ms", "ITL mean / p99 ms", "E2E ms", "tokens/s",
        "hits of attainable", "TTFT of none's", "TPOT of none's",
    )  # fmt: skip
    theirs = ((name, *(f"{value:.2f}" for value in values)) for name, values in _VLLM.items())
    return [
        *_markdown(header, *map(line, rows)),
        "",
        *_markdown(("vLLM, two H20, 35B-A3B-FP8, 2 drafts", "TTFT ms", "TPOT ms", "ITL ms", "tokens/s"), *theirs),
    ]


def _idle(rows: list[Row]) -> list[str]:
    share = lambda row, name: f"{100 * row[name]:.1f} %"
    header = "mode", "drafts", "rows", "step", "gap", "idle between steps", "kernels run"
    lines = (
        (
            row["mode"] + (", asynchronous" if row["async_stepping"] else ""), _drafts(row), str(row["rows"]),
            f"{row['step_us']:.0f} us", f"{row['gap_us']:.0f} us", share(row, "idle_share"), share(row, "busy_share"),
        )
        for row in rows
    )  # fmt: skip
    return _markdown(header, *lines)


def _precision(rows: list[Row]) -> list[str]:
    header = (
        "model", "tokens", "same token first", "rms error", "of prompts", "of decode steps", "largest loss", "XLA runs",
    )  # fmt: skip

    def line(row: Row) -> tuple[str, ...]:
        xla = [f"{op} ({dtype})" for dtype in ("bfloat16", "float32") for op in row[f"xla_ops_{dtype}"]]
        errors = (f"{row[name]:.1e}" for name in ("rms_error", "prefill_rms_error", "decode_rms_error", "largest_loss"))
        return row["model"], str(row["tokens"]), f"{100 * row['top1_agreement']:.2f} %", *errors, ", ".join(xla) or "-"

    return _markdown(header, *map(line, rows))


def _devices(rows: list[Row]) -> list[str]:
    header = (
        "case", "devices", "step", "the engine's step", "weights of a device", "states and keys",
        "tokens of one device's",
    )  # fmt: skip
    lines = (
        (
            row["case"], str(row["devices"]), f"{row['step_us']:.0f} us", f"{row['engine_us']:.0f} us",
            f"{row['weight_bytes_per_device'] / 1e9:.1f} GB", f"{row['pool_bytes_per_device'] / 1e9:.1f} GB",
            f"{100 * row['agreement']:.1f} %",
        )
        for row in rows
    )  # fmt: skip
    return _markdown(header, *lines)


def _sequences(rows: list[Row]) -> list[str]:
    names = "case", "devices", "sequences", "tokens_each", "sequences_that_differ", "of_these_wrong"
    return _markdown([name.replace("_", " ") for name in names], *([str(row[name]) for name in names] for row in rows))


def table(file: Path) -> str:
    """Markdown of the newest row of each case, a table per kind of row."""
    newest = {
        (row["case"], row.get("crossing"), row.get("devices")): row
        for row in map(json.loads, file.read_text().splitlines())
    }
    kinds = {"bandwidth_fraction": _kernels, "groups": _bookkeeping, "crossing": _steps}
    kinds |= {"hit_rate_of_attainable": _serving, "idle_share": _idle, "top1_agreement": _precision}
    kinds |= {"engine_us": _devices, "sequences": _sequences}
    found = [(show, [row for row in newest.values() if mark in row]) for mark, show in kinds.items()]
    return "\n\n".join("\n".join(show(rows)) for show, rows in found if rows)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
