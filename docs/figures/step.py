"""Draws one verify step: columns, the running window, what acceptance does, and a boundary save.

`python -m docs.generate` writes it to docs/figures/step.svg. Every number in it comes from `align.columns` and
`align.policy`, the arithmetic that the device runs.
"""

from docs.figures import svg
from mamba_align_jax.align.columns import boundary_save, certain_tokens, running_column, tokens_after
from mamba_align_jax.align.policy import copy_free

# The last step ran tokens 4, 5 and 6 from 4 computed ones, and two of its tokens were accepted. This one runs three more.
BLOCK, K, LAST, LAST_ACCEPTED, SAMPLED = 4, 2, 4, 2, 2
COLUMNS = 5

LEFT, WIDTH, GAP, HEIGHT = 196, 124, 14, 56


def _x(column: int) -> float:
    return LEFT + column * (WIDTH + GAP)


def _middle(column: int) -> float:
    return _x(column) + WIDTH / 2


def _block(column: int, y: float, kind: str, first: str, second: str = "", ink: str = "") -> list[str]:
    """A block with one or two lines in it."""
    shift = 0 if second else 9
    parts = [
        svg.box(_x(column), y, WIDTH, HEIGHT, kind),
        svg.text(_middle(column), y + 24 + shift, first, "middle bold"),
    ]
    return [*parts, svg.text(_middle(column), y + 42, second, f"middle small {ink or 'soft'}")] if second else parts


def _label(y: float, head: str, call: str, *lines: str) -> list[str]:
    parts = [svg.text(20, y + 14, head, "head"), svg.text(20, y + 32, call, "code soft")]
    return parts + [svg.text(20, y + 50 + 16 * n, words, "small soft") for n, words in enumerate(lines)]


def _tokens(y: float, computed: int, drafts: int, accepted: int) -> list[str]:
    """The computed tokens, the bonus token of the last step, and the drafts."""
    parts, x = [], float(LEFT)
    for position in range(computed + 1 + drafts):
        draft = position - computed - 1
        kind, ink, words = (
            ("two", "ink2", "accepted draft") if draft < accepted - 1 else ("four", "ink4", "rejected draft")
        )
        if draft < 0:
            kind, ink, words = ("one", "ink1", "last bonus token") if draft == -1 else ("idle", "soft", "")
        side = 104 if words else 36
        parts += [svg.box(x, y, side, 30, kind), svg.text(x + side / 2, y + 20, str(position), "middle")]
        parts.append(svg.text(x + side / 2, y + 47, words, f"middle small {ink}"))
        x += side + 8
        if position + 1 == 2 * BLOCK:
            parts.append(svg.line(f"M{x - 4:g} {y - 8}V{y + 38}", "wire wire3"))
            parts.append(svg.text(x - 4, y - 13, f"boundary: {position + 1} tokens", "middle small ink3"))
    return [*parts, svg.text(LEFT, y + 47, f"tokens 0 to {computed - 1} are computed", "small soft")]


def draw() -> str:
    """The figure as SVG."""
    window = 1 + K
    old = running_column(LAST, window, BLOCK)
    computed = tokens_after(certain_tokens(LAST, window, K), LAST_ACCEPTED)
    current = running_column(computed, window, BLOCK)
    read = copy_free(old, LAST_ACCEPTED, current)
    certain = certain_tokens(computed, window, K)
    after = tokens_after(certain, SAMPLED)
    save = boundary_save(certain, after, BLOCK)
    live = current + SAMPLED - 1
    if not (save.passed and save.target < current and current + save.offset == live and after == 2 * BLOCK):
        raise ValueError("the example must pass a boundary, and save it to the left of its window")

    parts = [
        svg.text(
            20,
            34,
            f'One verify step of one request: block_size = {BLOCK}, K = {K} draft tokens, policy "copy_free"',
            "head",
        ),
        svg.text(
            20,
            54,
            "A column of the request's block table names a block. A block holds one state of each layer in the group.",
            "soft",
        ),
        svg.text(20, 111, "its tokens", "head"),
        *_tokens(92, computed, K, SAMPLED),
    ]
    for column in range(COLUMNS):
        parts.append(svg.text(_middle(column), 184, f"column {column}", "middle bold"))
        parts.append(svg.text(_middle(column), 200, f"for {(column + 1) * BLOCK} tokens", "middle small soft"))

    y = 214
    parts += _label(y, "before the step", "begin_step", f"running_column = {old}", f"accepted = {LAST_ACCEPTED}")
    parts += _block(0, y, "two", f"{BLOCK} tokens", "kept boundary", "ink2")
    parts += _block(old, y, "idle", f"{LAST + 1} tokens", "conv window")
    parts += _block(read.recurrent_column, y, "one thick", f"{computed} tokens", "the live state", "ink1")
    parts += _block(old + K, y, "four", f"{LAST + window} tokens", "rejected", "ink4")
    parts.append(svg.box(_x(COLUMNS - 1), y, WIDTH, HEIGHT, "empty"))
    for column in (read.conv_column, read.recurrent_column):
        parts.append(svg.line(f"M{_middle(column)} {y + HEIGHT + 2}v22", "wire wire1", arrow="arrow1"))
    parts.append(
        svg.text(_middle(read.recurrent_column) + 12, y + HEIGHT + 19, "the kernels read these blocks", "small ink1")
    )

    y = 322
    first, last = _x(current), _x(current + K) + WIDTH
    parts += _label(y, "the model runs", "your layers", f"running_column = {current}", "one state per token")
    parts += _block(0, y, "two", f"{BLOCK} tokens")
    parts += _block(old, y, "idle", f"{LAST + 1} tokens", "no longer needed")
    for token in range(window):
        parts += _block(
            current + token, y, "one", f"{certain + token} tokens", f"after token {computed + token}", "ink1"
        )
    parts.append(svg.line(f"M{first} {y + HEIGHT + 8}v8H{last}v-8", "wire wire1"))
    parts.append(
        svg.text((first + last) / 2, y + HEIGHT + 34, "the window: the running column and K more", "middle small ink1")
    )

    y = 436
    parts += _label(y, "after the step", "finish_step", f"accepted = {SAMPLED}", f"{after} tokens computed")
    parts += _block(0, y, "two", f"{BLOCK} tokens", "kept boundary", "ink2")
    parts += _block(save.target, y, "three thick", f"{after} tokens", "kept boundary", "ink3")
    parts += _block(current, y, "idle", f"{certain} tokens", "conv window")
    parts += _block(live, y, "one thick", f"{after} tokens", "the live state", "ink1")
    parts += _block(current + K, y, "four", f"{certain + K} tokens", "rejected", "ink4")
    bottom = y + HEIGHT + 4
    parts.append(
        svg.line(
            f"M{_middle(live)} {bottom}v14q0 8 -8 8H{_middle(save.target) + 8}q-8 0 -8 -8V{bottom + 4}",
            "wire wire3",
            arrow="arrow3",
        )
    )
    parts.append(
        svg.text(
            (_middle(live) + _middle(save.target)) / 2,
            bottom + 40,
            f"boundary save: acceptance passed {after} tokens = ({save.target} + 1) * block_size",
            "middle small ink3",
        )
    )
    parts.append(
        svg.text(
            20,
            574,
            f"The next step reads column running_column + accepted - 1 = {live}. Only the state that is kept was copied.",
            "soft",
        )
    )
    description = (
        f"A request with {computed} computed tokens runs token {computed} and two drafts. The kernels read column "
        f"{read.recurrent_column} and write columns {current} to {current + K}. One draft is accepted, so the state of "
        f"{after} tokens in column {live} is the live one, and it is copied to column {save.target}, where it can be shared."
    )
    return svg.figure(900, 594, "One verify step in align mode", description, parts)
