"""Templates and schemas that would read files, hang or need all memory are refused, and other calls go on meanwhile."""

import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest
from fakes.http import Served
from serve.conftest import LIMITS

from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.serve.limits.grammars import GrammarCheck, special_tokens_of
from mamba_align_jax.serve.settings import Settings

pytest.importorskip("llguidance")
NESTED = {"type": "object", "properties": {"a": {"type": "string"}}}
for _ in range(200):
    NESTED = {"type": "object", "properties": {"a": NESTED}}


@pytest.fixture(scope="module")
def grammars():
    return GrammarCheck(1.0)


@pytest.mark.parametrize(
    "schema",
    [
        '{"type": "integer", "multipleOf": 2147483647}',
        '{"type": "string", "pattern": "^(?=.*a)(?=.*b).{1000,100000}$"}',
        '{"$ref": "file:///etc/passwd"}',
        '{"$ref": "http://127.0.0.1:1/schema.json"}',
        str(NESTED).replace("'", '"'),
        '{"allOf": [' + ", ".join(['{"anyOf": [' + ", ".join(['{"minProperties": 1}'] * 6) + "]}"] * 9) + "]}",
        '{"type": "what"}',
        "5",
    ],
    ids=["multiple", "lookahead", "file", "http", "nested", "product", "type", "number"],
)
def test_a_bad_schema_is_refused_in_time(grammars, schema):
    begin = time.monotonic()
    with pytest.raises(ValueError, match="response_format must"):
        grammars.check(Grammar("json_schema", schema))
    assert time.monotonic() - begin < 60  # A bomb would take hours.
    grammars.check(Grammar("json_schema", "{}"))


@pytest.mark.parametrize(
    "rules", ['start: <|tool|> "x"', 'start: <tool_call> %json {"type": "object"}', 'start: /a+/ | "b" start']
)
def test_rules_may_name_the_models_special_tokens(rules):
    tokenizer = SimpleNamespace(to_json=lambda: json.dumps({"added_tokens": [{"content": "<tool_call>"}]}))
    GrammarCheck(4.0, lambda: ["<|tool|>", *special_tokens_of(tokenizer)]).check(Grammar("lark", rules))


@pytest.mark.parametrize(
    ("kind", "text"),
    [("lark", "start: what"), ("lark", "start: <tool_call>"), ("lark", "start: /(a{99}){999}{999}/"), ("regex", "(")],
)
def test_bad_rules_are_refused(grammars, kind, text):
    with pytest.raises(ValueError, match="response_format must"):
        grammars.check(Grammar(kind, text))
    grammars.check(Grammar("regex", "a+"))


def test_a_refusal_is_kept(grammars):
    """A tenant that sends one bomb again and again costs nobody's time."""
    bomb = Grammar("json_schema", '{"type": "integer", "multipleOf": 299993}')
    for _ in range(2):
        with pytest.raises(ValueError, match="response_format must compile within 1 s of CPU time"):
            grammars.check(bomb)
        assert grammars._worker._process.poll() is not None, "the bomb ended it, and nothing started another one"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_whoever_ends_or_stops_the_process_is_not_the_client(end):
    grammars = GrammarCheck(0.5)
    grammars.check(Grammar("json_schema", "{}"))
    os.kill(grammars._worker._process.pid, end)
    grammars.check(Grammar("json_schema", '{"type": "object"}'))
    with pytest.raises(ValueError, match="response_format must be what llguidance takes"):
        grammars.check(Grammar("json_schema", '{"type": "what"}'))


def test_backtracking_costs_nothing(grammars):
    """llguidance's expressions have no backtracking."""
    for schema in ('{"type": "string", "pattern": "^(a+)+$"}', '{"type": "string", "maxLength": 1000000000}'):
        grammars.check(Grammar("json_schema", schema))


def test_a_template_bomb_costs_its_own_call_alone(engine):
    source = (
        "{% if messages | length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source + "{% endif %}{{ messages[0].content }}", time_limit=4.0)
    message = {"role": "user", "content": "x"}
    with Served(engine, Settings(warmup="none", limits=LIMITS), template) as served:
        replies = []
        # The programs are compiled here, so that the completion below is quick.
        served.complete("x", max_tokens=1)

        def ask():
            with served.new_client() as client:
                replies.append(client.post("/v1/chat/completions", json={"messages": [message] * 2}))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert served.complete("x", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert served.client.get("/health").status_code == 200
        # The bombs go off one after the other.
        assert len(replies) < 2
        for thread in threads:
            thread.join(300)
        assert [reply.json()["error"]["code"] for reply in replies] == ["chat_template"] * 2
        assert served.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1}).status_code == 200
