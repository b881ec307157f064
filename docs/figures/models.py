"""Draws steps and prompts beside their floors. `python -m docs.generate` writes it to docs/figures/models.svg."""

from typing import Any

from docs.figures import svg

Row = dict[str, Any]

LEFT, SCALE, BAR, TOP, HIGH = 190, 190, 14, 82, 26


def _name(row: Row) -> str:
    return row["case"] if row["devices"] == 1 else f"{row['case']}, {row['devices']} GPUs"


def draw(rows: list[Row]) -> str:
    """The figure as SVG: a bar per case, whose length is its time in multiples of its floor, with both times.

    Args:
        rows: The newest row of each case, with `floor_us` and either `step_us` or `ttft_ms`.
    """
    times = [row["step_us"] / 1e3 if "step_us" in row else row["ttft_ms"] for row in rows]
    floors = [row["floor_us"] / 1e3 for row in rows]
    longest = max(time / floor for time, floor in zip(times, floors, strict=True))
    bottom = TOP + HIGH * len(rows)
    parts = [
        svg.text(20, 34, "Time as a multiple of the floor on H200s, in bfloat16, random weights", "head"),
        svg.text(
            20, 56, "The line is the floor: what the bytes and the operations take at the hardware's rates.", "soft"
        ),
    ]
    for n, (row, time, floor) in enumerate(zip(rows, times, floors, strict=True)):
        y, width = TOP + HIGH * n, round(time / floor * SCALE, 1)
        parts += [
            svg.text(20, y + 11, _name(row), "bold"),
            svg.box(LEFT, y, width, BAR, "bar1", 2),
            svg.box(LEFT, y, SCALE, BAR, "bar3", 2),
            svg.text(LEFT + width + 6, y + 11, f"{time:.2f} ms, {time / floor:.2f} times {floor:.2f}", "small soft"),
        ]
    parts.append(svg.line(f"M{LEFT + SCALE} {TOP - 8}V{bottom}", "thin"))
    description = "A bar per case of the model benchmark, as long as its time in multiples of its floor."
    return svg.figure(int(LEFT + longest * SCALE) + 190, bottom + 10, "Models beside their floors", description, parts)
