"""Calls a server with OpenAI's own client, and compares its answers with the engine's. Run by `run.py`."""

import json
import math
import sys
from pathlib import Path

import jsonschema
import openai
from weather import PLACES, SCHEMA, raised_by

NEAR = 1e-3


class Caller:
    def __init__(self, url, key, calls):
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=300)
        (self.model,) = [model.id for model in self.client.models.list()]
        self.calls = calls

    def wanted(self, name):
        return self.calls[name]["choices"]

    def create(self, name, **more):
        """Makes a call as the client's users do. Fields that are not of OpenAI's API go through `extra_body`."""
        fields = self.calls[name]["call"] | more | dict(model=self.model, extra_body=dict(return_token_ids=True))
        kind = self.client.chat.completions if "messages" in fields else self.client.completions
        return kind.create(**fields)


def text_of(choice):
    return choice.message.content if hasattr(choice, "message") else choice.text


def check_choice(choice, wanted, text):
    assert text == wanted["text"], (text, wanted["text"])
    assert choice.finish_reason == wanted["finish_reason"], (choice.finish_reason, wanted["finish_reason"])
    assert choice.stop_reason == wanted["stop_reason"], (choice.stop_reason, wanted["stop_reason"])


def whole(caller, name):
    """Every choice, in one piece, is the engine's."""
    answer, wanted = caller.create(name), caller.wanted(name)
    assert [choice.index for choice in answer.choices] == list(range(len(wanted)))
    echoed = caller.calls[name]["call"]["prompt"] if caller.calls[name]["call"].get("echo") else ""
    for choice, one in zip(answer.choices, wanted, strict=True):
        check_choice(choice, one, text_of(choice).removeprefix(echoed))
        assert choice.token_ids == one["token_ids"]
    usage = answer.usage
    assert usage.completion_tokens == sum(len(one["token_ids"]) for one in wanted)
    assert usage.prompt_tokens == sum(one["prompt_tokens"] for one in wanted[:: caller.calls[name]["call"].get("n", 1)])
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    return answer


def streamed(caller, name):
    """The pieces of a stream, put together, are the engine's choices."""
    wanted = caller.wanted(name)
    texts, tokens, ends = [""] * len(wanted), [[] for _ in wanted], [None] * len(wanted)
    usage, events = None, 0
    for event in caller.create(name, stream=True, stream_options=dict(include_usage=True)):
        usage = event.usage or usage
        events += 1
        for choice in event.choices:
            texts[choice.index] += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            tokens[choice.index] += choice.token_ids
            if choice.finish_reason:
                ends[choice.index] = choice
    assert events > 2
    for text, ids, end, one in zip(texts, tokens, ends, wanted, strict=True):
        check_choice(end, one, text)
        assert ids == one["token_ids"]
    assert usage.completion_tokens == sum(len(one["token_ids"]) for one in wanted)


def near(found, wanted):
    assert math.isclose(found, wanted, abs_tol=NEAR), (found, wanted)


def completion_logprobs(caller):
    (choice,), (wanted,) = whole(caller, "logprobs").choices, caller.wanted("logprobs")
    found = choice.logprobs
    assert "".join(found.tokens) == wanted["text"]
    assert found.text_offset == list(range(len(wanted["text"])))
    for own, top, (value, tops) in zip(found.token_logprobs, found.top_logprobs, wanted["logprobs"], strict=True):
        near(own, value)
        assert len(top) in (len(tops), len(tops) + 1)
        for token, entry in tops:
            near(top[chr(token)], entry)


def echoed_logprobs(caller):
    (choice,), (wanted,) = whole(caller, "echoed").choices, caller.wanted("echoed")
    prompt = caller.calls["echoed"]["call"]["prompt"]
    assert choice.text == prompt + wanted["text"]
    assert "".join(choice.logprobs.tokens) == choice.text
    assert choice.logprobs.token_logprobs[0] is None
    entries = [*wanted["prompt_logprobs"][1:], *wanted["logprobs"]]
    for own, (value, _) in zip(choice.logprobs.token_logprobs[1:], entries, strict=True):
        near(own, value)


def chat_logprobs(caller):
    (choice,), (wanted,) = whole(caller, "chat logprobs").choices, caller.wanted("chat logprobs")
    for own, (value, tops) in zip(choice.logprobs.content, wanted["logprobs"], strict=True):
        near(own.logprob, value)
        assert [top.token for top in own.top_logprobs] == [chr(token) for token, _ in tops]
        for top, (_, entry) in zip(own.top_logprobs, tops, strict=True):
            near(top.logprob, entry)


def schema(caller):
    (choice,) = whole(caller, "schema").choices
    call = caller.calls["schema"]["call"]
    jsonschema.validate(json.loads(choice.message.content), call["response_format"]["json_schema"]["schema"])


def second_turn_hits_the_cache(caller):
    long = [dict(role="user", content="Tell me what a file is, and what it is good for. " * 4)]
    create = caller.client.chat.completions.create
    first = create(model=caller.model, messages=long, max_tokens=8, temperature=0)
    reply = dict(role="assistant", content=first.choices[0].message.content)
    more = [*long, reply, dict(role="user", content="And a folder?")]
    second = create(model=caller.model, messages=more, max_tokens=8, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= 64, second.usage


WEATHER = dict(type="function", function=dict(name="weather", strict=True, parameters=SCHEMA))


def streamed_message(events):
    """Puts the deltas of a stream together. Returns the message as the next call has it, and why it has ended."""
    message, end = dict(role="assistant", content="", tool_calls=[]), None
    for event in events:
        (choice,) = event.choices
        end = choice.finish_reason or end
        message["content"] += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            assert call.index == len(message["tool_calls"])
            message["tool_calls"].append(call.model_dump(exclude={"index"}))
    return message, end


def tools(caller):
    """The model is held to a call, whose result it reads in the next turn, in one piece, as events and by the helper."""
    create = caller.client.chat.completions.create
    for how in ("whole", "events", "helper"):
        messages = [dict(role="user", content="Weather?")]
        # A grammar ends after one call, which such a small model would repeat.
        fields = dict(model=caller.model, messages=messages, tools=[WEATHER], temperature=0, parallel_tool_calls=False)
        if how == "whole":
            (choice,) = create(**fields, tool_choice="required").choices
            message, end = choice.message.model_dump(), choice.finish_reason
        elif how == "events":
            named = dict(type="function", function=dict(name="weather"))
            message, end = streamed_message(create(**fields, tool_choice=named, stream=True))
        else:
            with caller.client.chat.completions.stream(**fields, tool_choice="required") as stream:
                (choice,) = stream.get_final_completion().choices
            assert choice.message.tool_calls[0].function.parsed_arguments["place"] in PLACES
            message, end = choice.message.model_dump(exclude={"parsed"}), choice.finish_reason
            del message["tool_calls"][0]["function"]["parsed_arguments"]
        (call,) = message["tool_calls"]
        assert end == "tool_calls", end
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"])["place"] in PLACES
        messages += [message, dict(role="tool", tool_call_id=call["id"], content="rain")]
        (last,) = create(**fields, tool_choice="none", max_tokens=8).choices
        assert isinstance(last.message.content, str)
        assert not last.message.tool_calls
        print(f"openai: a loop of calls with tools, {how}", flush=True)


def responses(caller):
    """A loop of calls with tools by the Responses API, in one piece and as events."""
    create = caller.client.responses.create
    tool = dict(type="function", name="weather", parameters=SCHEMA, strict=True)
    fields = dict(model=caller.model, tools=[tool], temperature=0, parallel_tool_calls=False, store=False)
    for how in ("whole", "events"):
        said = [dict(role="user", content="Weather?")]
        answer = create(input=said, tool_choice="required", stream=how == "events", **fields)
        if how == "events":
            *events, last = answer
            assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
            answer = last.response
        (call,) = answer.output
        assert (answer.status, call.type, call.name) == ("completed", "function_call", "weather"), answer
        assert json.loads(call.arguments)["place"] in PLACES
        said += [call.model_dump(), dict(type="function_call_output", call_id=call.call_id, output="rain")]
        last = create(input=said, tool_choice="none", max_output_tokens=8, **fields)
        assert isinstance(last.output_text, str)
        assert [item.type for item in last.output] == ["message"], last
        print(f"openai: a loop of calls with tools by responses, {how}", flush=True)


def refused(caller, kind, make):
    error = raised_by(kind, make)
    assert error.body["message"], error.body


def refusals(caller):
    client = caller.client
    simple = lambda client=client, **fields: client.completions.create(**dict(model=caller.model, prompt="a") | fields)
    refused(caller, openai.AuthenticationError, lambda: simple(client.with_options(api_key="wrong")))
    refused(caller, openai.NotFoundError, lambda: simple(model="another"))
    refused(caller, openai.BadRequestError, lambda: simple(temperature=-1))
    refused(caller, openai.BadRequestError, lambda: simple(max_tokens=10**6))
    refused(caller, openai.BadRequestError, lambda: simple(best_of=3))
    refused(caller, openai.BadRequestError, lambda: client.chat.completions.create(model=caller.model, messages=[]))


def main(url, key, file):
    caller = Caller(url, key, json.loads(Path(file).read_text())["calls"])
    own = {
        "logprobs": completion_logprobs, "echoed": echoed_logprobs, "chat logprobs": chat_logprobs, "schema": schema,
    }  # fmt: skip
    for name in caller.calls:
        own[name](caller) if name in own else whole(caller, name)
        if name != "echoed":
            streamed(caller, name)
        print(f"openai: {name}: the engine's own", flush=True)
    second_turn_hits_the_cache(caller)
    tools(caller)
    responses(caller)
    refusals(caller)
    print(f"openai {openai.__version__}: {len(caller.calls)} calls in one piece and streamed, hits and refusals")


if __name__ == "__main__":
    main(*sys.argv[1:])
