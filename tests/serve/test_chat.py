"""/v1/chat/completions answers what the model's chat template makes of the messages."""

import pytest
from fakes.letters import Letters

from mamba_align_jax import SamplingParams
from mamba_align_jax.data import encode

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "def read(self):"}]


def ask(served, **fields):
    response = served.post("/v1/chat/completions", {"messages": MESSAGES, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def own_tokens(served, messages, **params):
    prompt = encode(served.service.template.render(messages))
    (output,) = served.engine.generate(prompt, SamplingParams(**params))
    return list(output.token_ids)


def test_an_answer_has_the_engines_tokens(served):
    answer = ask(served, max_tokens=12, temperature=0)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == own_tokens(served, MESSAGES, max_tokens=12)
    text = bytes(choice["token_ids"]).decode()
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (answer["object"], answer["id"][:9]) == ("chat.completion", "chatcmpl-")
    assert answer["usage"]["completion_tokens"] == 12


def test_the_events_of_a_stream_make_the_same_answer(served):
    fields = dict(max_tokens=12, temperature=0.8, seed=3, n=2)
    whole = ask(served, **fields)
    options = dict(messages=MESSAGES, stream_options={"include_usage": True}, **fields)
    *events, last = served.events("/v1/chat/completions", options)
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    for index in range(2):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 24


def test_parts_of_a_text_are_its_lines(served):
    parts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    messages = [{"role": "system", "content": parts}, MESSAGES[1]]
    wanted = [{"role": "system", "content": "Be\nbrief."}, MESSAGES[1]]
    assert ask(served, messages=messages, max_tokens=6, temperature=0)["choices"][0]["token_ids"] == own_tokens(
        served, wanted, max_tokens=6
    )
    answers = [served.post("/tokenize", {"messages": each}).json()["tokens"] for each in (messages, wanted)]
    assert answers[0] == answers[1]


def test_an_answer_may_be_as_long_as_the_model_allows(served):
    long = [{"role": "user", "content": "x" * 470}]
    usage = ask(served, messages=long, ignore_eos=True, temperature=0)["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_answer_ends_at_its_limit_by_either_name(served, name):
    assert ask(served, ignore_eos=True, **{name: 3})["usage"]["completion_tokens"] == 3


def test_the_next_turn_starts_from_the_last_one(served):
    first = ask(served, max_tokens=100, temperature=0, ignore_eos=True, cache_salt="turns")
    said = first["choices"][0]["message"]
    turns = [*MESSAGES, {"role": "assistant", "content": said["content"]}, {"role": "user", "content": "Go on."}]
    second = ask(served, messages=turns, max_tokens=2, cache_salt="turns")
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64


def test_a_second_chat_with_the_same_instructions_hits_their_end(served):
    instructions = {"role": "system", "content": "Be brief. " * 20}

    def cached(text):
        messages = [instructions, {"role": "user", "content": text}]
        answer = ask(served, messages=messages, max_tokens=2, ignore_eos=True, cache_salt="beginnings")
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    beginning = len(encode(f"system: {instructions['content']}\nuser: "))
    assert beginning % 64 > 1
    assert cached("a" * 200) == 0
    assert cached("b" * 50) == beginning // 64 * 64


def test_a_chat_has_the_tokens_that_tokenize_says(served):
    found = served.post("/tokenize", {"messages": MESSAGES}).json()
    assert found["tokens"] == encode(served.service.template.render(MESSAGES))
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 512)
    assert served.post("/detokenize", {"tokens": found["tokens"]}).json() == {
        "prompt": served.service.template.render(MESSAGES)
    }


def test_a_text_has_the_tokens_that_tokenize_says(served):
    assert served.post("/tokenize", {"prompt": "é"}).json()["tokens"] == encode("é")


def test_special_tokens_have_a_text_when_they_are_asked_for(served):
    """vLLM's /detokenize and log-probabilities show them too."""
    assert served.post("/detokenize", {"tokens": [97, 0, 98]}).json() == {"prompt": "a\0b"}
    answer = ask(served, max_tokens=4, logit_bias={"0": 100}, logprobs=True)["choices"][0]
    assert answer["message"]["content"] == ""
    assert [(one["token"], one["bytes"]) for one in answer["logprobs"]["content"]] == [("\0", [0])]


def test_tokens_are_named_with_their_spaces(served, monkeypatch):
    class Words(Letters):
        def decode(self, token_ids, *, skip_special_tokens=True):
            return super().decode(token_ids).replace("_", " ").removeprefix(" ")

    service = served.service
    monkeypatch.setattr(service.serving.engine, "tokenizer", Words())
    monkeypatch.setattr(service, "token_text", service._token_text)
    assert [service.token_name(token) for token in Words().encode("_a")] == [" ", "a"]
    assert service.token_bytes(ord("_") - 60) == [32]


def test_the_served_model_is_listed(served):
    (card,) = served.client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("bytes", "model", 512)
    assert served.client.get("/v1/models/bytes").json() == card
