"""Replies as models write them, well and badly, each with the parts that it has. The project wrote all of them."""

from typing import NamedTuple

from mamba_align_jax.serve.replies.parts import Call, Content, Part, Reasoning

# The functions of every request.
FUNCTIONS = {
    "look": {
        "type": "object",
        "properties": {
            "place": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "near": {"type": ["string", "null"]},
            "scale": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "box": {"$ref": "#/$defs/Box"},
            "note": {"$ref": "#/$defs/Text~1plain"},
            "any": {},
        },
        "$defs": {"Box": {"type": "object"}, "Text/plain": {"type": "string"}},
    },
    "now": {"type": "object", "properties": {}},
}


class Output(NamedTuple):
    """A reply.

    Attributes:
        tools, reasoning: The names of the forms; empty for none.
        text: The reply.
        parts: Its parts.
        begun: The prompt ended within the reasoning.
    """

    tools: str
    reasoning: str
    text: str
    parts: list[Part]
    begun: bool = False


def call(name: str = "now", arguments: str = "{}") -> Call:
    return Call(name, arguments)


def told(text: str) -> list[Part]:
    """A reply that is all answer."""
    return [Content(text)]


def hermes(text: str, *parts: Part, tools: str = "hermes") -> Output:
    return Output(tools, "", text, list(parts))


NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
HERMES = [
    hermes(NOW, call()),
    hermes(f"I look.\n{NOW}", Content("I look."), call()),
    hermes(f"{NOW}\n{NOW}", call(), call()),
    hermes(f"{NOW}\nThat was it.", call(), Content("That was it.")),
    hermes(f"one {NOW} two {NOW} three", Content("one"), call(), Content("two"), call(), Content("three")),
    hermes(f" \n{NOW}\n \n", call()),
    hermes('<tool_call>{"name":"look","arguments":{"place":"Ulm"}}</tool_call>', call("look", '{"place":"Ulm"}')),
    hermes('<tool_call>{"arguments": {"days": 2}, "name": "look"}</tool_call>', call("look", '{"days": 2}')),
    hermes('<tool_call>\n{"name": "now"}\n</tool_call>', call()),
    hermes('<tool_call>{"name": "look", "arguments": "{\\"days\\": 1}"}</tool_call>', call("look", '{"days": 1}')),
    # Tags, brackets and quotes in strings.
    hermes(
        '<tool_call>{"name": "look", "arguments": {"place": "</tool_call>"}}</tool_call>',
        call("look", '{"place": "</tool_call>"}'),
    ),
    hermes(
        '<tool_call>{"name": "look", "arguments": {"place": "<tool_call>{}</tool_call>"}}</tool_call>',
        call("look", '{"place": "<tool_call>{}</tool_call>"}'),
    ),
    hermes(
        r'<tool_call>{"name": "look", "arguments": {"place": "}\"}\\"}}</tool_call>',
        call("look", r'{"place": "}\"}\\"}'),
    ),
    hermes(
        '<tool_call>{"name": "look", "arguments": {"box": {"a": [[{"b": {}}], []]}}}</tool_call>',
        call("look", '{"box": {"a": [[{"b": {}}], []]}}'),
    ),
    # What a decoder would change stays as it is.
    hermes(
        '<tool_call>{"name": "look", "arguments": {"scale": 1.50e+999, "place": "\\u00e4"}}</tool_call>',
        call("look", '{"scale": 1.50e+999, "place": "\\u00e4"}'),
    ),
    hermes(
        '<tool_call>{"name": "look", "arguments": {"place": "two\nlines"}}</tool_call>',
        call("look", '{"place": "two\\nlines"}'),
    ),
    hermes(
        '<tool_call>{"name": "look", "arguments": {"place": "\\ud800\n"}}</tool_call>',
        call("look", r'{"place": "\ud800\n"}'),
    ),
    hermes('<tool_call>{"name": "lööki", "arguments": {"ö": "😀"}}</tool_call>', call("lööki", '{"ö": "😀"}')),
    hermes('<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', call("unknown")),
    # The reply ends early.
    hermes('<tool_call>{"name": "now", "arguments": {}}', call()),
    hermes('<tool_call>{"name": "now", "arguments": {}}\n</tool_c', call()),
    hermes("Look: <tool_", Content("Look: <tool_")),
    hermes("<", *told("<")),
    hermes("<tool_call>", *told("<tool_call>")),
    hermes('<tool_call>{"name": "now", "argu', *told('<tool_call>{"name": "now", "argu')),
    hermes(
        '<tool_call>{"name": "now", "arguments": {"a": "b', *told('<tool_call>{"name": "now", "arguments": {"a": "b')
    ),
    # No calls.
    hermes("", *[]),
    hermes("  \n", *told("  \n")),
    hermes("a < b <tool> c </tool_call>\n", *told("a < b <tool> c </tool_call>\n")),
    hermes("<tool_call>\n</tool_call>", *told("<tool_call>\n</tool_call>")),
    hermes("<tool_call>{}</tool_call>", *told("<tool_call>{}</tool_call>")),
    hermes("<tool_call>[]</tool_call>", *told("<tool_call>[]</tool_call>")),
    hermes(
        '<tool_call>{"name": 1, "arguments": {}}</tool_call>',
        *told('<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    ),
    hermes(r'<tool_call>{"name": "\ud800"}</tool_call>', *told(r'<tool_call>{"name": "\ud800"}</tool_call>')),
    hermes('<tool_call>{"name": ""}</tool_call>', *told('<tool_call>{"name": ""}</tool_call>')),
    hermes(
        '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
        *told('<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    ),
    hermes(
        '<tool_call>{"name": "now", "arguments": "no"}</tool_call>',
        *told('<tool_call>{"name": "now", "arguments": "no"}</tool_call>'),
    ),
    hermes("<tool_call>{'name': 'now'}</tool_call>", *told("<tool_call>{'name': 'now'}</tool_call>")),
    hermes('<tool_call>{"name": "now",}</tool_call> so', *told('<tool_call>{"name": "now",}</tool_call> so')),
    hermes('<tool_call>{"name": "now"} and</tool_call>', *told('<tool_call>{"name": "now"} and</tool_call>')),
    hermes(
        '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>',
        *told('<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>'),
    ),
    # A call behind one that is wrong.
    hermes(f"<tool_call> is a tag.\n{NOW}", Content("<tool_call> is a tag."), call()),
    hermes(f"<tool_call>{NOW}", Content("<tool_call>"), call()),
    hermes(
        f'<tool_call>{{"name": "now", "arguments": {{}}\n</tool_call>\n{NOW}',
        Content('<tool_call>{"name": "now", "arguments": {}\n</tool_call>'),
        call(),
    ),
    hermes(f"{NOW}\n<tool_call>no</tool_call>", call(), Content("<tool_call>no</tool_call>")),
    hermes(f"<tool_<tool_call<{NOW}", Content("<tool_<tool_call<"), call()),
]
GRANITE = [
    hermes(f"I will ask.\n{NOW}", Content("I will ask."), call(), tools="granite4"),
    hermes(f"{NOW}\n{NOW}", call(), call(), tools="granite4"),
    hermes(
        '<tool_call>\n{"name": "look", "arguments": {"place": "A & B"}}\n</tool_call>',
        call("look", '{"place": "A & B"}'),
        tools="granite4",
    ),
    hermes("<tool_call>look</tool_call>", *told("<tool_call>look</tool_call>"), tools="granite4"),
    hermes('{"name": "now", "arguments": {}}', *told('{"name": "now", "arguments": {}}'), tools="granite4"),
]


def qwen(text: str, *parts: Part) -> Output:
    return Output("qwen3_xml", "", text, list(parts))


def asked(*parameters: tuple[str, str], name: str = "look") -> str:
    """A call as Qwen's templates write it."""
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


QWEN = [
    qwen(asked(name="now"), call()),
    qwen(asked(("place", "Ulm")), call("look", '{"place": "Ulm"}')),
    qwen(f"I look.\n\n{asked(('days', '3'))}", Content("I look."), call("look", '{"days": 3}')),
    qwen(f"{asked(name='now')}\n{asked(('days', '3'))}\n", call(), call("look", '{"days": 3}')),
    qwen(
        asked(("place", "Ulm"), ("days", "2"), ("exact", "true")),
        call("look", '{"place": "Ulm", "days": 2, "exact": true}'),
    ),
    # Types of parameters.
    qwen(asked(("place", "3")), call("look", '{"place": "3"}')),
    qwen(asked(("place", "null")), call("look", '{"place": "null"}')),
    qwen(asked(("exact", "False")), call("look", '{"exact": false}')),
    qwen(asked(("note", "3")), call("look", '{"note": "3"}')),
    qwen(asked(("near", "None")), call("look", '{"near": null}')),
    qwen(asked(("near", "3")), call("look", '{"near": "3"}')),
    qwen(asked(("scale", "1.5")), call("look", '{"scale": 1.5}')),
    qwen(asked(("scale", "big")), call("look", '{"scale": "big"}')),
    qwen(asked(("days", "soon")), call("look", '{"days": "soon"}')),
    qwen(asked(("days", "NaN")), call("look", '{"days": "NaN"}')),
    qwen(asked(("tags", '["a", "</parameter>"]')), call("look", '{"tags": ["a", "</parameter>"]}')),
    qwen(asked(("box", '{"a": {"b": 1}}')), call("look", '{"box": {"a": {"b": 1}}}')),
    qwen(asked(("any", "[1]"), ("other", "x")), call("look", '{"any": [1], "other": "x"}')),
    qwen(asked(("a", "1"), name="unknown"), call("unknown", '{"a": 1}')),
    # Whitespace of values.
    qwen(asked(("place", "")), call("look", '{"place": ""}')),
    qwen(asked(("place", "\n two\n\nlines \n")), call("look", '{"place": "\\n two\\n\\nlines \\n"}')),
    qwen(
        "<tool_call><function=look><parameter=place>Ulm</parameter><parameter=days> 1 </parameter></function></tool_call>",
        call("look", '{"place": "Ulm", "days": 1}'),
    ),
    # Tags in values.
    qwen(
        asked(("place", "<tool_call>\n<function=now>\n</function>\n</tool_call>")),
        call("look", '{"place": "<tool_call>\\n<function=now>\\n</function>\\n</tool_call>"}'),
    ),
    qwen(asked(("place", "a</parameter>b")), call("look", '{"place": "a</parameter>b"}')),
    qwen(
        asked(("place", "</parameter>\n</function>\nx"), ("days", "1")),
        call("look", '{"place": "</parameter>\\n</function>\\nx", "days": 1}'),
    ),
    qwen(asked(("place", "<parameter=days>\n1")), call("look", '{"place": "<parameter=days>\\n1"}')),
    qwen(asked(("place", 'say "hi" \\ 😀')), call("look", '{"place": "say \\"hi\\" \\\\ 😀"}')),
    # A value that the form can't express is read to the point where the call could go on.
    qwen(
        asked(("place", "a\n</parameter>\n<parameter=days>\n1")),
        call("look", '{"place": "a", "days": 1}'),
    ),
    qwen(
        asked(("place", "a\n</parameter>\n</function>\n</tool_call>b")),
        call("look", '{"place": "a"}'),
        Content("b\n</parameter>\n</function>\n</tool_call>"),
    ),
    # Without its first tag.
    qwen("<function=now>\n</function>\n</tool_call>", call()),
    qwen(
        "Now:\n<function=look>\n<parameter=days>\n1\n</parameter>\n</function> ok",
        Content("Now:"),
        call("look", '{"days": 1}'),
        Content("ok"),
    ),
    # The reply ends early.
    qwen("<tool_call>\n<function=now>\n</function>", call()),
    qwen("<tool_call>\n<function=now>\n</function>\n</tool_", call()),
    qwen("<tool_call>\n<function=look>\n<parameter=days>\n1\n</parameter>\n</function>\n", call("look", '{"days": 1}')),
    qwen("<tool_call>\n<function=now>\n</func", *told("<tool_call>\n<function=now>\n</func")),
    qwen(
        "<tool_call>\n<function=look>\n<parameter=days>\n1\n</parameter>\n",
        *told("<tool_call>\n<function=look>\n<parameter=days>\n1\n</parameter>\n"),
    ),
    qwen("<tool_call>\n<function=look>\n<parameter=da", *told("<tool_call>\n<function=look>\n<parameter=da")),
    qwen("a <function", *told("a <function")),
    # No calls.
    qwen("Use <tool_call> so.", *told("Use <tool_call> so.")),
    qwen(NOW, *told(NOW)),
    qwen(
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        *told("<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ),
    qwen(
        "<tool_call>\n<function=a\nb>\n</function>\n</tool_call>",
        *told("<tool_call>\n<function=a\nb>\n</function>\n</tool_call>"),
    ),
    qwen(
        "<tool_call>\n<function=now>\n{}\n</function>\n</tool_call>",
        *told("<tool_call>\n<function=now>\n{}\n</function>\n</tool_call>"),
    ),
    # A call behind one that is wrong.
    qwen(f"<tool_call>\n{asked(name='now')}", Content("<tool_call>"), call()),
    qwen(f"<function=x <function=y\n{asked(name='now')}", Content("<function=x <function=y"), call()),
]


def ling(text: str, *parts: Part) -> Output:
    return Output("ling", "", text, list(parts))


def ling_call(*parameters: tuple[str, str], name: str = "look") -> str:
    inner = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in parameters)
    return f"<tool_call>{name}\n{inner}\n</tool_call>"


LING = [
    ling("<tool_call>now\n</tool_call>", call()),
    ling("<tool_call>now</tool_call>", call()),
    ling(ling_call(("place", "Ulm"), ("days", "2")), call("look", '{"place": "Ulm", "days": 2}')),
    ling(
        f"So.\n{ling_call(('days', '2'))}\n{ling_call(name='now')}", Content("So."), call("look", '{"days": 2}'), call()
    ),
    ling(ling_call(("place", " \nUlm\n ")), call("look", '{"place": " \\nUlm\\n "}')),
    ling(ling_call(("box", '{"a": "</arg_value>"}')), call("look", '{"box": {"a": "</arg_value>"}}')),
    ling(
        ling_call(("place", "</arg_value></tool_cal</arg_value>")),
        call("look", '{"place": "</arg_value></tool_cal</arg_value>"}'),
    ),
    ling(ling_call(("place", "<tool_call>now</tool_call>")), call("look", '{"place": "<tool_call>now</tool_call>"}')),
    ling(
        ling_call(("place", "a</arg_value>\n</tool_call> b")),
        call("look", '{"place": "a"}'),
        Content("b</arg_value>\n</tool_call>"),
    ),
    ling(ling_call(("a", "x"), name="unknown"), call("unknown", '{"a": "x"}')),
    ling("<tool_call>now\n</tool_c", *told("<tool_call>now\n</tool_c")),
    ling(
        "<tool_call>look\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>",
        *told("<tool_call>look\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>"),
    ),
    ling("<tool_call>look\n<arg_key>days</arg_key>\n2", *told("<tool_call>look\n<arg_key>days</arg_key>\n2")),
    ling("<tool_call>begins calls\n</tool_call>", *told("<tool_call>begins calls\n</tool_call>")),
    ling("<tool_call> begins a call\n", *told("<tool_call> begins a call\n")),
    ling(f"{NOW} ok", *told(f"{NOW} ok")),
    ling(f"<tool_call>\n{ling_call(name='now')}", Content("<tool_call>"), call()),
    ling("<tool_call></tool_call>", *told("<tool_call></tool_call>")),
]
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi(text: str, *parts: Part, reasoning: str = "") -> Output:
    return Output("kimi", reasoning, text, list(parts))


def kimi_call(identifier: str = "functions.now:0", arguments: str = "{}") -> str:
    return f"<|tool_call_begin|>{identifier}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI = [
    kimi(f"{KIMI_BEGIN}{kimi_call()}{KIMI_END}", call()),
    kimi(f"Ok. {KIMI_BEGIN}{kimi_call()}{KIMI_END}", Content("Ok."), call()),
    kimi(
        KIMI_BEGIN + kimi_call() + kimi_call("functions.look:1", '{"days": 1}') + KIMI_END,
        call(),
        call("look", '{"days": 1}'),
    ),
    kimi(f"{KIMI_BEGIN}\n{kimi_call()}\n{KIMI_END}\nDone", call(), Content("Done")),
    kimi(f"{KIMI_BEGIN}{kimi_call('functions.a.b:c:12')}{KIMI_END}", call("a.b:c")),
    kimi(f"{KIMI_BEGIN}{kimi_call('now')}{KIMI_END}", call()),
    kimi(f"{KIMI_BEGIN}{kimi_call('now:x')}{KIMI_END}", call("now:x")),
    kimi(
        KIMI_BEGIN + kimi_call(arguments='{"a": "<|tool_call_end|>"}') + KIMI_END,
        call("now", '{"a": "<|tool_call_end|>"}'),
    ),
    kimi(f"{KIMI_BEGIN}{kimi_call()}{KIMI_END}{KIMI_BEGIN}{kimi_call()}{KIMI_END}", call(), call()),
    # The reply ends early.
    kimi(f"{KIMI_BEGIN}{kimi_call()}", call()),
    kimi(f"{KIMI_BEGIN}{kimi_call()}<|tool_calls", call(), Content("<|tool_calls")),
    kimi(f"{KIMI_BEGIN}<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{{}}<|tool_", call()),
    kimi(
        f"{KIMI_BEGIN}<|tool_call_begin|>functions.now:0<|tool",
        *told(f"{KIMI_BEGIN}<|tool_call_begin|>functions.now:0<|tool"),
    ),
    kimi(
        f"{KIMI_BEGIN}{kimi_call()}<|tool_call_begin|>functions.now:1",
        call(),
        Content("<|tool_call_begin|>functions.now:1"),
    ),
    # No calls.
    kimi(f"{KIMI_BEGIN}{KIMI_END}", *told(f"{KIMI_BEGIN}{KIMI_END}")),
    kimi(f"{KIMI_BEGIN}no", *told(f"{KIMI_BEGIN}no")),
    kimi(
        f"{KIMI_BEGIN}{kimi_call('functions.:0')}{KIMI_END}",
        *told(f"{KIMI_BEGIN}{kimi_call('functions.:0')}{KIMI_END}"),
    ),
    kimi(
        f"{KIMI_BEGIN}{kimi_call(arguments='[]')}{KIMI_END}",
        *told(f"{KIMI_BEGIN}{kimi_call(arguments='[]')}{KIMI_END}"),
    ),
    # A call beside one that is wrong.
    kimi(
        f"{KIMI_BEGIN}{kimi_call(arguments='{a}')}{kimi_call()}{KIMI_END}",
        Content(f"{KIMI_BEGIN}{kimi_call(arguments='{a}')}"),
        call(),
    ),
    kimi(
        f"{KIMI_BEGIN}{kimi_call()}{kimi_call(arguments='no')}{kimi_call()}{KIMI_END}",
        call(),
        Content(kimi_call(arguments="no")),
        call(),
    ),
    # Reasoning, whose whitespace counts in this family.
    kimi(
        f"<think>I\n</think>\nYes {KIMI_BEGIN}{kimi_call()}{KIMI_END}",
        Reasoning("I\n"),
        Content("\nYes"),
        call(),
        reasoning="kimi",
    ),
    kimi(f"<think>I {KIMI_BEGIN}{kimi_call()}{KIMI_END}", Reasoning("I "), call(), reasoning="kimi"),
    kimi(f"<think></think>{KIMI_BEGIN}{kimi_call()}{KIMI_END}", call(), reasoning="kimi"),
    kimi(f"<think>{KIMI_BEGIN}x", Content(f"{KIMI_BEGIN}x"), reasoning="kimi"),
]


def lfm2(text: str, *parts: Part) -> Output:
    return Output("lfm2", "", f"<|tool_call_start|>{text}<|tool_call_end|>", list(parts))


def lfm2_told(text: str) -> Output:
    return lfm2(text, *told(f"<|tool_call_start|>{text}<|tool_call_end|>"))


LFM2 = [
    lfm2("[now()]", call()),
    lfm2("[look(place='Ulm')]", call("look", '{"place": "Ulm"}')),
    lfm2('[look(place="Ulm", days=2), now( )]', call("look", '{"place": "Ulm", "days": 2}'), call()),
    lfm2(
        "[look(exact=True, near=None, scale=-1.5e-05, tags=['a', \"b\"], box={\"a\": [true, null], 'b': {}})]",
        call(
            "look",
            '{"exact": true, "near": null, "scale": -1.5e-05, "tags": ["a", "b"], "box": {"a": [true, null], "b": {}}}',
        ),
    ),
    lfm2(
        " [\n  look(\n    days = 1,\n  ),\n] ",
        *told("<|tool_call_start|> [\n  look(\n    days = 1,\n  ),\n] <|tool_call_end|>"),
    ),
    lfm2(" [\n  look(\n    days = 1\n  )\n] ", call("look", '{"days": 1}')),
    # The template escapes nothing in strings.
    lfm2(
        "[look(place='it's 5 o'clock, 'here' (so)', days=1)]",
        call("look", '{"place": "it\'s 5 o\'clock, \'here\' (so)", "days": 1}'),
    ),
    lfm2("[look(place='two\nlines')]", call("look", '{"place": "two\\nlines"}')),
    lfm2("[look(place='])]'), now()]", call("look", '{"place": "])]"}'), call()),
    lfm2("[look(place='<|tool_call_end|>')]", call("look", '{"place": "<|tool_call_end|>"}')),
    lfm2(
        "[look(place='a]<|tool_call_end|>')]",
        *told("<|tool_call_start|>[look(place='a]<|tool_call_end|>')]<|tool_call_end|>"),
    ),
    lfm2_told("[look(place='a', days=1')]"),
    lfm2("[look(place='a', days=1, near='b')]", call("look", '{"place": "a", "days": 1, "near": "b"}')),
    # Escapes of Python and JSON.
    lfm2(
        r"[look(place='a\'b\n\\ \u00e4 \x41 \d \ud83d\ude00 \ud83d')]",
        call("look", '{"place": "a\'b\\n\\\\ ä A \\\\d 😀 �"}'),
    ),
    lfm2(r"[look(tags=['it\'s', 'a, b=1'])]", call("look", '{"tags": ["it\'s", "a, b=1"]}')),
    lfm2("[unknown(user-id='x')]", call("unknown", '{"user-id": "x"}')),
    lfm2("[a.b(c=[])]", call("a.b", '{"c": []}')),
    # No calls.
    lfm2_told("[]"),
    lfm2_told("now()"),
    lfm2_told("[now]"),
    lfm2_told("[look('Ulm')]"),
    lfm2_told("[look(days=1 + 1)]"),
    lfm2_told("[look(days=007)]"),
    lfm2_told("[look(place='Ulm)]"),
    lfm2_told("[look(days=[1, 2)]"),
    lfm2_told("[look(days={1: 2})]"),
    lfm2_told("[now()] and [now()]"),
    lfm2_told("[look(days=now())]"),
    lfm2_told('{"name": "now"}'),
    Output("lfm2", "", "a <|tool_call_start|>[now()]<|tool_call_end|> b", [Content("a"), call(), Content("b")]),
    # The reply ends early.
    Output("lfm2", "", "<|tool_call_start|>[now()]", [call()]),
    Output("lfm2", "", "<|tool_call_start|>[now()] <|tool_ca", [call()]),
    Output("lfm2", "", "<|tool_call_start|>[now(), no", told("<|tool_call_start|>[now(), no")),
    Output("lfm2", "", "<|tool_call", told("<|tool_call")),
    Output(
        "lfm2",
        "",
        "<|tool_call_start|>x<|tool_call_start|>[now()]<|tool_call_end|>",
        [Content("<|tool_call_start|>x"), call()],
    ),
]


def nemotron(text: str, *parts: Part) -> Output:
    return Output("nemotron_json", "", text, list(parts))


NEMOTRON = [
    nemotron('<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>', call()),
    nemotron(
        'So\n<TOOLCALL>[{"name": "now"}, {"name": "look", "arguments": {"days": 1}}]</TOOLCALL>',
        Content("So"),
        call(),
        call("look", '{"days": 1}'),
    ),
    nemotron(
        '<TOOLCALL>[{"name": "look", "arguments": {"place": "]</TOOLCALL>"}}]</TOOLCALL>',
        call("look", '{"place": "]</TOOLCALL>"}'),
    ),
    nemotron('<TOOLCALL>[{"name": "look", "arguments": "{\\"days\\": 1}"}]</TOOL', call("look", '{"days": 1}')),
    nemotron("<TOOLCALL>[]</TOOLCALL>", *told("<TOOLCALL>[]</TOOLCALL>")),
    nemotron('<TOOLCALL>[{"name": "now"}, 1]</TOOLCALL>', *told('<TOOLCALL>[{"name": "now"}, 1]</TOOLCALL>')),
    nemotron('<TOOLCALL>{"name": "now"}</TOOLCALL>', *told('<TOOLCALL>{"name": "now"}</TOOLCALL>')),
]


def think(text: str, *parts: Part, tools: str = "", begun: bool = False) -> Output:
    return Output(tools, "think", text, list(parts), begun)


THINK = [
    think("<think>\nWhy?\n</think>\n\nSo.", Reasoning("Why?"), Content("So.")),
    think("Why?\n</think>\n\nSo.", Reasoning("Why?"), Content("So."), begun=True),
    think("\nWhy?\n\nSo?\n</think>So.\n", Reasoning("Why?\n\nSo?"), Content("So.\n"), begun=True),
    think("<think>\n\n</think>\n\nSo.", Content("So.")),
    think("</think>\n\nSo.", Content("So."), begun=True),
    think("<think></think>    indented", Content("    indented")),
    think("\n<think>Why?</think>So.", Reasoning("Why?"), Content("So.")),
    think("So.", Content("So.")),
    think(" So.\n", Content(" So.\n")),
    think("So, </think> is a tag, and <think> too.", Content("So, </think> is a tag, and <think> too.")),
    think("<think>a</think>b<think>c</think>", Reasoning("a"), Content("b<think>c</think>")),
    # The reply ends early.
    think("Why", Reasoning("Why"), begun=True),
    think("Why</thi", Reasoning("Why</thi"), begun=True),
    think("<think>Why\n", Reasoning("Why\n")),
    think("<think", Content("<think")),
    think("<think>", *[]),
    think("", *[], begun=True),
    # With calls.
    think(f"<think>\nWhy?\n</think>\n\n{NOW}", Reasoning("Why?"), call(), tools="hermes"),
    think(
        f"Why?\n</think>\nSo.\n{asked(name='now')}",
        Reasoning("Why?"),
        Content("So."),
        call(),
        tools="qwen3_xml",
        begun=True,
    ),
    think(f"Why? {NOW}\n</think>\n{NOW}", Reasoning(f"Why? {NOW}"), call(), tools="hermes", begun=True),
    think(f"<think>{NOW}", Reasoning(NOW), tools="hermes"),
    think(f"{NOW}<think>x</think>", call(), Content("<think>x</think>"), tools="hermes"),
    think("<think>a</think>\n<tool_call>now\n</tool_call>", Reasoning("a"), call(), tools="ling"),
    think("<think>a</think><|tool_call_start|>[now()]<|tool_call_end|>", Reasoning("a"), call(), tools="lfm2"),
    think(
        'a\n</think>\n\n<TOOLCALL>[{"name": "now"}]</TOOLCALL>',
        Reasoning("a"),
        call(),
        tools="nemotron_json",
        begun=True,
    ),
    # Without a form.
    Output("", "", f"<think>a</think> {NOW} \n", told(f"<think>a</think> {NOW} \n")),
]
OUTPUTS = [*HERMES, *GRANITE, *QWEN, *LING, *KIMI, *LFM2, *NEMOTRON, *THINK]
