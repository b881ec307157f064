"""Replies are cut into their parts, which are the same however the text comes."""

import itertools
import json
import random

import pytest
from serve.replies.outputs import FUNCTIONS, OUTPUTS

from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS
from mamba_align_jax.serve.replies.parser import ReplyParser
from mamba_align_jax.serve.replies.parts import Call, joined


def parser_of(tools="", reasoning="", begun=False):
    return ReplyParser(REASONING_FORMS.get(reasoning), TOOL_FORMS.get(tools), FUNCTIONS, begins_in_reasoning=begun)


def parts_of(output, cuts=()):
    """The parts of a reply that comes in pieces."""
    parser = parser_of(output.tools, output.reasoning, output.begun)
    places = [0, *cuts, len(output.text)]
    parts = [part for start, end in itertools.pairwise(places) for part in parser.add(output.text[start:end])]
    return joined([*parts, *parser.end()])


@pytest.mark.parametrize("output", OUTPUTS, ids=[f"{each.tools}-{each.text[:40]!r}" for each in OUTPUTS])
def test_a_reply_has_the_parts_that_are_written_down_wherever_it_is_cut(output):
    assert parts_of(output) == output.parts
    size = len(output.text)
    for cut in range(1, size):
        assert parts_of(output, [cut]) == output.parts, cut
    assert parts_of(output, range(1, size)) == output.parts
    drawn = random.Random(output.text)
    for _ in range(8):
        cuts = sorted(drawn.sample(range(size + 1), min(2, size)))
        assert parts_of(output, cuts) == output.parts, cuts


def test_the_arguments_of_every_call_are_the_text_of_a_json_object():
    for output in OUTPUTS:
        for part in output.parts:
            assert not isinstance(part, Call) or isinstance(json.loads(part.arguments), dict)


def test_the_table_has_every_form():
    assert len(OUTPUTS) >= 100
    assert {output.tools for output in OUTPUTS} == {"", *TOOL_FORMS}
    assert {output.reasoning for output in OUTPUTS} == {"", *REASONING_FORMS}
