"""Whatever a call has wrong, it gets a status and a reason, and the engine is left alone."""

import json

import pytest

from mamba_align_jax.engine.text.chat_template import ChatTemplate

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
OK = {"prompt": "x", "max_tokens": 1}
SAY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.fixture(autouse=True)
def nothing_runs(served):
    before = served.engine.stats.admitted_requests
    yield
    assert served.engine.stats.admitted_requests == before
    served.wait_until_idle()


def refusal(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"]
    return error


def message(**fields):
    return {"messages": [fields], "max_tokens": 1}


def said(**fields):
    return message(role="assistant", **fields)


def tool(**fields):
    return {"type": "function", "function": {"name": "f"} | fields}


def called(**fields):
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"} | fields}


def nested(depth):
    return {"a": nested(depth - 1)} if depth > 1 else {}


TOOL = tool()
WRONG = [
    # address, fields, the field that is named, the code
    (COMPLETE, {"max_tokens": 1}, "prompt", None),
    (COMPLETE, OK | {"prompt": ""}, "prompt", None),
    (COMPLETE, OK | {"prompt": []}, "prompt", None),
    (COMPLETE, OK | {"prompt": [[]]}, "prompt", None),
    (COMPLETE, OK | {"prompt": ["x", ""]}, "prompt", None),
    (COMPLETE, OK | {"prompt": 5}, "prompt", None),
    (COMPLETE, OK | {"prompt": {"a": 1}}, "prompt", None),
    (COMPLETE, OK | {"prompt": [1.5]}, "prompt", None),
    (COMPLETE, OK | {"prompt": [True]}, "prompt", None),
    (COMPLETE, OK | {"prompt": [-1]}, "prompt", None),
    (COMPLETE, OK | {"prompt": [256]}, "prompt", None),
    (COMPLETE, OK | {"prompt": [2**70]}, "prompt", None),
    (COMPLETE, OK | {"prompt": "\ud800"}, None, None),
    (COMPLETE, OK | {"prompt": ["x"] * 129}, "prompt", None),
    (COMPLETE, OK | {"prompt": "x" * 512}, "prompt", "context_length_exceeded"),
    # A prompt is measured before its members are looked at.
    (COMPLETE, OK | {"prompt": [[1], [1] * 600 + ["x"]]}, "prompt", "context_length_exceeded"),
    (COMPLETE, OK | {"max_tokens": 512}, "prompt", "context_length_exceeded"),
    (COMPLETE, OK | {"max_tokens": -1}, "max_tokens", None),
    (COMPLETE, OK | {"max_tokens": 1.5}, "max_tokens", None),
    (COMPLETE, OK | {"max_tokens": True}, "max_tokens", None),
    (COMPLETE, OK | {"max_tokens": "1"}, "max_tokens", None),
    (COMPLETE, OK | {"max_tokens": 10**400}, "max_tokens", None),
    (COMPLETE, OK | {"temperature": -1}, "temperature", None),
    (COMPLETE, OK | {"temperature": "hot"}, "temperature", None),
    (COMPLETE, OK | {"temperature": 1e39}, "temperature", None),
    (COMPLETE, OK | {"top_p": 0}, "top_p", None),
    (COMPLETE, OK | {"top_p": 1.1}, "top_p", None),
    (COMPLETE, OK | {"top_k": -2}, "top_k", None),
    (COMPLETE, OK | {"top_k": 2**31}, "top_k", None),
    (COMPLETE, OK | {"n": 0}, "n", None),
    (COMPLETE, OK | {"n": 17}, "n", None),
    (COMPLETE, OK | {"n": 2, "best_of": 3}, "best_of", "unsupported_field"),
    (COMPLETE, OK | {"suffix": "end"}, "suffix", "unsupported_field"),
    (COMPLETE, OK | {"seed": 1.5}, "seed", None),
    (COMPLETE, OK | {"stop": 5}, "stop", None),
    (COMPLETE, OK | {"stop": ["a"] * 17}, "stop", None),
    (COMPLETE, OK | {"stop": [""]}, "stop", None),
    (COMPLETE, OK | {"stop": "a" * 257}, "stop", None),
    (COMPLETE, OK | {"stop": ["a", 5]}, "stop", None),
    (COMPLETE, OK | {"stop": "\ud800"}, None, None),
    (COMPLETE, OK | {"stop_token_ids": [256]}, "stop_token_ids", None),
    (COMPLETE, OK | {"stop_token_ids": list(range(17))}, "stop_token_ids", None),
    (COMPLETE, OK | {"stop_token_ids": "ab"}, "stop_token_ids", None),
    (COMPLETE, OK | {"ignore_eos": 1}, "ignore_eos", None),
    (COMPLETE, OK | {"echo": "yes"}, "echo", None),
    (COMPLETE, OK | {"stream": 1}, "stream", None),
    (COMPLETE, OK | {"stream_options": True}, "stream_options", None),
    (COMPLETE, OK | {"stream_options": {"include_usage": 1}}, "stream_options.include_usage", None),
    (COMPLETE, OK | {"stream_options": {"what": 1}}, "stream_options.what", "unknown_field"),
    (COMPLETE, OK | {"stream_options": {"include_usage": True}}, "stream_options", None),
    (COMPLETE, OK | {"stream_options": {}, "stream": False}, "stream_options", None),
    (COMPLETE, OK | {"logprobs": 21}, "logprobs", None),
    (COMPLETE, OK | {"logprobs": True}, "logprobs", None),
    (COMPLETE, OK | {"logit_bias": [1]}, "logit_bias", None),
    (COMPLETE, OK | {"logit_bias": {"a": 1}}, "logit_bias", None),
    (COMPLETE, OK | {"logit_bias": {"1": 101}}, "logit_bias", None),
    (COMPLETE, OK | {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", None),
    (COMPLETE, OK | {"logit_bias": {"٣": 1}}, "logit_bias", None),
    (COMPLETE, OK | {"cache_salt": 5}, "cache_salt", None),
    (COMPLETE, OK | {"cache_salt": "\udfff"}, None, None),
    (COMPLETE, OK | {"priority": -1}, "priority", None),
    (COMPLETE, OK | {"priority": "first"}, "priority", None),
    (COMPLETE, OK | {"model": 5}, "model", None),
    (COMPLETE, OK | {"skip_special_tokens": 0}, "skip_special_tokens", None),
    (COMPLETE, OK | {"stream_options": {"no_stop_trim": False}}, "stream_options.no_stop_trim", "unknown_field"),
    (COMPLETE, OK | {"temprature": 0}, "temprature", "unknown_field"),
    (COMPLETE, OK | {"x" * 1000: 0}, "x" * 80, "unknown_field"),
    (CHAT, {"max_tokens": 1}, "messages", None),
    (CHAT, SAY | {"messages": []}, "messages", None),
    (CHAT, SAY | {"tools": [TOOL]}, "tools", "unsupported_field"),
    (CHAT, SAY | {"tools": "all"}, "tools", None),
    (CHAT, SAY | {"tools": [5]}, "tools[0]", None),
    (CHAT, SAY | {"tools": [{"type": "function"}]}, "tools[0].function", None),
    (CHAT, SAY | {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", None),
    (CHAT, SAY | {"tools": [TOOL, tool(name="")]}, "tools[1].function.name", None),
    (CHAT, SAY | {"tools": [tool(name="a b")]}, "tools[0].function.name", None),
    (CHAT, SAY | {"tools": [tool(name="</tool_call>")]}, "tools[0].function.name", None),
    (CHAT, SAY | {"tools": [tool(name="a" * 129)]}, "tools[0].function.name", None),
    (CHAT, SAY | {"tools": [tool(description=1)]}, "tools[0].function.description", None),
    (CHAT, SAY | {"tools": [tool(parameters=[])]}, "tools[0].function.parameters", None),
    (CHAT, SAY | {"tools": [tool(parameters={"type": "string"})]}, "tools[0].function.parameters", None),
    (CHAT, SAY | {"tools": [tool(strict="yes")]}, "tools[0].function.strict", None),
    (CHAT, SAY | {"tools": [tool(color="red")]}, "tools[0].function.color", "unknown_field"),
    (CHAT, SAY | {"tools": [TOOL, TOOL]}, "tools", None),
    (CHAT, SAY | {"tools": [TOOL] * 129}, "tools", None),
    (CHAT, SAY | {"tools": [tool(description="x" * 2**13)] * 2}, "tools", None),
    (CHAT, SAY | {"tools": [tool(parameters=nested(65))]}, "tools", None),
    (CHAT, SAY | {"tool_choice": "required"}, "tool_choice", None),
    (CHAT, SAY | {"tool_choice": "any"}, "tool_choice", None),
    (CHAT, SAY | {"tool_choice": 5}, "tool_choice", None),
    (CHAT, SAY | {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", None),
    (CHAT, SAY | {"tool_choice": {"type": "function"}}, "tool_choice.function", None),
    (CHAT, SAY | {"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", None),
    (CHAT, SAY | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", None),
    (CHAT, SAY | {"parallel_tool_calls": "no"}, "parallel_tool_calls", None),
    (CHAT, SAY | {"include_reasoning": 0}, "include_reasoning", None),
    (CHAT, SAY | {"reasoning_effort": "high"}, "reasoning_effort", "unsupported_field"),
    (CHAT, SAY | {"reasoning_effort": "some"}, "reasoning_effort", None),
    (CHAT, SAY | {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", None),
    (CHAT, SAY | {"chat_template_kwargs": nested(65)}, "chat_template_kwargs", None),
    (CHAT, said(tool_calls=[called()]), "messages[0].tool_calls", "unsupported_field"),
    (CHAT, said(tool_calls="f"), "messages[0].tool_calls", None),
    (CHAT, said(tool_calls=[called()] * 129), "messages[0].tool_calls", None),
    (CHAT, said(tool_calls=[5]), "messages[0].tool_calls[0]", None),
    (CHAT, said(tool_calls=[called(name="a b")]), "messages[0].tool_calls[0].function.name", None),
    *(
        (CHAT, said(tool_calls=[called(arguments=wrong)]), "messages[0].tool_calls[0].function.arguments", None)
        for wrong in ("{", "[]", "5", 5, [], '{"a": NaN}', "[" * 9999, json.dumps(nested(65)))
    ),
    (CHAT, said(tool_calls=[]), "messages[0].content", None),
    (CHAT, said(reasoning=5, content="x"), "messages[0].reasoning", None),
    (CHAT, message(role="user", content="x", reasoning="y"), "messages[0].reasoning", "unknown_field"),
    (CHAT, message(role="user", content="x", tool_calls=[called()]), "messages[0].tool_calls", "unknown_field"),
    (CHAT, message(role="user", content="x", tool_call_id="1"), "messages[0].tool_call_id", "unknown_field"),
    (CHAT, message(role="tool", content="x", tool_call_id=1), "messages[0].tool_call_id", None),
    (CHAT, message(role="tool", tool_call_id="1"), "messages[0].content", None),
    (CHAT, SAY | {"messages": "x"}, "messages", None),
    (CHAT, SAY | {"messages": SAY["messages"] * 1025}, "messages", None),
    (CHAT, SAY | {"messages": ["x"]}, "messages[0]", None),
    (CHAT, message(content="x"), "messages[0].role", None),
    (CHAT, message(role="king", content="x"), "messages[0].role", None),
    (CHAT, message(role="user"), "messages[0].content", None),
    (CHAT, message(role="user", content=5), "messages[0].content", None),
    (CHAT, message(role="user", content="\ud800"), None, None),
    (CHAT, message(role="user", content=[5]), "messages[0].content[0]", None),
    (CHAT, message(role="user", content=[{"type": "image_url"}]), "messages[0].content[0].type", None),
    (CHAT, message(role="user", content=[{"type": "text"}]), "messages[0].content[0].text", None),
    (CHAT, message(role="user", content="x", speed=1), "messages[0].speed", "unknown_field"),
    (CHAT, message(role="user", content="x" * 600), "messages", "context_length_exceeded"),
    (CHAT, SAY | {"max_completion_tokens": 0}, "max_completion_tokens", None),
    (CHAT, SAY | {"stream_options": {"include_usage": True}}, "stream_options", None),
    (CHAT, SAY | {"functions": [{}]}, "functions", "unsupported_field"),
    (CHAT, SAY | {"modalities": ["audio"]}, "modalities", "unsupported_field"),
    (CHAT, SAY | {"chat_template": "{{ 1 }}"}, "chat_template", "unsupported_field"),
    (CHAT, SAY | {"continue_final_message": True}, "continue_final_message", "unsupported_field"),
    (CHAT, SAY | {"logprobs": 5}, "logprobs", None),
    (CHAT, SAY | {"top_logprobs": 5}, "top_logprobs", None),
    (CHAT, SAY | {"response_format": "json"}, "response_format", None),
    (CHAT, SAY | {"response_format": {"type": "xml"}}, "response_format.type", None),
    (CHAT, SAY | {"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    (
        CHAT,
        SAY | {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "b" * 2**16}}}},
        None,
        "body_too_large",
    ),
    ("/tokenize", {}, "messages", None),
    ("/tokenize", {"prompt": 5}, "prompt", None),
    (
        "/tokenize",
        {"messages": SAY["messages"]} | {"chat_template_kwargs": {"messages": 1}},
        "chat_template_kwargs",
        None,
    ),
    ("/cache", {}, "messages", None),
    ("/cache", {"prompt": 5}, "prompt", None),
    ("/cache", {"prompt": ""}, "prompt", None),
    ("/cache", {"prompt": []}, "prompt", None),
    ("/cache", {"prompt": [256]}, "prompt", None),
    ("/cache", {"prompt": "x" * 513}, "prompt", "context_length_exceeded"),
    ("/cache", {"prompt": [1] * 513 + ["x"]}, "prompt", "context_length_exceeded"),
    ("/cache", {"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "context_length_exceeded"),
    ("/detokenize", {}, "tokens", None),
    ("/detokenize", {"tokens": [256]}, "tokens", None),
    ("/detokenize", {"tokens": "abc"}, "tokens", None),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_field_is_named(served, path, fields, param, code):
    error = refusal(served.post(path, fields), 413 if code == "body_too_large" else 400)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param or "")
    assert error["code"] == code


@pytest.mark.parametrize("path", [COMPLETE, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"5", b"[]", b'"x"', b"{", b'{"prompt": NaN}', b'{"prompt": Infinity}', b"\xff\xfe", b"\x00",
        b'{"prompt": "\xff"}', b"[" * 30_000, b'{"a":' * 10_000, b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=range(14),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(served, path, body):
    refusal(served.client.post(path, content=body, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, '{"prompt": "x", "temperature": VALUE}'),
        (CHAT, '{"messages": [{"role": VALUE, "content": "x"}]}'),
        (CHAT, '{"messages": [{"role": "user", "content": [{"type": VALUE}]}]}'),
        (CHAT, '{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": VALUE}, "top_k": -2}'),
    ],
    ids=range(4),
)
def test_a_field_that_is_nested_almost_too_deeply_is_refused(served, path, body):
    """Python reads it, but has too little of its stack left to write it into the error."""
    for depth in range(900, 1000):
        content = body.replace("VALUE", "[" * depth + "]" * depth)
        refusal(served.client.post(path, content=content, headers={"content-type": "application/json"}), 400)


def test_other_content_types_are_refused(served):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        refusal(served.client.post(COMPLETE, content=json.dumps(OK), headers={"content-type": kind}), 415)


def test_a_large_body_is_refused_whether_or_not_its_size_is_said(served):
    body = json.dumps(OK | {"user": "x" * 2**17}).encode()
    headers = {"content-type": "application/json"}
    parts = (body[start : start + 1000] for start in range(0, len(body), 1000))
    for content in (body, parts):
        with served.new_client() as client:
            assert refusal(client.post(COMPLETE, content=content, headers=headers), 413)["code"] == "body_too_large"


def test_another_model_is_not_found(served):
    for path, fields in ((COMPLETE, OK), (CHAT, SAY)):
        error = refusal(served.post(path, fields | {"model": "gpt-5"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert refusal(served.client.get("/v1/models/../../etc/passwd"), 404)
    assert refusal(served.client.get("/v1/models/gpt-5"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/v1", "/v1/embeddings", "/../etc/passwd", "/%2e%2e/etc/passwd", "/v1/%00"])
def test_an_unknown_address_is_not_found(served, path):
    refusal(served.client.get(path), 404)


def test_messages_of_which_the_template_makes_nothing_are_named(served, monkeypatch):
    monkeypatch.setattr(served.service, "template", ChatTemplate(""))
    for path, fields in ((CHAT, SAY), ("/cache", {"messages": SAY["messages"]})):
        error = refusal(served.post(path, fields), 400)
        wanted = "messages must make a prompt of at least one token, got none"
        assert (error["param"], error["message"]) == ("messages", wanted)


def test_messages_that_the_template_refuses_are_refused_with_its_words(served, monkeypatch):
    """Templates refuse a system message in the middle, and messages without one of a user."""
    template = "{% if messages[-1].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"
    monkeypatch.setattr(served.service, "template", ChatTemplate(template))
    messages = [*SAY["messages"], {"role": "system", "content": "x"}]
    assert "no system here" in refusal(served.post(CHAT, SAY | {"messages": messages}), 400)["message"]


def test_a_wrong_method_is_refused(served):
    refusal(served.client.get(COMPLETE), 405)
    refusal(served.post("/metrics", {}), 405)


def test_refusals_are_counted_by_their_reason(served):
    count = lambda: served.metric("mamba_align:refused_calls_total", status="400", code="unknown_field")
    served.post(COMPLETE, OK | {"what": 1})
    before = count()
    served.post(COMPLETE, OK | {"what": 1})
    assert count() == before + 1
