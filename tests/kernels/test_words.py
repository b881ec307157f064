"""Comments and docstrings of the kernels use the field's nouns: slot, index, tile, term, iteration, variant, SM."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "pallas_kernels"
ROOMS = sorted({path.relative_to(KERNELS).parts[0] for path in KERNELS.rglob("*.py")})
# Behind these words, "share", "turn" and "form" are nouns, not verbs.
_BEFORE_NOUNS = r"(?:\b(?:an?|the|its|their|each|every|one|two|this|these|of|per|both|no|several)|\w's)\s"
_BEFORE_NOUNS += r"(?:(?:own|other|next|last|first|second|full|same|new|old|smaller|larger|given|several)\s)?"
_VAGUE = {
    "place": r"(?<!\bin )(?<!\btakes )(?<!\bthe last )\bplaces?\b",
    "piece": r"\bpieces?\b",
    "share": _BEFORE_NOUNS + r"shares?\b",
    "turn": _BEFORE_NOUNS + r"turns?\b",
    "form": _BEFORE_NOUNS + r"forms?\b",
    "core": r"(?<!\btensor )(?<!\btensor-)\bcores?\b",
    "a noun that is left out": r"(?<!, )\bso many\b|\bthose of\b|\bis told\b|\bwhat there is\b",
}


def prose(source):
    """Yields (line, text) of each block of comments and of each docstring, without code in backticks and names of fields."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found.append((token.start[0], token.string.lstrip("# ")))
    blocks = []
    for line, text in found:
        if blocks and blocks[-1][1] == line - 1:
            blocks[-1] = blocks[-1][0], line, f"{blocks[-1][2]} {text}"
        else:
            blocks.append((line, line, text))
    yield from ((first, _plain(text)) for first, _, text in blocks)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            yield node.body[0].lineno, _plain(ast.get_docstring(node))


def _plain(text):
    """Returns prose without code in backticks, the names of arguments and fields, and line breaks."""
    text = re.sub(r"^ +\w+: ", " ", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "`", text))


def vague(text):
    """Returns the vague words of a text, each with its neighbours."""
    hits = ((name, match) for name, pattern in _VAGUE.items() for match in re.finditer(pattern, text, re.IGNORECASE))
    return [f"{name}: {text[max(match.start() - 20, 0) : match.end() + 20]}" for name, match in hits]


@pytest.mark.parametrize("room", ROOMS)
def test_kernels_call_things_by_the_fields_words(room):
    hits = []
    for path in sorted((KERNELS / room).rglob("*.py")) or [KERNELS / room]:
        hits += [
            f"{path.relative_to(KERNELS)}:{at}: {hit}" for at, text in prose(path.read_text()) for hit in vague(text)
        ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    "text",
    ["Returns the place of a token.", "Two pieces of a tile.", "A share of the rows.", "The last turn.", "Both forms.",
     "Copies so many rows.", "The rows and those of the head.", "What there is.", "A core waits."],
)  # fmt: skip
def test_vague_words_are_found(text):
    assert vague(text)


@pytest.mark.parametrize(
    "text",
    ["The update is in place.", "zeros in place of values", "This takes place in SMEM.", "tensor cores, tensor-core loads",
     "Heads share keys.", "lanes that share each row", "Turns states into blocks.", "to form the inverse",
     "few tokens, so many programs wait"],
)  # fmt: skip
def test_other_meanings_of_these_words_are_let_through(text):
    assert not vague(text)
