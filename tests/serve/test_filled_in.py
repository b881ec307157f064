"""Routers fill in fields of vLLM's API before they pass a call on. The answer is that to the client's own call."""

import pytest

# What vllm-router 0.1.17 adds.
FILLED_IN = dict(no_stop_trim=False, ignore_eos=False, skip_special_tokens=True, return_hidden_states=False)
CHAT = FILLED_IN | dict(
    logprobs=False, continue_final_message=False, separate_reasoning=True, stream_reasoning=True, include_reasoning=True
)
SAY = dict(messages=[dict(role="user", content="x")])


@pytest.mark.parametrize(
    ("path", "fields", "filled_in"),
    [
        (
            "/v1/completions",
            dict(prompt="def f(", max_tokens=4, temperature=0),
            FILLED_IN | dict(echo=False, stream=False),
        ),
        ("/v1/chat/completions", SAY | dict(max_tokens=4, temperature=0), CHAT | dict(stream=False)),
        ("/tokenize", SAY, dict(continue_final_message=False)),
    ],
)
def test_what_a_router_fills_in_changes_nothing(served, path, fields, filled_in):
    own, routed = (served.post(path, call).json() for call in (fields, fields | filled_in))
    assert "error" not in own
    assert routed.get("choices") == own.get("choices")
    assert routed.get("tokens") == own.get("tokens")
