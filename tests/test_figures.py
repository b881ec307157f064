"""Labels of the figures stay in their places with Linux's default font, which is wider than other systems' fonts."""

import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path

import pytest

from docs.figures import svg
from docs.figures.widths import size, width

FIGURES = sorted((Path(__file__).parents[1] / "docs" / "figures").glob("*.svg"))
NAMESPACE = "{http://www.w3.org/2000/svg}"
# How far DejaVu Sans reaches above and below the baseline, in font sizes: "d" and "g".
ABOVE, BELOW = 0.76, 0.24


def box_of(label):
    """(left, top, right, bottom) of a text."""
    kind, x, y = label.get("class"), float(label.get("x")), float(label.get("y"))
    long = width(label.text or "", kind)
    left = x - (long / 2 if "middle" in kind.split() else long if "end" in kind.split() else 0)
    return left, y - ABOVE * size(kind), left + long, y + BELOW * size(kind)


def overlap(one, other):
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def is_within(inner, outer):
    return inner[0] >= outer[0] and inner[1] >= outer[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


def misplaced(figure):
    """The labels that leave the canvas, run into another label or into a bar, or cross the edge of a box."""
    root = ElementTree.fromstring(figure)
    labels = [(label.text, box_of(label)) for label in root.iter(f"{NAMESPACE}text") if label.text]
    canvas, *boxes = (
        (rect.get("class"), (x := float(rect.get("x")), y := float(rect.get("y")),
         x + float(rect.get("width")), y + float(rect.get("height"))))
        for rect in root.iter(f"{NAMESPACE}rect")
    )  # fmt: skip
    assert canvas[0] == "paper"
    found = [f"{words}: leaves the canvas" for words, place in labels if not is_within(place, canvas[1])]
    found += [f"{one[0]}: runs into {other[0]}" for one, other in combinations(labels, 2) if overlap(one[1], other[1])]
    for words, place in labels:
        for kind, rect in boxes:
            if overlap(place, rect) and (kind.startswith("bar") or not is_within(place, rect)):
                found.append(f"{words}: crosses a {kind}")
    return found


@pytest.mark.parametrize("file", FIGURES, ids=lambda file: file.stem)
def test_no_label_leaves_its_place(file):
    assert misplaced(file.read_text()) == []


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([svg.text(20, 30, "a long label at the edge")], "leaves the canvas"),
        ([svg.text(20, 30, "a label"), svg.text(60, 33, "another")], "runs into another"),
        ([svg.text(20, 30, "a label"), svg.box(60, 20, 20, 12, "bar1", 2)], "crosses a bar1"),
        ([svg.box(10, 10, 60, 40, "one"), svg.text(15, 30, "a wide label", "bold")], "crosses a one"),
    ],
)
def test_a_label_that_leaves_its_place_is_seen(parts, said):
    (found,) = misplaced(svg.figure(120, 60, "title", "description", parts))
    assert found.endswith(said)


# What Chromium measured for this text in DejaVu Sans and DejaVu Sans Mono, with kerning.
TEXT = "Qwen3.5-4B's shapes: 64 rows, 0.83 (at 8a84de1)"
MEASURED = {"": 325.7, "head": 392.4, "bold": 364.4, "small soft": 300.7, "small bold": 336.3, "code": 339.6}


@pytest.mark.parametrize("kind", MEASURED)
def test_widths_are_those_that_a_browser_measures(kind):
    assert width(TEXT, kind) == pytest.approx(MEASURED[kind], abs=0.4)


def test_a_character_without_a_width_is_refused():
    with pytest.raises(ValueError, match="words must be printable ASCII, got 'µs'"):
        width("µs", "small")
