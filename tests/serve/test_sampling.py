"""What a call says of sampling reaches the engine, and log-probabilities come back as OpenAI writes them."""

import dataclasses
import json

import numpy as np
import pytest

from mamba_align_jax import SamplingParams
from mamba_align_jax.data import encode
from mamba_align_jax.serve.api.offsets import TextOffsets

PROMPT = "def read(self, name):\n    "
MESSAGES = [{"role": "user", "content": "def read(self):"}]


def own(served, prompt=PROMPT, **params):
    (output,) = served.engine.generate(encode(prompt), SamplingParams(max_tokens=8, **params))
    return output


@pytest.mark.parametrize(
    "fields",
    [
        dict(logit_bias={"101": 100}), dict(presence_penalty=2, frequency_penalty=1.5), dict(repetition_penalty=3.0),
        dict(temperature=1, seed=5, min_p=0.2), dict(temperature=1, seed=5, top_k=3, top_p=0.9), dict(min_tokens=8),
    ],
    ids=lambda fields: "+".join(fields),
)  # fmt: skip
def test_fields_mean_what_they_mean_to_the_engine(served, fields):
    choice = served.complete(PROMPT, **{"max_tokens": 8, "temperature": 0} | fields)["choices"][0]
    params = fields | ({"logit_bias": {101: 100}} if "logit_bias" in fields else {})
    assert choice["token_ids"] == list(own(served, **params).token_ids)


def test_a_top_k_of_minus_one_keeps_all_tokens(served):
    fields = dict(temperature=1, seed=5, max_tokens=8)
    first, second = (served.complete(PROMPT, top_k=k, **fields)["choices"][0] for k in (-1, 0))
    assert first["token_ids"] == second["token_ids"]


def check_logprobs(found, logprobs, text):
    """Compares what an answer has with what the engine gives."""
    names = [chr(one.token_id) for one in logprobs]
    assert found["tokens"] == names
    np.testing.assert_allclose(found["token_logprobs"], [one.logprob for one in logprobs], atol=1e-4)
    for top, one in zip(found["top_logprobs"], logprobs, strict=True):
        assert set(top) >= {chr(token) for token, _ in one.top if token < 128}
        assert max(top.values()) == pytest.approx(one.top[0][1], abs=1e-4)
    assert found["text_offset"] == list(range(found["text_offset"][0], found["text_offset"][0] + len(names)))
    assert "".join(names) == text


def test_completions_have_log_probabilities(served):
    output = own(served, logprobs=3)
    answer = served.complete(PROMPT, max_tokens=8, temperature=0, logprobs=3)["choices"][0]
    check_logprobs(answer["logprobs"], output.logprobs, answer["text"])
    fields = dict(prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3)
    parts = [event["choices"][0]["logprobs"] for event in served.events("/v1/completions", fields)]
    whole = {name: [item for part in parts for item in part[name]] for name in answer["logprobs"]}
    check_logprobs(whole, output.logprobs, answer["text"])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_an_echo_has_the_log_probabilities_of_the_prompt(served, max_tokens):
    """lm-eval reads them like this."""
    output = own(served, logprobs=1, prompt_logprobs=1)
    fields = dict(max_tokens=max_tokens, temperature=0, logprobs=1, echo=True)
    answer = served.complete(PROMPT, **fields)
    (choice,) = answer["choices"]
    found, count = choice["logprobs"], len(PROMPT)
    assert choice["text"] == PROMPT + output.text[:max_tokens]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    parts = {name: values[1:count] for name, values in found.items()}
    check_logprobs(parts, output.prompt_logprobs[1:], PROMPT[1:])
    assert len(found["tokens"]) == count + max_tokens
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["usage"]["cache_miss"] == "prompt_logprobs"
    streamed = [event["choices"][0] for event in served.events("/v1/completions", dict(prompt=PROMPT, **fields))]
    assert "".join(part["text"] for part in streamed) == choice["text"]
    for name in found:
        assert [item for part in streamed for item in part["logprobs"][name]] == found[name]


@pytest.mark.parametrize("prompt", ["a\0b", [97, 0, 98]])
def test_an_echo_shows_special_tokens_and_counts_them(served, prompt):
    """vLLM shows those of a prompt of tokens too."""
    choice = served.complete(prompt, max_tokens=1, temperature=0, logprobs=0, echo=True)["choices"][0]
    assert choice["text"].startswith("a\0b")
    assert (choice["logprobs"]["tokens"][:3], choice["logprobs"]["text_offset"]) == (["a", "\0", "b"], [0, 1, 2, 3])


@pytest.mark.parametrize(("skips", "wanted"), [(True, ""), (False, "\0\0")])
def test_an_answer_shows_special_tokens_if_they_are_not_skipped(served, skips, wanted):
    fields = dict(max_tokens=2, logit_bias={"0": 100}, ignore_eos=True, logprobs=0, skip_special_tokens=skips)
    choice = served.complete("a", **fields)["choices"][0]
    assert (choice["token_ids"], choice["text"]) == ([0, 0], wanted)
    assert choice["logprobs"]["text_offset"] == [0, len(wanted) // 2]


def test_places_of_an_echo_are_those_of_its_text(served, monkeypatch):
    """The tokenizer adds a first token that the prompt did not have, and takes the space from the first word."""
    texts = {1: "", 2: " ab", 3: " c", 4: "\n"}
    monkeypatch.setattr(served.service, "token_text", texts.__getitem__)
    monkeypatch.setattr(served.service, "special_text", {1: "<s>"}.__getitem__)
    for echo, wanted in (("ab c", [0, 0, 2, 4]), ("<s>ab c", [0, 3, 5, 7]), ("<s> ab c", [0, 3, 6, 8])):
        offsets = TextOffsets(served.service, echo, 3)
        assert [offsets.add(token) for token in (1, 2, 3, 4)] == wanted
        assert offsets.end == len(echo) + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("prompt", ["é😀 x日y", [0x61, 0xC3], [*"é\ufffd\ufffd".encode(), 0x97, 0x62]], ids=range(3))
def test_each_token_of_whole_characters_is_where_its_place_says(served, prompt, echo, stream):
    """Others are named by their numbers. The answer's characters are whole, broken, and of one to four tokens."""
    some = {*"a é日😀".encode(), 0xFF}
    fields = dict(prompt=prompt, echo=echo, logprobs=0, max_tokens=120, temperature=20, seed=4)
    fields |= dict(logit_bias={str(token): 100 if token in some else -100 for token in range(256)})
    choices = [served.complete(**fields)["choices"][0]]
    if stream:
        choices = [event["choices"][0] for event in served.events("/v1/completions", fields)]
    text = "".join(choice["text"] for choice in choices)
    names, places = ([one for c in choices for one in c["logprobs"][key]] for key in ("tokens", "text_offset"))
    whole = [(name, place) for name, place in zip(names, places, strict=True) if not name.startswith("token_id:")]
    assert len(names) > len(whole) > 10
    assert [text[place : place + len(name)] for name, place in whole] == [name for name, _ in whole]
    assert places == sorted(places)
    assert len(text) - 4 <= places[-1] <= len(text)


def test_places_do_not_drift_however_long_bytes_are_broken(served, rng):
    some = [*{*"a é日😀\ufffd".encode()}, 0xFF]
    for _ in range(200):
        tokens, offsets = [*rng.choice(some, 60, p=rng.dirichlet(np.full(len(some), 0.3)))], TextOffsets(served.service)
        for place, token in enumerate(map(int, tokens)):
            begin = offsets.add(token)
            if token < 128:
                assert begin == len(bytes(tokens[:place]).decode(errors="replace"))


def test_chats_have_log_probabilities(served):
    prompt = served.service.template.render(MESSAGES)
    output = own(served, prompt, logprobs=2)
    fields = {"messages": MESSAGES, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    found = served.post("/v1/chat/completions", fields).json()["choices"][0]["logprobs"]["content"]
    for one, own_one in zip(found, output.logprobs, strict=True):
        assert (one["token"], one["bytes"]) == (chr(own_one.token_id), [own_one.token_id])
        assert one["logprob"] == pytest.approx(own_one.logprob, abs=1e-4)
        assert [top["bytes"] for top in one["top_logprobs"]] == [[token] for token, _ in own_one.top]
    events = served.events("/v1/chat/completions", fields)
    parts = [event["choices"][0]["logprobs"] for event in events]
    streamed = [one for part in parts if part for one in part["content"]]
    assert [one["token"] for one in streamed] == [one["token"] for one in found]


def test_log_probabilities_without_alternatives_are_those_of_the_tokens(served):
    fields = {"messages": MESSAGES, "max_tokens": 3, "temperature": 0, "logprobs": True}
    found = served.post("/v1/chat/completions", fields).json()["choices"][0]["logprobs"]["content"]
    assert [one["top_logprobs"] for one in found] == [[], [], []]
    answer = served.complete(PROMPT, max_tokens=3, temperature=0, logprobs=0)["choices"][0]["logprobs"]
    assert [list(top) for top in answer["top_logprobs"]] == [[token] for token in answer["tokens"]]


def ask_for(served, form, **fields):
    return served.post("/v1/chat/completions", {"messages": MESSAGES, "response_format": form, **fields})


def schema(**content):
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": content}}


def test_an_answer_follows_its_schema(served):
    properties = {"is_open": {"type": "boolean"}, "mode": {"enum": ["r", "w"]}}
    form = schema(type="object", properties=properties, required=["is_open", "mode"], additionalProperties=False)
    (choice,) = ask_for(served, form, temperature=0, max_tokens=100).json()["choices"]
    found = json.loads(choice["message"]["content"])
    assert isinstance(found["is_open"], bool)
    assert found["mode"] in ("r", "w")
    assert choice["finish_reason"] == "stop"
    fields = {"messages": MESSAGES, "response_format": form, "temperature": 0, "max_tokens": 100}
    deltas = [event["choices"][0]["delta"] for event in served.events("/v1/chat/completions", fields)]
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]


def test_an_answer_is_an_object_if_no_schema_is_given(served):
    (choice,) = ask_for(served, {"type": "json_object"}, temperature=0, max_tokens=400).json()["choices"]
    assert choice["message"]["content"].startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_an_answer_of_any_text_needs_no_grammar(served):
    one, other = (ask_for(served, form, temperature=0, max_tokens=5).json() for form in ({"type": "text"}, None))
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    "content", [dict(type="what"), dict(type="integer", multipleOf=2**31 - 1), {"$ref": "file:///x"}]
)
def test_a_schema_that_does_not_compile_is_refused(served, content):
    response = ask_for(served, schema(**content))
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "grammar")


def test_answers_are_no_longer_than_the_models_own_limit_unless_a_call_says_so(served, monkeypatch):
    """As in vLLM, which takes it from generation_config.json too."""
    defaults = dict(sampling_defaults=dict(max_tokens=5, temperature=0.0))
    monkeypatch.setattr(served.service, "settings", dataclasses.replace(served.service.settings, **defaults))
    for path, asked in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})):
        for fields, wanted in (({}, 5), ({"max_tokens": 7}, 7)):
            answer = served.post(path, {**asked, **fields, "ignore_eos": True}).json()
            assert answer["usage"]["completion_tokens"] == wanted
