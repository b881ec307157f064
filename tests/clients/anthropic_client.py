"""Runs a loop of calls with tools by Anthropic's own client. Run by `run.py`."""

import sys

import anthropic
from weather import PLACES, SCHEMA, raised_by

TOOL = dict(name="weather", description="Says it.", input_schema=SCHEMA)


def loop(client, how):
    """The model is held to a call, whose result it reads in the next turn."""
    messages = [dict(role="user", content="Weather?")]
    fields = dict(model="bundled", max_tokens=200, system="Be brief.", tools=[TOOL], extra_body=dict(temperature=0))
    choice = dict(type="any", disable_parallel_tool_use=True)
    if how == "whole":
        said = client.messages.create(messages=messages, tool_choice=choice, **fields)
    else:
        with client.messages.stream(messages=messages, tool_choice=choice, **fields) as stream:
            said = stream.get_final_message()
    (call,) = said.content
    assert (said.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather"), said
    assert call.input["place"] in PLACES, call
    messages += [
        dict(role="assistant", content=[block.model_dump(exclude_none=True) for block in said.content]),
        dict(role="user", content=[dict(type="tool_result", tool_use_id=call.id, content="rain")]),
    ]
    counted = client.messages.count_tokens(model="bundled", messages=messages, system="Be brief.", tools=[TOOL])
    last = client.messages.create(messages=messages, tool_choice=dict(type="none"), **fields | dict(max_tokens=8))
    assert [block.type for block in last.content] == ["text"], last
    assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens
    print(f"anthropic: a loop of calls with tools, {how}", flush=True)


def refusals(client):
    fields = dict(model="bundled", max_tokens=8, messages=[dict(role="user", content="a")])
    for kind, make in (
        (anthropic.AuthenticationError, lambda: client.with_options(api_key="wrong").messages.create(**fields)),
        (anthropic.NotFoundError, lambda: client.messages.create(**fields | dict(model="another"))),
        (anthropic.BadRequestError, lambda: client.messages.create(**fields | dict(max_tokens=0))),
    ):
        error = raised_by(kind, make)
        assert error.body["error"]["message"], error.body
    print(f"anthropic {anthropic.__version__}: refusals", flush=True)


def main(url, key, _):
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300)
    for how in ("whole", "streamed"):
        loop(client, how)
    refusals(client)


if __name__ == "__main__":
    main(*sys.argv[1:])
