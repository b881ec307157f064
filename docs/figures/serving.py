"""Draws the serving benchmark's rows as bars. `python -m docs.generate` writes it to docs/figures/serving.svg."""

from typing import Any

from benchmarks.plot import bars
from docs.figures import svg

Row = dict[str, Any]

PANELS = (
    ("mean ms to the first token", "ttft_ms_mean", ".0f"),
    ("mean ms per later token", "tpot_ms_mean", ".1f"),
    ("output tokens per second", "output_tokens_per_s", ".0f"),
)
MODES = {"none": "bar1", "align/pre_copy": "bar2", "align/copy_free": "bar3"}
LEFT, WIDTH, BAR, TOP = 250, 210, 13, 96


def draw(rows: list[Row]) -> str:
    """The figure as SVG: a row per load, a panel per quantity, a bar per mode, each with its value."""
    loads = bars(rows)
    high = len(MODES) * (BAR + 2) + 16
    parts = [
        svg.text(20, 34, "The engine under load on one H200: Qwen3.5-4B's shapes in bfloat16, random weights", "head")
    ]
    x = 20.0
    for mode, kind in MODES.items():
        words = "no prefix cache" if mode == "none" else mode
        parts += [svg.box(x, 47, 12, 12, kind, 2), svg.text(x + 18, 58, words, "soft")]
        x += 18 + 8 * len(words) + 24
    for n, load in enumerate(loads):
        y = TOP + n * high
        first, second = load.split("\n")
        parts += [svg.text(20, y + 19, first, "bold"), svg.text(20, y + 36, second, "small soft")]
    for place, (title, name, form) in enumerate(PANELS):
        x = LEFT + place * (WIDTH + 14)
        parts.append(svg.text(x, TOP - 12, title, "small bold"))
        scale = (WIDTH - 48) / max(row[name] for load in loads.values() for row in load.values())
        for n, load in enumerate(loads.values()):
            for m, (mode, kind) in enumerate(MODES.items()):
                if mode in load:
                    y, width = TOP + n * high + m * (BAR + 2), round(load[mode][name] * scale, 1)
                    parts.append(svg.box(x, y, width, BAR, kind, 2))
                    parts.append(svg.text(x + width + 5, y + 11, format(load[mode][name], form), "small soft"))
    description = "Bars of the serving benchmark: " + ", ".join(title for title, _, _ in PANELS)
    width, height = LEFT + len(PANELS) * (WIDTH + 14) + 6, TOP + len(loads) * high + 4
    return svg.figure(width, height, "The engine under load", description, parts)
