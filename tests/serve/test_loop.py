"""The event loop never works for long, whatever a call asks for, because all other calls wait meanwhile."""

import pytest
from fakes.http import Served
from fakes.loop_time import longest_turn

from benchmarks.neighbours import large_calls
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.serve.settings import Settings

# A neighbour's token waits no longer. It is CPU time, of which the loop needs two or three milliseconds at most.
LONGEST_S = 0.02
LARGE = large_calls()


@pytest.fixture(scope="module")
def served(engine):
    """A server with the limits that it has without options."""
    served = Served(engine, Settings(warmup="none"), load_chat_template(BYTE_MODEL))
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
