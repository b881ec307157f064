"""Draws SVG elements as text, with one style sheet for light and dark themes."""

from html import escape

# Every colour is a CSS variable of the figure, so that the dark theme only sets other values.
STYLE = """\
  svg { color-scheme: light dark }
  .card { --ink: #1f2937; --soft: #6b7280; --line: #d1d5db; --paper: #ffffff; --idle: #f3f4f6; --edge: #9ca3af;
          --one: #2563eb; --one-fill: #dbeafe; --two: #047857; --two-fill: #d1fae5; --three: #b45309;
          --three-fill: #fef3c7; --four: #b91c1c; --four-fill: #fee2e2 }
  @media (prefers-color-scheme: dark) {
    .card { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --paper: #161b22; --idle: #21262d; --edge: #6b7280;
            --one: #7cb2ff; --one-fill: #12305e; --two: #4ade9c; --two-fill: #0b3b2a; --three: #fbbf4d;
            --three-fill: #4a3306; --four: #ff8f8f; --four-fill: #4c1518 }
  }
  text { font-family: ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 13px; fill: var(--ink) }
  .head { font-weight: 600; font-size: 14px } .soft { fill: var(--soft) } .small { font-size: 12px }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12px }
  .middle { text-anchor: middle } .end { text-anchor: end } .bold { font-weight: 600 }
  .paper { fill: var(--paper); stroke: var(--line) } .idle { fill: var(--idle); stroke: var(--line) }
  .empty { fill: none; stroke: var(--line); stroke-dasharray: 4 4 }
  .one { fill: var(--one-fill); stroke: var(--one) } .two { fill: var(--two-fill); stroke: var(--two) }
  .three { fill: var(--three-fill); stroke: var(--three) } .four { fill: var(--four-fill); stroke: var(--four) }
  .bar1 { fill: var(--edge) } .bar2 { fill: var(--one) } .bar3 { fill: var(--two) }
  .bar4 { fill: var(--three) } .bar5 { fill: var(--four) }
  .ink1 { fill: var(--one) } .ink2 { fill: var(--two) } .ink3 { fill: var(--three) } .ink4 { fill: var(--four) }
  .wire { fill: none; stroke-width: 2 } .thick { stroke-width: 2 } .thin { stroke: var(--line); fill: none }
  .wire1 { stroke: var(--one) } .wire2 { stroke: var(--two) } .wire3 { stroke: var(--three) } .wire4 { stroke: var(--four) }
"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """One line of text whose baseline starts at (x, y)."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, radius: float = 6) -> str:
    """A rectangle with round corners."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" class="{kind}"/>'


def line(path: str, kind: str, *, arrow: str = "") -> str:
    """A path; `arrow` names the class of its head, "" draws none."""
    marker = f' marker-end="url(#{arrow})"' if arrow else ""
    return f'<path d="{path}" class="{kind}"{marker}/>'


def figure(width: int, height: int, title: str, description: str, parts: list[str]) -> str:
    """A whole file. It has its own background, so that it is legible whatever page it is on."""
    heads = "".join(
        f'<marker id="arrow{n}" viewBox="0 0 10 10" refX="8" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" class="ink{n}"/></marker>'
        for n in (1, 2, 3, 4)
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'role="img" aria-labelledby="title description">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f"<style>\n{STYLE}</style>",
            '<g class="card">',
            f"<defs>{heads}</defs>",
            box(0.5, 0.5, width - 1, height - 1, "paper", 10),
            *parts,
            "</g>",
            "</svg>\n",
        )
    )
