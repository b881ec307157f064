"""What Anthropic's API and OpenAI's Responses say becomes a chat, and replies become their blocks and events."""

import json

import depth
import pytest
from fakes.http import answer
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.serve.api.anthropic import reading as anthropic
from mamba_align_jax.serve.api.anthropic.writing import MessageWriter
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.responses import reading as responses
from mamba_align_jax.serve.api.responses.writing import ResponseWriter
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.replies.parts import Call, Content, Reasoning
from mamba_align_jax.serve.settings import Limits

LIMITS = Limits()
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CHAT_TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "description": "Tells it."}}
USAGE = {
    "prompt_tokens": 10,
    "completion_tokens": 5,
    "total_tokens": 15,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}


def text(*texts):
    return [{"type": "text", "text": one} for one in texts]


def calls(*named, identity="t1"):
    return [{"id": identity, "type": "function", "function": {"name": n, "arguments": a}} for n, a in named]


# The messages of each API, and those of the chat that they are.
ANTHROPIC = [
    ([{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Hi"}]),
    (
        [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm. ", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": text("rain", "wind")},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "none", "is_error": True},
                    {"type": "text", "text": "So?"},
                ],
            },
        ],
        [
            {"role": "user", "content": text("Hi")},
            {
                "role": "assistant",
                "content": text("I look."),
                "reasoning_content": "Hm. ",
                "tool_calls": calls(("weather", '{"city": "Ulm"}')),
            },
            {"role": "tool", "tool_call_id": "t1", "content": text("rain", "wind")},
            {"role": "tool", "tool_call_id": "t2", "content": "Error: none"},
            {"role": "user", "content": text("So?")},
        ],
    ),
]
RESPONSES = [
    ("Hi", [{"role": "user", "content": "Hi"}]),
    (
        [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
            {"type": "message", "role": "user", "content": "Hi"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            {"type": "function_call", "call_id": "t1", "name": "weather", "arguments": "{}", "status": "completed"},
            {"type": "function_call", "call_id": "t1", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "t1", "output": "rain"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Short."}]},
            {"role": "assistant", "content": "Rain."},
            {"role": "user", "content": "So?"},
        ],
        [
            {"role": "developer", "content": text("Be brief.")},
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "reasoning_content": "Hm.",
                "content": text("I look."),
                "tool_calls": calls(("weather", "{}"), ("time", "{}")),
            },
            {"role": "tool", "tool_call_id": "t1", "content": "rain"},
            {"role": "assistant", "reasoning_content": text("Short.")[0]["text"], "content": "Rain."},
            {"role": "user", "content": "So?"},
        ],
    ),
]


def anthropic_chat(**fields):
    return anthropic.to_chat(Fields("", {"max_tokens": 9, "messages": ANTHROPIC[0][0], **fields}), LIMITS)


def responses_chat(**fields):
    return responses.to_chat(Fields("", {"input": "Hi", **fields}), LIMITS).chat


@pytest.mark.parametrize(("given", "wanted"), ANTHROPIC)
def test_messages_of_anthropic_are_those_of_a_chat(given, wanted):
    assert anthropic_chat(messages=given)["messages"] == wanted
    system = anthropic_chat(messages=given, system="Be brief.")["messages"]
    assert system == [{"role": "system", "content": "Be brief."}, *wanted]


@pytest.mark.parametrize(("given", "wanted"), RESPONSES)
def test_items_of_responses_are_messages_of_a_chat(given, wanted):
    assert responses_chat(input=given)["messages"] == wanted
    system = responses_chat(input=given, instructions="Be brief.")["messages"]
    assert system == [{"role": "system", "content": "Be brief."}, *wanted]


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"temperature": 0.5, "top_p": 0.9, "top_k": 3}, {"temperature": 0.5, "top_p": 0.9, "top_k": 3}),
        ({"stop_sequences": ["x"], "metadata": {"user_id": "u"}, "service_tier": "auto"}, {"stop": ["x"]}),
        (
            {"tools": [{"name": "weather", "input_schema": SCHEMA, "description": "Tells it.", "type": "custom"}]},
            {"tools": [CHAT_TOOL]},
        ),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
         {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tool_choice": {"type": "tool", "name": "f"}},
         {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False, "thinking": False}}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}},
         {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            {"output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "reasoning_effort": "low",
                "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}},
            },
        ),
    ],
)  # fmt: skip
def test_fields_of_anthropic_are_those_of_a_chat(fields, chat):
    assert anthropic_chat(**fields) == {"max_tokens": 9, "messages": ANTHROPIC[0][1]} | chat


@pytest.mark.parametrize(
    ("fields", "chat"),
    [
        ({"temperature": 0.5, "max_output_tokens": 7, "store": False, "include": []},
         {"temperature": 0.5, "max_completion_tokens": 7}),
        (
            {
                "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA, "description": "Tells it."}],
                "tool_choice": {"type": "function", "name": "weather"},
                "parallel_tool_calls": False,
            },
            {
                "tools": [{**CHAT_TOOL, "function": CHAT_TOOL["function"] | {"strict": False}}],
                "tool_choice": {"type": "function", "function": {"name": "weather"}},
                "parallel_tool_calls": False,
            },
        ),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}},
         {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}),
    ],
)  # fmt: skip
def test_fields_of_responses_are_those_of_a_chat(fields, chat):
    wanted = {"messages": RESPONSES[0][1], "parallel_tool_calls": True} | chat
    assert responses_chat(**fields) == wanted


def block(**fields):
    return {"messages": [{"role": "user", "content": [fields]}]}


@pytest.mark.parametrize(
    ("read", "fields", "param"),
    [
        (anthropic_chat, {"max_tokens": None}, "max_tokens"),
        (anthropic_chat, {"messages": []}, "messages"),
        (anthropic_chat, {"messages": [{"role": "assistant", "content": "I"}]}, "messages"),
        (anthropic_chat, {"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        (anthropic_chat, block(type="image", source={}), "messages[0].content[0].type"),
        (anthropic_chat, block(type="tool_use", id="i", name="n", input={}), "messages[0].content[0].type"),
        (anthropic_chat, block(type="text"), "messages[0].content[0].text"),
        (anthropic_chat, block(type="text", text="x", what=1), "messages[0].content[0].what"),
        (anthropic_chat, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (anthropic_chat, {"mcp_servers": [{}]}, "mcp_servers"),
        (anthropic_chat, {"temprature": 1}, "temprature"),
        (responses_chat, {"input": []}, "input"),
        (responses_chat, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        (
            responses_chat,
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (responses_chat, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (responses_chat, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (responses_chat, {"background": True}, "background"),
        (responses_chat, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (responses_chat, {"max_tokens": 1}, "max_tokens"),
    ],
)
def test_what_can_not_be_done_is_refused_by_name(read, fields, param):
    with pytest.raises(Refusal) as raised:
        read(**fields)
    assert (raised.value.status, raised.value.param) == (400, param)


parts = st.lists(
    st.one_of(
        st.builds(Reasoning, st.text(max_size=3)),
        st.builds(Content, st.text(max_size=3)),
        st.builds(Call, st.sampled_from("fg"), st.sampled_from(["{}", '{"a": [1, "}"]}'])),
    ),
    max_size=6,
)
ENDS = [("stop", None), ("stop", "end"), ("length", None), ("stop", 7)]


def stream(writer, said, ends):
    events = [*writer.begin(USAGE)]
    for part in said:
        events += writer.add([part])
    return [*events, *writer.end(*ends, USAGE)]


def without_names(value):
    """A JSON value without what is drawn for each reply."""
    if isinstance(value, list):
        return [without_names(one) for one in value]
    if isinstance(value, dict):
        return {name: without_names(one) for name, one in value.items() if name not in ("id", "call_id", "item_id")}
    return value


@settings(max_examples=depth.examples(60, 1000), deadline=None)
@given(parts, st.sampled_from(ENDS))
def test_events_of_anthropic_make_the_whole_message(said, ends):
    events = stream(MessageWriter("model", "1"), said, ends)
    writer = MessageWriter("model", "1")
    writer.add(said)
    whole = writer.whole(*ends, USAGE)
    assert events[0]["type"] == "message_start"
    message = events[0]["message"]
    opened = None
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert opened is None
                opened = event["index"]
                assert opened == len(message["content"])
                content = dict(event["content_block"])
                pieces = []
                message["content"].append(content)
            case "content_block_delta":
                assert event["index"] == opened
                kind, piece = (value for name, value in event["delta"].items())
                field = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "input"}[kind]
                pieces.append(piece)
                content[field] = "".join(pieces) if field != "input" else json.loads("".join(pieces))
            case "content_block_stop":
                assert event["index"] == opened
                opened = None
    assert opened is None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message |= events[-2]["delta"] | {"usage": events[-2]["usage"]}
    assert without_names(message) == without_names(whole)
    kinds = {"thinking": Reasoning, "text": Content, "tool_use": Call}
    assert {kinds[one["type"]] for one in whole["content"]} == {type(one) for one in said if one[-1]}
    has_calls = any(isinstance(one, Call) for one in said)
    wanted = {
        0: "tool_use" if has_calls else "end_turn",
        1: "stop_sequence",
        2: "max_tokens",
        3: "tool_use" if has_calls else "end_turn",
    }
    assert whole["stop_reason"] == wanted[ENDS.index(ends)]
    assert whole["usage"]["input_tokens"] + whole["usage"]["cache_read_input_tokens"] == 10


@settings(max_examples=depth.examples(60, 1000), deadline=None)
@given(parts, st.sampled_from(ENDS))
def test_events_of_responses_make_the_whole_response(said, ends):
    events = stream(ResponseWriter("model", "1", 0, {"tools": []}), said, ends)
    writer = ResponseWriter("model", "1", 0, {"tools": []})
    writer.add(said)
    whole = writer.whole(*ends, USAGE)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items, texts = [], []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(texts)
            texts.append("")
            identity = event["item"]["id"]
        elif kind.endswith(".delta"):
            assert (event["item_id"], event["output_index"]) == (identity, len(items))
            texts[-1] += event["delta"]
        elif kind.endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == texts[-1]
        elif kind == "output_item.done":
            assert event["item"]["id"] == identity
            items.append(event["item"])
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{whole['status']}" == f"response.{last['status']}"
    assert last["output"] == items
    assert without_names(last) == without_names(whole)
    said_texts = [one["content"][0]["text"] if "content" in one else one["arguments"] for one in items]
    assert said_texts == texts


# The server.
MESSAGES, RESPONSE = "/v1/messages", "/v1/responses"
ASK = {
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}], "temperature": 0},
    RESPONSE: {"max_output_tokens": 9, "input": "x", "temperature": 0},
}


def named_events(served, path, fields):
    with served.client.stream("POST", path, json=ASK[path] | fields | {"stream": True}) as response:
        response.read()
        assert response.status_code == 200, response.text
    *events, rest = response.text.split("\n\n")
    assert rest == ""
    pairs = [event.split("\n") for event in events]
    assert all(name == f"event: {json.loads(data.removeprefix('data: '))['type']}" for name, data in pairs)
    return [json.loads(data.removeprefix("data: ")) for _, data in pairs]


def said_by(path, whole):
    (block,) = whole["content"] if path == MESSAGES else whole["output"][0]["content"]
    return block["text"]


@pytest.mark.parametrize("path", ASK)
def test_an_answer_is_that_of_the_chat(served, path):
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "temperature": 0}
    wanted = answer(served.post("/v1/chat/completions", chat))
    whole = answer(served.post(path, ASK[path]))
    assert said_by(path, whole) == wanted["choices"][0]["message"]["content"]
    ending = whole["stop_reason"] if path == MESSAGES else whole["incomplete_details"]["reason"]
    assert ending == ("max_tokens" if path == MESSAGES else "max_output_tokens")
    usage = whole["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    assert usage["input_tokens"] + cached == wanted["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 9


@pytest.mark.parametrize("path", ASK)
def test_a_stream_is_the_whole_answer(served, path):
    *_, last = events = named_events(served, path, {})
    whole = answer(served.post(path, ASK[path]))
    deltas = [event["delta"] for event in events if event["type"].endswith("delta") and "delta" in event]
    texts = [one if isinstance(one, str) else one.get("text", "") for one in deltas]
    assert "".join(texts) == said_by(path, whole)
    assert last["type"] == ("message_stop" if path == MESSAGES else "response.incomplete")


def test_tokens_of_a_message_are_counted_as_they_are_used(served):
    fields = {name: value for name, value in ASK[MESSAGES].items() if name != "max_tokens"}
    counted = answer(served.post(f"{MESSAGES}/count_tokens", fields | {"system": "Be brief."}))
    usage = answer(served.post(MESSAGES, ASK[MESSAGES] | {"system": "Be brief."}))["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_counting_draws_no_seed_and_renders_no_other_chat(served, monkeypatch):
    """With `--seed`, calls would otherwise get other seeds after tokens were counted."""
    drawn = []
    monkeypatch.setattr(served.service, "_new_seed", lambda count: drawn.append(count) or 0)
    monkeypatch.setattr(served.service, "checkpoint_offsets", lambda prompt: drawn.append(prompt))
    answer(served.post(f"{MESSAGES}/count_tokens", {"messages": ASK[MESSAGES]["messages"]}))
    assert drawn == []


def test_a_stop_sequence_is_told(served):
    text = said_by(MESSAGES, answer(served.post(MESSAGES, ASK[MESSAGES])))
    whole = answer(served.post(MESSAGES, ASK[MESSAGES] | {"stop_sequences": [text[2]]}))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", text[2])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (MESSAGES, {"stop_sequences": 3}, "stop_sequences"),
        (MESSAGES, {"max_tokens": 1000}, "messages"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}]}, "tools"),
        (RESPONSE, {"temperature": -1}, "temperature"),
        (RESPONSE, {"max_output_tokens": 1000}, "input"),
        (RESPONSE, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ],
)
def test_a_wrong_field_has_its_own_name(served, path, fields, param):
    response = served.post(path, ASK[path] | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert response.json().get("type") == ("error" if path == MESSAGES else None)


@pytest.mark.parametrize("path", ASK)
def test_a_grammar_holds_the_answer(served, path):
    form = {"type": "json_schema", "schema": {"enum": [7]}} | ({} if path == MESSAGES else {"name": "n"})
    fields = {"output_config": {"format": form}} if path == MESSAGES else {"text": {"format": form}}
    assert said_by(path, answer(served.post(path, ASK[path] | fields))) == "7"


@pytest.mark.parametrize("headers", [{"x-api-key": "sk-first"}, {"authorization": "Bearer sk-first"}])
def test_a_key_comes_as_either_api_sends_it(locked, headers):
    assert locked.post(MESSAGES, ASK[MESSAGES]).status_code == 401
    # The key is right: the server has no chat template.
    assert locked.post(MESSAGES, ASK[MESSAGES], headers=headers).json()["error"]["code"] == "no_chat_template"
