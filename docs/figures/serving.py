"""Draws the serving benchmark's rows as bars. `python -m docs.generate` writes it to docs/figures/serving.svg."""

from benchmarks.plot import bars
from benchmarks.reading import HOW, Row, usual
from docs.figures import svg
from docs.figures.widths import width
from mamba_align_jax.load.bench import MODES

PANELS = (
    ("mean ms to the first token", "ttft_ms_mean", ".0f"),
    ("mean ms per later token", "tpot_ms_mean", ".1f"),
    ("output tokens per second", "output_tokens_per_s", ".0f"),
)
KINDS = "bar1", "bar2", "bar3", "bar4", "bar5"  # of the modes that are drawn
WIDTH, GAP, BAR, TOP, EDGE = 210, 14, 13, 96, 20
LINES = ((11, "bold"), (27, "small soft"), (42, "small soft"))  # of a load's name


def draw(rows: list[Row]) -> str:
    """The figure as SVG: a row per load, a panel per quantity, a bar per mode, each with its value.

    Args:
        rows: Rows of the serving benchmark. Loads of which one commit timed several modes as usual are drawn.
    """
    loads = {load: modes for load, modes in bars(usual(rows)).items() if len(modes) > 1}
    seen = dict.fromkeys(mode for modes in loads.values() for mode in modes)
    ordered = [*(mode for mode in MODES if mode in seen), *(mode for mode in seen if mode not in MODES)]
    kinds = dict(zip(ordered, KINDS, strict=False))
    high = 16 + max(LINES[-1][0], *(len(modes) * (BAR + 2) for modes in loads.values()))
    head = f"The engine under load on one {HOW['gpu'][0]}: Qwen3.5-4B's shapes in bfloat16, random weights"
    parts, x = [svg.text(EDGE, 34, head, "head")], float(EDGE)
    for mode, kind in kinds.items():
        words = "no prefix cache" if mode == "none" else mode
        parts += [svg.box(x, 47, 12, 12, kind, 2), svg.text(x + 18, 58, words, "soft")]
        x += 18 + width(words, "soft") + 24
    left = 0.0
    for n, load in enumerate(loads):
        for words, (down, kind) in zip(load.split("\n"), LINES, strict=True):
            parts.append(svg.text(EDGE, TOP + n * high + down, words, kind))
            left = max(left, EDGE + width(words, kind) + GAP)
    for place, (title, name, form) in enumerate(PANELS):
        x = left + place * (WIDTH + GAP)
        parts.append(svg.text(x, TOP - 12, title, "small bold"))
        shown = [row[name] for modes in loads.values() for row in modes.values()]
        scale = (WIDTH - 5 - max(width(format(value, form), "small") for value in shown)) / max(shown)
        for n, modes in enumerate(loads.values()):
            for m, mode in enumerate(mode for mode in kinds if mode in modes):
                row = modes[mode]
                y, long = TOP + n * high + m * (BAR + 2), round(row[name] * scale, 1)
                parts.append(svg.box(x, y, long, BAR, kinds[mode], 2))
                parts.append(svg.text(x + long + 5, y + 11, format(row[name], form), "small soft"))
    description = "Bars of the serving benchmark: " + ", ".join(title for title, _, _ in PANELS)
    right, bottom = int(left + len(PANELS) * (WIDTH + GAP)) + 6, TOP + len(loads) * high + 4
    return svg.figure(right, bottom, "The engine under load", description, parts)
