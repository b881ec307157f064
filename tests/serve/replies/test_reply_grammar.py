"""Grammars allow what a form and the schemas say, and nothing else, and the parser reads what they allow."""

import json

import pytest
import tokenizers

from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.serve.replies.call_rules import FRAMES
from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS
from mamba_align_jax.serve.replies.grammar import Named, grammar_of
from mamba_align_jax.serve.replies.parser import ReplyParser
from mamba_align_jax.serve.replies.parts import joined

llguidance = pytest.importorskip("llguidance", reason="needs the extra 'structured'")

THINK = REASONING_FORMS["think"]
LOOK = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "box": {"$ref": "#/$defs/Box"},
    },
    "required": ["place", "unit"],
    "additionalProperties": False,
    "$defs": {"Box": {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False}},
}
FUNCTIONS = {"look": LOOK, "now": None, "any": {"type": "object"}}
# In each form: a call of `look` with a quote and a line break in a string, one of `now`, and one of `any`.
ARGUMENTS = [{"place": 'a "b"\nc', "days": 2, "unit": "F", "box": {"a": True}}, {}, {"x": "y"}]
NAMES = ["look", "now", "any"]
JSON = [f'{{"name": "{name}", "arguments": {json.dumps(each)}}}' for name, each in zip(NAMES, ARGUMENTS, strict=True)]
WRITTEN = {
    "hermes": [f"<tool_call>\n{each}\n</tool_call>" for each in JSON],
    "granite4": [f"<tool_call>\n{each}\n</tool_call>" for each in JSON],
    "nemotron_json": [f"<TOOLCALL>[{each}]</TOOLCALL>" for each in JSON],
    "kimi": [
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json.dumps(each)}"
        "<|tool_call_end|><|tool_calls_section_end|>"
        for name, each in zip(NAMES, ARGUMENTS, strict=True)
    ],
    "qwen3_xml": [
        '<tool_call>\n<function=look>\n<parameter=place>\na "b"\nc\n</parameter>\n<parameter=days>\n2\n</parameter>\n'
        '<parameter=unit>\nF\n</parameter>\n<parameter=box>\n{"a": true}\n</parameter>\n</function>\n</tool_call>',
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "<tool_call>\n<function=any>\n<parameter=x>\ny\n</parameter>\n</function>\n</tool_call>",
    ],
    "ling": [
        '<tool_call>look<arg_key>place</arg_key>\n<arg_value>a "b"\nc</arg_value><arg_key>days</arg_key>\n'
        "<arg_value>2</arg_value><arg_key>unit</arg_key>\n<arg_value>F</arg_value><arg_key>box</arg_key>\n"
        '<arg_value>{"a": true}</arg_value>\n</tool_call>',
        "<tool_call>now\n</tool_call>",
        "<tool_call>any<arg_key>x</arg_key>\n<arg_value>y</arg_value>\n</tool_call>",
    ],
    "lfm2": [
        r'<|tool_call_start|>[look(place="a \"b\"\nc", days=2, unit="F", box={"a": true})]<|tool_call_end|>',
        "<|tool_call_start|>[now()]<|tool_call_end|>",
        '<|tool_call_start|>[any(x="y")]<|tool_call_end|>',
    ],
}
END = "<|end|>"
TAGS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_start|>", "<TOOLCALL>", "</TOOLCALL>"),
]


class Allowing:
    """llguidance over bytes and special tokens."""

    def __init__(self, special_tokens):
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {character: number for number, character in enumerate(alphabet)}
        self.tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
        self.tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self.tokenizer.add_special_tokens([END, *special_tokens])
        self.special_tokens = special_tokens
        size = self.tokenizer.get_vocab_size()
        self.vocabulary = llguidance.LLTokenizer(self.tokenizer.to_str(), n_vocab=size, eos_token=[self.token(END)])

    def token(self, text):
        return self.tokenizer.token_to_id(text)

    def allows(self, grammar, text, *, ended=True):
        """Whether a grammar allows a reply, or with `ended=False` its beginning."""
        matcher = llguidance.LLMatcher(
            self.vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar.text), log_level=0
        )
        assert not matcher.get_error()
        tokens = self.tokenizer.encode(text).ids + [self.token(END)] * ended
        return matcher.validate_tokens(tokens) == len(tokens)


@pytest.fixture(scope="module", params=[(), TAGS], ids=["text", "tokens"])
def allowing(request):
    """Tags are text, or tokens."""
    return Allowing(request.param)


def held(form, choice, allowing, *, functions=FUNCTIONS, reasoning=None, **fields):
    return grammar_of(reasoning, TOOL_FORMS[form], functions, choice, special_tokens=allowing.special_tokens, **fields)


def calls_of(form, text, reasoning=None):
    parser = ReplyParser(reasoning, TOOL_FORMS[form], {**FUNCTIONS, "now": {}})
    return joined([*parser.add(text), *parser.end()])


@pytest.mark.parametrize("form", FRAMES)
def test_required_calls_are_allowed_as_they_are_read_and_text_is_not(form, allowing):
    grammar = held(form, "required", allowing)
    for text, name, arguments in zip(WRITTEN[form], NAMES, ARGUMENTS, strict=True):
        assert allowing.allows(grammar, text), text
        ((found, held_arguments),) = calls_of(form, text)
        assert (found, json.loads(held_arguments)) == (name, arguments)
        assert not allowing.allows(grammar, text[:-1])
        assert not allowing.allows(grammar, f"{text} and")
    assert not allowing.allows(grammar, "No.", ended=False)
    assert not allowing.allows(grammar, "")


def test_every_form_has_a_grammar():
    assert FRAMES.keys() == TOOL_FORMS.keys() == WRITTEN.keys()


def two_calls(form):
    """Two calls as the grammar of a form lets them follow each other."""
    frame, first, second = FRAMES[form], WRITTEN[form][1], WRITTEN[form][2]
    end, begin = "".join(frame.end), frame.opening + "".join(frame.begin)
    return first.removesuffix(end) + "".join(frame.between) + second.removeprefix(begin)


@pytest.mark.parametrize("form", FRAMES)
def test_several_calls_are_allowed_only_if_calls_may_be_parallel(form, allowing):
    text = two_calls(form)
    assert [call.name for call in calls_of(form, text)] == ["now", "any"]
    assert allowing.allows(held(form, "required", allowing), text)
    assert not allowing.allows(held(form, "required", allowing, parallel=False), text)


@pytest.mark.parametrize("form", FRAMES)
def test_a_named_function_is_the_only_one(form, allowing):
    grammar = held(form, Named("now"), allowing)
    assert [allowing.allows(grammar, text) for text in WRITTEN[form]] == [False, True, False]


@pytest.mark.parametrize("form", FRAMES)
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (("2", "2"), ("2", '"2"')),  # a number of another type
        (("F", "F"), ("F", "K")),  # a value that is not listed
        (("true", "true"), ("true", "1")),  # within an object that the schema refers to
        (("look", "look"), ("look", "lock")),  # another function
        (("days", "days"), ("days", "nights")),  # another parameter
    ],
)
def test_calls_follow_the_schema(form, allowing, right, wrong):
    grammar, text = held(form, "required", allowing), WRITTEN[form][0]
    assert allowing.allows(grammar, text.replace(*right))
    assert text.replace(*wrong) != text
    assert not allowing.allows(grammar, text.replace(*wrong), ended=False)


@pytest.mark.parametrize("form", FRAMES)
def test_optional_arguments_may_lack(form, allowing):
    grammar, text = held(form, "required", allowing), WRITTEN[form][0]
    shorter = {
        "qwen3_xml": text.replace("<parameter=days>\n2\n</parameter>\n", ""),
        "ling": text.replace("<arg_key>days</arg_key>\n<arg_value>2</arg_value>", ""),
        "lfm2": text.replace("days=2, ", "").replace(', box={"a": true}', ""),
    }.get(form, text.replace('"days": 2, ', ""))
    assert shorter != text
    assert allowing.allows(grammar, shorter)


@pytest.mark.parametrize("form", FRAMES)
def test_required_arguments_may_not_lack(form, allowing):
    text = WRITTEN[form][0]
    without = {
        "qwen3_xml": text.replace('<parameter=place>\na "b"\nc\n</parameter>\n', ""),
        "ling": text.replace('<arg_key>place</arg_key>\n<arg_value>a "b"\nc</arg_value>', ""),
        "lfm2": text.replace(r'place="a \"b\"\nc", ', ""),
    }.get(form, text.replace(r'"place": "a \"b\"\nc", ', ""))
    assert without != text
    assert not allowing.allows(held(form, "required", allowing), without, ended=False)


def test_arguments_are_an_object_with_one_space_between_its_parts(allowing):
    grammar = held("hermes", "required", allowing, functions={"f": {"properties": {"a": {"type": "integer"}}}})
    texts = [
        f'<tool_call>\n{{"name": "f", "arguments": {each}}}\n</tool_call>' for each in ('{"a": 1}', '{"a":  1}', "1")
    ]
    assert [allowing.allows(grammar, text) for text in texts] == [True, False, False]


@pytest.mark.parametrize("form", FRAMES)
def test_reasoning_may_come_first_and_must_end_if_it_has_begun(form, allowing):
    text, other = WRITTEN[form][1], WRITTEN[form][2]
    grammar = held(form, "required", allowing, reasoning=THINK)
    assert allowing.allows(grammar, text)
    assert allowing.allows(grammar, f"<think>\nWhy {other}?\n</think>\n\n{text}") == (not allowing.special_tokens)
    assert allowing.allows(grammar, f"<think>\nWhy?\n</think>\n\n{text}")
    assert not allowing.allows(grammar, "<think>Why?</think>So", ended=False)
    assert not allowing.allows(grammar, "<think>Why?")
    begun = held(form, "required", allowing, reasoning=THINK, begins_in_reasoning=True)
    assert allowing.allows(begun, f"Why?</think>{text}")
    assert not allowing.allows(begun, text)


@pytest.mark.parametrize("form", FRAMES)
def test_with_strict_functions_text_is_free_and_calls_are_held(form, allowing):
    """`now` is strict, so it takes no arguments. `look` is not, so it may have any."""
    grammar = held(form, "auto", allowing, strict=["now"], reasoning=THINK)
    look, now, other = WRITTEN[form]
    loose = look.replace("days", "nights")
    for text in (
        "",
        "<",
        "<thing> No.",
        f"So {loose}",
        now,
        f"<think>a</think>{other}",
        "<think>a</think>No.",
        "<think>a</think>",
    ):
        assert allowing.allows(grammar, text), text
    assert not allowing.allows(grammar, other.replace("any", "now"), ended=False)
    assert not allowing.allows(grammar, f"<think>a</think>Yes {other.replace('any', 'new')}", ended=False)
    if not allowing.special_tokens:
        assert allowing.allows(grammar, f"<think>a {other.replace('any', 'now')}</think>{now}")


@pytest.mark.parametrize(
    ("response", "right", "wrong"),
    [
        (
            Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'),
            '{"a": 1}',
            '{"a": "b"}',
        ),
        (Grammar("json_object"), '{"a": "b"}', "[1]"),
        (Grammar("regex", "a/[bc]+"), "a/bcb", "ab"),
        (Grammar("lark", 'start: x "c"\nx: /b+/'), "bbc", "c"),
    ],
)
def test_an_answer_of_a_grammar_may_follow_reasoning_or_be_replaced_by_calls(allowing, response, right, wrong):
    functions = FUNCTIONS
    assert grammar_of(None, None, {}, "none", response) == response
    special_tokens = allowing.special_tokens
    alone = grammar_of(THINK, TOOL_FORMS["hermes"], functions, "none", response, special_tokens=special_tokens)
    both = grammar_of(THINK, TOOL_FORMS["hermes"], functions, "auto", response, special_tokens=special_tokens)
    for grammar in (alone, both):
        assert allowing.allows(grammar, right)
        assert allowing.allows(grammar, f"<think>Why?</think>\n\n{right}")
        assert not allowing.allows(grammar, f"<think>Why?</think>{wrong}")
    assert allowing.allows(both, WRITTEN["hermes"][0])
    assert not allowing.allows(alone, WRITTEN["hermes"][0])
    required = grammar_of(THINK, TOOL_FORMS["hermes"], functions, "required", response, special_tokens=special_tokens)
    assert not allowing.allows(required, right)


def test_nothing_is_held_without_a_reason():
    assert grammar_of(THINK, TOOL_FORMS["hermes"], FUNCTIONS, "auto") is None
    assert grammar_of(THINK, TOOL_FORMS["hermes"], FUNCTIONS, "none", strict=["now"]) is None
    assert grammar_of(THINK, None, FUNCTIONS, "auto", strict=["now"]) is None


@pytest.mark.parametrize(
    ("form", "functions", "choice"),
    [(None, FUNCTIONS, "required"), ("hermes", {}, "required"), ("hermes", FUNCTIONS, Named("no"))],
)
def test_a_call_that_nothing_can_make_is_refused(form, functions, choice):
    with pytest.raises(ValueError, match="choice must be of a function of a known form"):
        grammar_of(None, TOOL_FORMS.get(form), functions, choice)
