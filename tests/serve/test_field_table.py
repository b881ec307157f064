"""The table of the API's fields says what the server does with each of them."""

import pytest

from mamba_align_jax.serve.api.field_table import CHAT, COMPLETIONS, FIELDS, fields_at
from mamba_align_jax.serve.api.fields import Fields
from mamba_align_jax.serve.api.sampling import take_grammar
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits

CALLS = {
    CHAT: ("/v1/chat/completions", dict(messages=[dict(role="user", content="x")], max_tokens=3, temperature=0)),
    COMPLETIONS: ("/v1/completions", dict(prompt="def f(", max_tokens=3, temperature=0)),
}
# A value that no field has as a neutral one.
OTHER = {"asks": "for something"}


def test_each_field_has_one_row_at_an_endpoint():
    for endpoint in CALLS:
        names = [field.name for field in FIELDS if endpoint in field.at]
        assert len(set(names)) == len(names) > 60
    assert all((field.use == "refused") == bool(field.instead) for field in FIELDS)


@pytest.mark.parametrize("endpoint", CALLS)
def test_the_endpoint_reads_the_fields_that_the_table_calls_used(served, monkeypatch, endpoint):
    read, take, refuse = set(), Fields.take, Fields.refuse

    def note(method):
        def noted(fields, name, *rest):
            if not fields._path:
                read.add(name)
            return method(fields, name, *rest)

        return noted

    monkeypatch.setattr(Fields, "take", note(take))
    monkeypatch.setattr(Fields, "refuse", note(refuse))
    path, call = CALLS[endpoint]
    assert served.post(path, call).status_code == 200
    assert read == {name for name, field in fields_at(endpoint).items() if field.use == "used"}


@pytest.mark.parametrize("endpoint", CALLS)
def test_a_value_that_asks_for_nothing_changes_nothing(served, endpoint):
    path, call = CALLS[endpoint]
    rows = [field for field in fields_at(endpoint).values() if field.use != "used"]
    own = served.post(path, call).json()["choices"]
    for number in range(max(len(field.neutral) for field in rows)):
        asked = {field.name: field.neutral[number] for field in rows if field.neutral[number:]}
        ignored = {field.name: OTHER for field in rows if field.use == "ignored"}
        assert served.post(path, call | asked | ignored).json().get("choices") == own


@pytest.mark.parametrize("field", [field for field in FIELDS if field.use == "refused"], ids=lambda field: field.name)
def test_another_value_is_refused_with_what_to_use_instead(field):
    for endpoint in field.at:
        with pytest.raises(Refusal, match=field.instead) as raised:
            Fields("", {field.name: OTHER}).end(fields_at(endpoint))
        assert (raised.value.status, raised.value.param, raised.value.code) == (400, field.name, "unsupported_field")


def test_true_is_not_one():
    with pytest.raises(Refusal):
        Fields("", {"length_penalty": True}).end(fields_at(CHAT))


@pytest.mark.parametrize(
    ("structured", "texts"),
    [
        ({"choice": ["yes", 'a "quoted" no']}, ["yes", 'a "quoted" no']),
        ({"regex": "ab|cd"}, ["ab", "cd"]),
        ({"grammar": 'start: "x" | "yz"'}, ["x", "yz"]),
        ({"json": {"enum": [1, 22]}}, ["1", "22"]),
        ({"json": '{"const": "q"}'}, ['"q"']),
        ({"json_object": True, "json": None}, None),
    ],
)
@pytest.mark.parametrize("endpoint", CALLS)
def test_structured_outputs_say_what_an_answer_matches(served, endpoint, structured, texts):
    path, call = CALLS[endpoint]
    answer = served.post(path, call | dict(max_tokens=24, structured_outputs=structured)).json()
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if endpoint == CHAT else choice["text"]
    assert text in texts if texts else text.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (dict(structured_outputs={"regex": "("}), "structured_outputs"),
        (dict(structured_outputs={}), "structured_outputs"),
        (dict(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs"),
        (dict(structured_outputs={"choice": []}), "structured_outputs.choice"),
        (dict(structured_outputs={"choice": [""]}), "structured_outputs.choice"),
        (dict(structured_outputs={"json": "{"}), "structured_outputs.json"),
        (dict(structured_outputs={"structural_tag": "x"}), "structured_outputs.structural_tag"),
        (dict(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}), "structured_outputs"),
        (dict(response_format={"type": "grammar"}), "response_format.type"),
    ],
)
@pytest.mark.parametrize("endpoint", CALLS)
def test_wrong_grammars_are_refused(served, endpoint, fields, param):
    path, call = CALLS[endpoint]
    answer = served.post(path, call | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "structured", [{"json": "1" * 101}, {"json": {"const": "1" * 101}}, {"regex": "a" * 101}, {"choice": ["a" * 101]}]
)
def test_long_grammars_are_refused(structured):
    fields = Fields("", {"structured_outputs": structured})
    with pytest.raises(Refusal, match="100") as raised:
        take_grammar(fields, Limits(grammar_bytes=100))
    assert raised.value.param == f"structured_outputs.{next(iter(structured))}"
