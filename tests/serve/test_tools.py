"""Chats offer tools to the model, and get its calls and its reasoning back, in one piece and as events."""

import json

import pytest
from fakes.http import Served, answer
from fakes.script import Script
from serve.conftest import LIMITS

from mamba_align_jax.engine.scheduling.request import RequestOutput, RequestUpdate
from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.errors import GrammarError
from mamba_align_jax.serve.settings import Settings

pytest.importorskip("llguidance")
CHAT = "/v1/chat/completions"
# In the form of Hermes and Qwen3.
TEMPLATE = r"""
{%- for tool in tools or [] %}{{ tool | tojson ~ "\n" }}{% endfor %}
{%- for message in messages %}
{{- message.role ~ ": " }}
{%- if message.reasoning_content %}{{ "<think>" ~ message.reasoning_content ~ "</think>" }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>{"name": "' ~ call.function.name ~ '", ' }}
{{- '"arguments": ' ~ call.function.arguments | tojson ~ "}</tool_call>" }}
{%- endfor %}
{{- "\n" }}
{%- endfor %}
{%- if effort is defined %}{{ reasoning_effort }}{% endif %}
{%- if add_generation_prompt %}{{ "assistant: " }}{% if enable_thinking %}{{ "<think>\n" }}{% endif %}{% endif %}"""
PLACE = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 5}}, "required": ["place"]}
PLACE["additionalProperties"] = False
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Says it.", "parameters": PLACE}}
CLOCK = {"type": "function", "function": {"name": "clock"}}
ASK = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER, CLOCK], "temperature": 0}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"place": "a"}}\n</tool_call>'
ROME = '<tool_call>{"name": "weather", "arguments": {"place": "ü<"}}</tool_call>'


@pytest.fixture(scope="module")
def tools(engine):
    """A server whose model has a template with tools."""
    settings = Settings(model_name="bytes", warmup="none", limits=LIMITS)
    with Served(engine, settings, ChatTemplate(TEMPLATE)) as served:
        yield served


@pytest.fixture
def says(tools, monkeypatch):
    """Makes the model say a text, in updates of one token and of several."""

    def say(text):
        script = Script(tools.engine.tokenizer, text, sizes=(1, 3, 1, 1, 7))
        monkeypatch.setattr(tools.service.serving, "generate", script.generate)

    return say


def ask(served, **fields):
    """Returns an answer, after a stream has said the same."""
    fields = ASK | fields
    whole = answer(served.post(CHAT, fields))
    *events, last = served.events(CHAT, fields | {"stream_options": {"include_usage": True}})
    for name in ("completion_tokens", "completion_tokens_details"):
        assert last["usage"][name] == whole["usage"][name]
    for choice in whole["choices"]:
        streamed = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        message, wanted = joined(part["delta"] for part in streamed), dict(choice["message"])
        if "tool_calls" in wanted:
            wanted["tool_calls"] = [call | {"id": ""} for call in wanted["tool_calls"]]
        assert message == {**wanted, "content": wanted["content"] or ""}
        assert [part["finish_reason"] for part in streamed] == [None] * (len(streamed) - 1) + [choice["finish_reason"]]
        assert [one for part in streamed for one in (part["logprobs"] or {"content": []})["content"]] == (
            choice["logprobs"] or {"content": []}
        )["content"]
    return whole


def joined(deltas):
    """Puts the deltas of a stream together as clients do."""
    message = {"refusal": None}
    for delta in deltas:
        for name, value in delta.items():
            if name != "tool_calls":
                message[name] = message.get(name, "") + value
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            assert call["index"] == len(calls)
            assert call["id"].startswith("call_")
            calls.append({"id": "", "type": call["type"], "function": call["function"]})
    return message


def called(message):
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def prompt(served, **fields):
    tokens = answer(served.post("/tokenize", fields))["tokens"]
    return bytes(tokens).decode()


def test_a_call_is_told_as_one(tools, says):
    says(PARIS)
    whole = ask(tools)
    (choice,) = whole["choices"]
    assert called(choice["message"]) == [("weather", {"place": "a"})]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_a_model_whose_own_words_are_no_calls_is_held_to_one(tools):
    (choice,) = ask(tools, tool_choice={"type": "function", "function": {"name": "weather"}})["choices"]
    ((name, arguments),) = called(choice["message"])
    assert (name, arguments.keys(), choice["finish_reason"]) == ("weather", {"place"}, "tool_calls")


def test_each_choice_has_its_own_calls(tools, says):
    says(f"Well.\n{PARIS}\n{ROME}")
    whole = ask(tools, n=2)
    for choice in whole["choices"]:
        assert called(choice["message"]) == [("weather", {"place": "a"}), ("weather", {"place": "ü<"})]
        assert choice["message"]["content"] == "Well."
    ids = [call["id"] for choice in whole["choices"] for call in choice["message"]["tool_calls"]]
    assert len({*ids}) == 4
    assert all(one.startswith("call_") for one in ids)


def test_without_parallel_calls_the_first_counts(tools, says):
    says(f"{PARIS}\n{ROME}")
    assert called(ask(tools, parallel_tool_calls=False)["choices"][0]["message"]) == [("weather", {"place": "a"})]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_calls_that_nobody_asked_for_are_text(tools, says, fields):
    says(PARIS)
    (choice,) = ask(tools, **fields)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (PARIS, "stop")
    assert "tool_calls" not in choice["message"]


def test_a_reply_that_is_cut_off_within_a_call_is_text(tools, says):
    says(PARIS)
    (choice,) = ask(tools, max_tokens=40)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (PARIS[:40], "length")


@pytest.mark.parametrize("begun", [False, True])
def test_reasoning_is_told_apart_and_counted(tools, says, begun):
    thoughts, rest = ("" if begun else "<think>\n") + "Hm, ü.\n</think>", f"\n\nYes.\n{PARIS}"
    says(thoughts + rest)
    fields = {"chat_template_kwargs": {"enable_thinking": begun}}
    whole = ask(tools, logprobs=True, **fields)
    (choice,) = whole["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Hm, ü."
    assert (message["content"], called(message)) == ("Yes.", [("weather", {"place": "a"})])
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thoughts.encode())}
    # All tokens have probabilities, those of the end token too.
    assert len(choice["logprobs"]["content"]) == len((thoughts + rest).encode()) + 1
    hidden = ask(tools, include_reasoning=False, **fields)
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(thoughts.encode())}
    assert hidden["choices"][0]["message"].keys() == {"role", "content", "refusal", "tool_calls"}


def test_reasoning_alone_leaves_the_content_empty(tools, says):
    says("<think>Hm, ü.")
    whole = ask(tools, max_tokens=12)
    message = whole["choices"][0]["message"]
    # The last character is cut off.
    assert (message["content"], message["reasoning"]) == (None, "Hm, \ufffd")
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 12}


def test_a_stop_string_ends_reasoning_and_answers(tools, says):
    says("<think>a STOP b</think>c STOP")
    assert ask(tools, stop=["STOP"])["choices"][0]["message"]["reasoning"] == "a "
    message = ask(tools, stop=["c S"])["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a STOP b", None)


def test_the_template_reads_tools_and_calls_in_the_order_in_which_they_were_sent(tools):
    arguments = {"b": [1, {"z": "</x>", "a": None}], "a": 0.5}
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call], "annotations": []},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
        {"role": "assistant", "content": "Rain.", "reasoning": "So.", "tool_calls": [], "refusal": None},
    ]
    described = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    short = {"type": "function", "function": {"name": "w", "description": "It.", "parameters": {"type": "object"}}}
    text = prompt(tools, messages=messages, tools=[short, CLOCK], add_generation_prompt=False)
    assert text == "\n".join(
        [
            *map(json.dumps, (short, described)),
            "system: Be brief.",
            "user: x",
            "assistant: <think>Hm.</think>",
            f'<tool_call>{{"name": "weather", "arguments": {json.dumps(arguments)}}}</tool_call>',
            "tool: rain",
            "assistant: <think>So.</think>Rain.",
            "",
        ]
    )
    # A choice changes nothing before the answer, so the prefix stays cached.
    for fields in ({}, {"tool_choice": "none"}):
        usage = answer(tools.post(CHAT, ASK | fields | {"max_tokens": 1}))["usage"]
        assert usage["prompt_tokens"] == len(prompt(tools, messages=ASK["messages"], tools=[WEATHER, CLOCK]).encode())


def test_variables_reach_the_template(tools):
    say = {"messages": ASK["messages"]}
    assert prompt(tools, **say, chat_template_kwargs={"enable_thinking": True}).endswith("assistant: <think>\n")
    assert "high" in prompt(tools, **say, reasoning_effort="high", chat_template_kwargs={"effort": 1})


def test_a_developer_is_one_where_the_template_knows_it(tools, monkeypatch):
    monkeypatch.setattr(tools.service, "template", ChatTemplate("{# developer #}{{ messages[0].role }}"))
    assert prompt(tools, messages=[{"role": "developer", "content": "x"}]) == "developer"


@pytest.mark.parametrize("settings", [{"tool_call_parser": "none"}, {}])
def test_tools_need_a_known_form(engine, settings):
    source = "{{ tools }}{{ messages[0].content }}" if not settings else TEMPLATE
    with Served(engine, Settings(warmup="none", limits=LIMITS, **settings), ChatTemplate(source)) as served:
        error = served.post(CHAT, ASK).json()["error"]
        assert (error["param"], error["code"]) == ("tools", "unsupported_field")
        assert "--tool-call-parser" in error["message"]
        assert served.post(CHAT, ASK | {"tool_choice": "none", "max_tokens": 1}).status_code == 200


def test_forms_may_be_named(engine, monkeypatch):
    settings = Settings(warmup="none", limits=LIMITS, tool_call_parser="hermes", reasoning_parser="none")
    with Served(engine, settings, ChatTemplate("{{ tools }}{{ messages[0].content }}<think>")) as served:
        script = Script(engine.tokenizer, "a</think>b" + PARIS)
        monkeypatch.setattr(served.service.serving, "generate", script.generate)
        message = ask(served)["choices"][0]["message"]
        assert (message["content"], called(message)) == ("a</think>b", [("weather", {"place": "a"})])


class Held:
    """The grammars of calls that a server takes."""

    def __init__(self, served, monkeypatch):
        self.served, self.grammar = served, None
        script = Script(served.engine.tokenizer, "x")

        def generate(prompt, params):
            self.grammar = params.grammar
            return script.generate(prompt, params)

        monkeypatch.setattr(served.service.serving, "generate", generate)

    def allowed(self, texts, **fields):
        """Returns those of the texts that a call may be answered by."""
        answer(self.served.post(CHAT, ASK | fields))
        if self.grammar is None:
            return texts
        matcher = self.served.engine.core.grammars._compile(self.grammar)
        return [text for text in texts if matcher.deep_copy().validate_tokens([*text.encode(), 0]) == len(text) + 1]


@pytest.fixture
def held(tools, monkeypatch):
    return Held(tools, monkeypatch)


NOW = PARIS.replace("weather", "clock").replace('"place": "a"', "")
WRONG, OTHER = PARIS.replace("place", "city"), PARIS.replace("weather", "news")
JSON, SCHEMA = '{"a": 1}', {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
TEXTS = ["Hi", PARIS, NOW, WRONG, OTHER, JSON, f"{PARIS}\n{NOW}"]


def test_required_and_named_calls_follow_their_schemas(held):
    assert held.allowed(TEXTS) == TEXTS
    assert held.allowed(TEXTS, tool_choice="none") == TEXTS
    assert held.allowed(TEXTS, tool_choice="required") == [PARIS, NOW, TEXTS[-1]]
    assert held.allowed(TEXTS, tool_choice="required", parallel_tool_calls=False) == [PARIS, NOW]
    named = {"tool_choice": {"type": "function", "function": {"name": "clock"}}}
    assert held.allowed(TEXTS, **named) == [NOW]
    # A format is one of answers, of which there is none.
    assert held.allowed(TEXTS, **named, **FORMAT) == [NOW]


def test_strict_functions_hold_their_calls_and_no_text(held):
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert held.allowed(TEXTS, tools=[strict, CLOCK]) == ["Hi", PARIS, NOW, JSON, TEXTS[-1]]
    assert held.allowed(TEXTS, tools=[strict, CLOCK], tool_choice="none") == TEXTS


def test_a_format_is_that_of_the_answer_after_the_reasoning(held):
    assert held.allowed(TEXTS, **FORMAT, tool_choice="none") == [JSON]
    assert held.allowed(TEXTS, **FORMAT) == [PARIS, NOW, WRONG, JSON, TEXTS[-1]]
    thoughts = [f"Hm.</think>{text}" for text in ("Hi", JSON)]
    begun = {"chat_template_kwargs": {"enable_thinking": True}}
    assert held.allowed([*TEXTS, *thoughts], **FORMAT, **begun, tools=None) == thoughts[1:]
    thoughts = [f"<think>{text}" for text in thoughts]
    assert held.allowed([*TEXTS, *thoughts], **FORMAT, tools=None) == [JSON, thoughts[1]]


@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tools": None} | FORMAT, FORMAT])
def test_a_schema_that_nothing_can_hold_is_named(tools, fields):
    bad = {"type": "object", "properties": {"a": {"type": "what"}}}
    call = json.loads(json.dumps(ASK | {"tools": [CLOCK]} | fields))
    if "response_format" in fields:
        call["response_format"]["json_schema"]["schema"] = bad
    else:
        call["tools"][0]["function"] |= {"parameters": bad}
    error = tools.post(CHAT, call).json()["error"]
    wanted = "response_format" if "response_format" in fields else "tools"
    assert (error["param"], error["code"], error["message"].split()[0]) == (wanted, "grammar", wanted)


@pytest.mark.parametrize(
    ("path", "call", "wanted"),
    [
        (CHAT, ASK | {"tool_choice": "required"}, "tools"),
        (CHAT, ASK | FORMAT, "response_format"),
        (CHAT, ASK | {"tools": None, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (
            "/v1/responses",
            {"input": "x", "tools": [{"type": "function", "name": "clock"}], "tool_choice": "required"},
            "tools",
        ),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_object"}}}, "text.format"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_in_an_answer_is_named_by_the_calls_field(tools, monkeypatch, path, call, wanted, stream):
    zeros = dict.fromkeys(("num_cached_tokens", "num_draft_tokens", "num_accepted_tokens", "e2e_s"), 0)
    none = dict.fromkeys(("cache_miss", "ttft_s", "tpot_s"))
    empty = dict.fromkeys(("prompt_token_ids", "token_ids", "checkpoint_at", "token_times"), ())
    failed = dict(request_id=0, finish_reason="error", error=GrammarError("grammar: it is too complex"))

    async def generate(prompt, params):
        yield RequestUpdate(request_id=0, token_ids=(), output=RequestOutput(**zeros, **none, **empty, **failed))

    monkeypatch.setattr(tools.service.serving, "generate", generate)
    error = tools.post(path, call | {"stream": stream}).json()["error"]
    assert (error["param"], error["code"]) == (wanted, "grammar")
