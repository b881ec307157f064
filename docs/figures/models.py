"""Draws steps and prompts beside their floors. `python -m docs.generate` writes it to docs/figures/models.svg."""

from benchmarks.reading import HOW, Row, named, natural, newest, usual
from docs.figures import svg
from docs.figures.widths import width

SCALE, BAR, TOP, HIGH, EDGE = 190, 14, 82, 26, 20


def draw(rows: list[Row]) -> str:
    """The figure as SVG: a bar per case, whose length is its time in multiples of its floor, with both times.

    Args:
        rows: Rows of the model benchmark. The newest ones that were run as usual, on one GPU, are drawn.
    """
    rows = sorted(newest(usual(rows)), key=natural)
    times = [row["step_us"] / 1e3 if "step_us" in row else row["ttft_ms"] for row in rows]
    floors = [row["floor_us"] / 1e3 for row in rows]
    left = EDGE + 12 + max(width(named(row), "bold") for row in rows)
    bottom = TOP + HIGH * len(rows)
    head = f"Time as a multiple of the floor on one {HOW['gpu'][0]}, in bfloat16, random weights"
    below = "The line is the floor: what the bytes and the operations take at the hardware's rates. Labels end with commits."
    parts, right = [svg.text(EDGE, 34, head, "head"), svg.text(EDGE, 56, below, "soft")], EDGE + width(below, "soft")
    for n, (row, time, floor) in enumerate(zip(rows, times, floors, strict=True)):
        y, long = TOP + HIGH * n, round(time / floor * SCALE, 1)
        label = f"{time:.2f} ms, {time / floor:.2f} times {floor:.2f}, {row['commit']}"
        right = max(right, left + long + 6 + width(label, "small"))
        parts += [
            svg.text(EDGE, y + 11, named(row), "bold"),
            svg.box(left, y, long, BAR, "bar1", 2),
            svg.box(left, y, SCALE, BAR, "bar3", 2),
            svg.text(left + long + 6, y + 11, label, "small soft"),
        ]
    parts.append(svg.line(f"M{left + SCALE:g} {TOP - 8}V{bottom}", "thin"))
    description = "A bar per case of the model benchmark, as long as its time in multiples of its floor."
    return svg.figure(int(right) + EDGE, bottom + 10, "Models beside their floors", description, parts)
