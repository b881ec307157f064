"""Runs loops of calls with tools by LangChain's, LiteLLM's and OpenAI's agents. Run by `run.py`."""

import asyncio
import json
import os
import sys

import agents
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from weather import PLACES, SCHEMA

TOOL = dict(type="function", function=dict(name="weather", parameters=SCHEMA))


def langchain(url, key):
    model = ChatOpenAI(model="bundled", base_url=f"{url}/v1", api_key=key, temperature=0, max_retries=0)
    held = model.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False)
    free = model.bind_tools([TOOL], tool_choice="none", max_tokens=8)
    for how in ("whole", "streamed"):
        messages = [HumanMessage("Weather?")]
        if how == "whole":
            said = held.invoke(messages)
        else:
            first, *rest = held.stream(messages)
            said = sum(rest, first)
        (call,) = said.tool_calls
        assert (call["name"], call["args"]["place"] in PLACES) == ("weather", True), call
        messages += [said, ToolMessage("rain", tool_call_id=call["id"])]
        last = free.invoke(messages)
        assert isinstance(last.content, str)
        assert not last.tool_calls
        print(f"langchain-openai: a loop of calls with tools, {how}", flush=True)


def lite(url, key):
    # Otherwise it looks for a list of prices on the network when it is imported.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    fields = dict(model="openai/bundled", api_base=f"{url}/v1", api_key=key, tools=[TOOL], temperature=0, num_retries=0)
    for stream in (False, True):
        messages = [dict(role="user", content="Weather?")]
        answer = litellm.completion(
            messages=messages, tool_choice="required", parallel_tool_calls=False, stream=stream, **fields
        )
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)["place"] in PLACES) == ("weather", True), call
        messages += [choice.message.model_dump(), dict(role="tool", tool_call_id=call.id, content="rain")]
        last = litellm.completion(messages=messages, tool_choice="none", max_tokens=8, **fields).choices[0].message
        assert isinstance(last.content, str)
        assert not last.tool_calls
        print(f"litellm: a loop of calls with tools, {'streamed' if stream else 'whole'}", flush=True)


async def openai_agents(url, key):
    agents.set_tracing_disabled(disabled=True)
    asked = []

    async def run_tool(context, arguments):
        asked.append(json.loads(arguments)["place"])
        return "rain"

    tool = agents.FunctionTool(
        name="weather", description="Says it.", params_json_schema=SCHEMA, on_invoke_tool=run_tool
    )
    client = agents.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    model = agents.OpenAIChatCompletionsModel(model="bundled", openai_client=client)
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=200)
    # Once a tool was called, an agent lets the model choose.
    agent = agents.Agent(name="a", instructions="Be brief.", model=model, model_settings=settings, tools=[tool])
    whole = await agents.Runner.run(agent, "Weather?", max_turns=4)
    streamed = agents.Runner.run_streamed(agent, "Weather?", max_turns=4)
    async for _ in streamed.stream_events():
        pass
    for result in (whole, streamed):
        kinds = [item.type for item in result.new_items]
        assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"], kinds
        assert isinstance(result.final_output, str)
    assert len(asked) == 2
    assert set(asked) <= set(PLACES)
    print("openai-agents: a loop of calls with tools, whole and streamed", flush=True)


def main(url, key, _):
    langchain(url, key)
    lite(url, key)
    asyncio.run(openai_agents(url, key))


if __name__ == "__main__":
    main(*sys.argv[1:])
