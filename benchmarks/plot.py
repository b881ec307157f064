"""Draws the serving benchmark's rows: `python -m benchmarks.plot benchmarks/results/serving.jsonl serving.svg`."""

import sys
from pathlib import Path

from benchmarks.reading import Row, loads, read_rows, tokens_a_step, variant

# For each panel, the field whose values are bars and, if there is one, the field that thin lines reach to.
PANELS = {
    "time to first token, ms": ("ttft_ms_mean", "ttft_ms_p99"),
    "time per token, ms": ("tpot_ms_mean", "tpot_ms_p99"),
    "output tokens per second": ("output_tokens_per_s",),
}


def bars(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """Finds the rows that compare modes under each load (`reading.loads`): result[name of the load][mode].

    A name has three lines, of which the last one ends with the commit.
    """
    found = {}
    for load in loads(rows):
        row = next(iter(load.values()))
        drafts = f"{row['drafts']} by {row['speculation']}" if row["drafts"] else "no drafts"
        how = f"{tokens_a_step(row)}{variant(row)}, {row['commit']}".removeprefix(", ")
        found[f"{row['workload']} x{row['requests']}\n{row['loop']}, {drafts}\n{how}"] = load
    return found


def draw(rows: list[Row], file: Path) -> None:
    """Draws the rows into `file`, whose suffix names the format.

    Each of `PANELS` shows a group of bars for each load, with a bar for each mode. Thin lines reach to the 99th percentile.
    """
    from matplotlib.figure import Figure

    loads = bars(rows)
    modes = list(dict.fromkeys(mode for each in loads.values() for mode in each))
    figure = Figure(figsize=(2 + 1.7 * len(loads), 2.2 * len(PANELS)), layout="constrained")
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
    draw(read_rows(Path(sys.argv[1])), Path(sys.argv[2]))
