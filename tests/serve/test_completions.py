"""/v1/completions answers with the engine's own tokens, in one piece and as events."""

import json

import pytest
from fakes.http import Served

from mamba_align_jax import SamplingParams
from mamba_align_jax.data import encode
from mamba_align_jax.serve.settings import Settings

PROMPT = "def read(self, name):\n    "
OTHER = "class Parser:\n    "


def own_tokens(engine, prompt, **params):
    """What the engine generates by itself. The cache may have the prompt, and changes no token."""
    (output,) = engine.generate(encode(prompt) if isinstance(prompt, str) else prompt, SamplingParams(**params))
    return list(output.token_ids)


def test_an_answer_has_the_engines_tokens(served):
    answer = served.complete(PROMPT, max_tokens=12, temperature=0)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == own_tokens(served.engine, PROMPT, max_tokens=12)
    assert choice["text"] == bytes(choice["token_ids"]).decode()
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert (answer["object"], answer["model"], answer["id"][:5]) == ("text_completion", "bytes", "cmpl-")
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert answer["usage"]["total_tokens"] == len(PROMPT) + 12


def test_the_events_of_a_stream_make_the_same_answer(served):
    fields = dict(prompt=PROMPT, max_tokens=12, temperature=0, return_token_ids=True)
    whole = served.complete(**fields)["choices"][0]
    events = served.events("/v1/completions", fields)
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert not any("usage" in event for event in events)


def test_the_last_event_has_the_usage_if_the_client_asks_for_it(served):
    fields = dict(prompt=PROMPT, max_tokens=3, stream_options={"include_usage": True})
    *_, last = served.events("/v1/completions", fields)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_event_has_the_usage_so_far_if_the_client_asks_for_it(served, path):
    asks = dict(prompt=PROMPT) if path == "/v1/completions" else dict(messages=[dict(role="user", content="What?")])
    options = dict(include_usage=True, continuous_usage_stats=True)
    events = served.events(path, asks | dict(max_tokens=3, ignore_eos=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [3, 3]
    assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
    without = served.events(path, asks | dict(max_tokens=3, stream_options=dict(continuous_usage_stats=True)))
    assert not any("usage" in event for event in without)


def test_several_prompts_of_any_kind_are_answered_in_order(served):
    expected = [own_tokens(served.engine, prompt, max_tokens=6) for prompt in (PROMPT, OTHER)]
    for prompts in ([PROMPT, OTHER], [encode(PROMPT), encode(OTHER)]):
        answer = served.complete(prompts, max_tokens=6, temperature=0)
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == len(PROMPT) + len(OTHER)
        assert len(answer["usage"]["cache_miss"]) == 2


def test_one_prompt_may_be_token_ids(served):
    answer = served.complete(encode(PROMPT), max_tokens=6, temperature=0)
    assert answer["choices"][0]["token_ids"] == own_tokens(served.engine, PROMPT, max_tokens=6)


def test_choices_have_the_seeds_that_follow_each_other(served):
    answer = served.complete([PROMPT, OTHER], max_tokens=6, temperature=1, n=2, seed=7)
    own = [
        own_tokens(served.engine, prompt, max_tokens=6, temperature=1, seed=seed)
        for prompt in (PROMPT, OTHER)
        for seed in (7, 8)
    ]
    assert [choice["token_ids"] for choice in answer["choices"]] == own
    assert answer["usage"]["prompt_tokens"] == len(PROMPT) + len(OTHER)
    assert answer["usage"]["completion_tokens"] == 24


def test_choices_of_a_stream_are_told_apart_by_their_index(served):
    fields = dict(prompt=PROMPT, max_tokens=6, temperature=1, n=3, seed=7, return_token_ids=True)
    whole = served.complete(**fields)["choices"]
    found = {}
    for event in served.events("/v1/completions", fields):
        for choice in event["choices"]:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert found == {choice["index"]: choice["token_ids"] for choice in whole}


def test_without_a_seed_answers_differ(served):
    draw = lambda: served.complete(PROMPT, max_tokens=24, temperature=2)["choices"][0]["token_ids"]
    assert len({tuple(draw()) for _ in range(4)}) > 1


def test_a_server_may_have_a_seed_and_several_names(engine):
    settings = Settings(model_name="org/bytes", model_aliases=("b",), seed=5, warmup="none")
    answers = []
    for _ in range(2):
        with Served(engine, settings) as served:
            cards = served.client.get("/v1/models").json()["data"]
            assert cards == [served.client.get(f"/v1/models/{name}").json() for name in ("org/bytes", "b")]
            calls = [served.complete([PROMPT, PROMPT], model=name, max_tokens=6, temperature=2) for name in ("b", None)]
        assert {answer["model"] for answer in calls} == {"org/bytes"}
        answers.append([choice["token_ids"] for answer in calls for choice in answer["choices"]])
    assert answers[0] == answers[1]
    assert len({*map(tuple, answers[0])}) == 4


def test_any_whole_number_is_a_seed(served):
    for seed in (-1, 2**31, 2**63):
        first, second = (served.complete(PROMPT, max_tokens=6, seed=seed)["choices"][0] for _ in range(2))
        assert first["token_ids"] == second["token_ids"]


def test_an_echo_begins_with_the_prompt(served):
    for prompt in (PROMPT, encode(PROMPT)):
        answer = served.complete(prompt, max_tokens=4, temperature=0, echo=True)["choices"][0]
        assert answer["text"].startswith(PROMPT)
        fields = dict(prompt=prompt, max_tokens=4, temperature=0, echo=True)
        events = served.events("/v1/completions", fields)
        assert "".join(choice["text"] for event in events for choice in event["choices"]) == answer["text"]


def test_a_stop_string_ends_an_answer(served):
    text = served.complete(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
    for stop in (text[9:12], [text[9:12], "never"]):
        choice = served.complete(PROMPT, max_tokens=24, temperature=0, stop=stop)["choices"][0]
        assert choice["text"] == text[: text.index(text[9:12])]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", text[9:12])


def test_a_stop_token_ends_an_answer(served):
    tokens = own_tokens(served.engine, PROMPT, max_tokens=12)
    choice = served.complete(PROMPT, max_tokens=12, temperature=0, stop_token_ids=[tokens[5]])["choices"][0]
    assert choice["token_ids"] == tokens[: tokens.index(tokens[5]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", tokens[5])


def test_usage_says_what_was_cached_and_why_not_more(served):
    salted = dict(max_tokens=2, temperature=0, cache_salt="usage")
    prompt = "x = 1\n" * 30
    first, second = (served.complete(prompt, **salted)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert first["cache_miss"] == "not identical"
    assert second["prompt_tokens_details"] == {"cached_tokens": 128}
    assert second["cache_miss"] is None


def test_a_null_counts_as_absent(served):
    fields = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    extra = {name: None for name in ("n", "stop", "logprobs", "suffix", "best_of", "stream", "user", "logit_bias")}
    plain, with_nulls = (served.post("/v1/completions", one).json() for one in (fields, {**fields, **extra}))
    assert plain["choices"] == with_nulls["choices"]


def test_fields_about_the_caller_are_ignored(served):
    served.complete(PROMPT, max_tokens=1, user="someone", metadata={"a": "b"}, store=False)


def test_json_in_any_spelling_is_read(served):
    body = json.dumps({"prompt": "é\U0001f600", "max_tokens": 1}).encode()
    for content in (body, '{"prompt": "é\U0001f600", "max_tokens": 1}'.encode()):
        response = served.client.post(
            "/v1/completions", content=content, headers={"content-type": "application/json; charset=utf-8"}
        )
        assert response.json()["usage"]["prompt_tokens"] == 6


def test_without_a_limit_an_answer_is_short_and_fits(served):
    assert served.complete(PROMPT, ignore_eos=True)["usage"]["completion_tokens"] == 16
    assert served.complete("x" * 505, ignore_eos=True)["usage"]["completion_tokens"] == 7
