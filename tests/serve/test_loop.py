"""The event loop never works for long, whatever a call asks for, because all other calls wait meanwhile."""

import asyncio
import dataclasses
from types import SimpleNamespace

import pytest
from fakes.http import Served
from fakes.loop_time import longest_turn

from benchmarks.neighbours import large_calls
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.scheduling.request import RequestUpdate, TokenLogprobs
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.serve.api import form
from mamba_align_jax.serve.settings import Settings

# A neighbour's token waits no longer. It is CPU time, of which the loop needs two or three milliseconds at most.
LONGEST_S = 0.02
LARGE = large_calls()


@pytest.fixture(scope="module")
def served(engine):
    """A server with the limits that it has without options."""
    settings = Settings(limits=dataclasses.replace(Settings().limits, choices=128), warmup="none")
    served = Served(engine, settings, load_chat_template(BYTE_MODEL))
    served.server.config.loop = "asyncio"  # the loop whose callbacks can be watched; uvicorn has another one as well
    with served:
        served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
        yield served


@pytest.mark.parametrize("shape", LARGE)
def test_a_large_body_of_any_shape_is_refused_beside_the_loop(served, shape):
    path, body = LARGE[shape]
    with longest_turn(served.thread) as found:
        reply = served.client.post(path, content=body, headers={"content-type": "application/json"})
        assert served.client.get("/health").status_code == 200  # what answered the call has ended
    assert reply.status_code in (400, 413), reply.text
    assert len(reply.text) < 1000
    assert found[0] < LONGEST_S


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_large_answer_is_written_beside_the_loop(served, monkeypatch, logprobs):
    """There are 128 choices: 40 MB of JSON without log-probabilities, and 5 MB with them."""
    tokens, text = ([5] * 100, "a") if logprobs else ([5] * 2000, "ä" * 50_000)
    scores = tuple(TokenLogprobs(token, -1.0, ((token, -1.0),) * 5) for token in tokens) if logprobs else None

    async def run_requests(serving, metrics, requests, grammar_field):
        for place in range(len(requests)):
            output = SimpleNamespace(finish_reason="length", stop_reason=None)
            given = dict(request_id=0, token_ids=tuple(tokens), text=text, logprobs=scores)
            yield place, RequestUpdate(**given, output=output)
            await asyncio.sleep(0)

    monkeypatch.setattr(form, "run_requests", run_requests)
    asked = {"messages": [{"role": "user", "content": "x"}], "n": 128, "max_tokens": 1, "logprobs": logprobs}
    with longest_turn(served.thread) as found:
        reply = served.post("/v1/chat/completions", asked)
        assert served.client.get("/health").status_code == 200
    choices = reply.json()["choices"]
    assert [choice["message"]["content"] for choice in choices] == [text] * 128
    assert [len((choice["logprobs"] or {"content": ()})["content"]) for choice in choices] == [len(scores or ())] * 128
    assert found[0] < LONGEST_S
