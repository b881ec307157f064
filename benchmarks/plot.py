"""Draws the rows of the serving benchmark: `python -m benchmarks.plot benchmarks/results/serving.jsonl serving.svg`."""

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PANELS = {
    "time to first token, ms": ("ttft_ms_mean", "ttft_ms_p99"),
    "time per token, ms": ("tpot_ms_mean", "tpot_ms_p99"),
    "output tokens per second": ("output_tokens_per_s",),
}


def bars(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """The newest row of each load (workload, loop, who drafts how many) and mode."""
    loads: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "hit_rate_of_attainable" in row:
            drafts = f"{row['drafts']} by {row['speculation']}" if row["drafts"] else "no drafts"
            load = f"{row['workload']} x{row['requests']}\n{row['loop']}, {drafts}"
            loads.setdefault(load, {})[row["mode"]] = row
    return loads


def draw(rows: list[Row], file: Path) -> None:
    """A panel per quantity, in each a group of bars per load, a bar per mode; thin lines reach to the 99th percentile."""
    from matplotlib.figure import Figure

    loads = bars(rows)
    modes = list(dict.fromkeys(mode for each in loads.values() for mode in each))
    figure = Figure(figsize=(2 + 1.4 * len(loads), 2.2 * len(PANELS)), layout="constrained")
    panels = figure.subplots(len(PANELS), 1, sharex=True)
    for panel, (title, names) in zip(panels, PANELS.items(), strict=True):
        for place, mode in enumerate(modes):
            found = [(n, each[mode]) for n, each in enumerate(loads.values()) if mode in each]
            x = [n + (place - (len(modes) - 1) / 2) / (len(modes) + 1) for n, _ in found]
            values = [row[names[0]] for _, row in found]
            panel.bar(x, values, width=1 / (len(modes) + 1), label=mode)
            if len(names) > 1:
                panel.vlines(x, values, [row[names[1]] for _, row in found], color="black", linewidth=0.8)
        panel.set_title(title, fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xticks(range(len(loads)), list(loads), fontsize=8)
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(file)


if __name__ == "__main__":
    draw([json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()], Path(sys.argv[2]))
