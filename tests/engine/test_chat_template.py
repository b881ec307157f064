"""Chat templates: messages become the text that transformers makes of them, and a bad template does no harm."""

import functools
import json
import math
import threading

import pytest

pytest.importorskip("jinja2")

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text import chat_template
from mamba_align_jax.engine.text.chat_template import ChatTemplate, load_chat_template

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Höher\n"},
    {"role": "assistant", "content": " 中 "},
]
# JSON would hold it, but Python can't write it.
NESTED = functools.reduce(lambda inner, _: [inner], range(100_000), [])


def test_bundled_template_writes_a_line_for_each_message():
    template = load_chat_template(BYTE_MODEL)
    text = "system: Be brief.\nuser: Höher\n\nassistant:  中 \n"
    assert template.render(CHAT) == text + "assistant: "
    assert template.render(CHAT, add_generation_prompt=False) == text
    # What a chat has said so far begins the prompt of its next turn, so that the next turn finds it in the cache.
    assert template.render(CHAT).startswith(template.render(CHAT[:2]) + CHAT[2]["content"])


def test_template_is_found_as_transformers_finds_it(tmp_path):
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    file, own = tmp_path / "tokenizer_config.json", tmp_path / "chat_template.jinja"
    assert load_chat_template(tmp_path) is None
    file.write_text(json.dumps(config))
    assert load_chat_template(tmp_path) is None
    file.write_text(json.dumps(config | {"chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"}))
    assert load_chat_template(tmp_path).render(CHAT) == "<s>Be brief.</s>"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ pad_token is defined }}"}]
    file.write_text(json.dumps(config | {"chat_template": several}))
    assert load_chat_template(tmp_path).render(CHAT) == "False"
    own.write_text("{{ messages | length }}{{ eos_token }}")
    assert load_chat_template(tmp_path).render(CHAT) == "3</s>"
    assert load_chat_template(tmp_path, "{{ bos_token }}").render(CHAT) == "<s>"
    own.unlink()
    for content, wanted in (("{", "must be JSON"), ("[]", "an object"), ('{"chat_template": 3}', "must be text")):
        file.write_text(content)
        with pytest.raises(ValueError, match=wanted):
            load_chat_template(tmp_path)


def test_without_jinja_there_is_no_template(monkeypatch):
    monkeypatch.setattr(chat_template.importlib.util, "find_spec", lambda name: None)
    assert load_chat_template(BYTE_MODEL) is None


@pytest.mark.parametrize(
    ("source", "variables", "text"),
    [
        ("{% for m in messages %}\n  {% if loop.last %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", {}, "assistant\n"),
        ("{% generation %}a{% endgeneration %}", {}, "a"),
        ("{% for m in messages %}{% break %}{% endfor %}{{ tools | tojson }}", {"tools": [{"ö": "<"}]}, '[{"ö": "<"}]'),
        ("{{ tools | tojson(indent=1) }}", {"tools": [1]}, "[\n 1\n]"),
        ("{% if tools is not none %}tools{% endif %}{% if documents is not none %}documents{% endif %}", {}, ""),
        ("{{ tools | length }}{{ documents is none }}", {"tools": [1]}, "1True"),
        ("{{ strftime_now('%%') }}{{ enable_thinking }}", {"enable_thinking": True}, "%True"),
    ],
)
def test_what_templates_use_is_there(source, variables, text):
    assert ChatTemplate(source).render(CHAT, **variables) == text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}[{{ m.content }}]{% endfor %}", "[a\nb][c][]"),
        ("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}", "[a\nb][c][]"),
        ("{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}", "[a\nb][c][]"),
        ("{% for m in messages %}[{{ m | tojson }}]{% endfor %}", None),
        (
            "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}]{% endfor %}",
            "[ab][c][]",
        ),
    ],
)
def test_parts_of_a_content_are_lines_unless_the_template_reads_them(source, text):
    """As in vLLM, which looks at the template's syntax for that."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": content} for content in (parts, "c", [])]
    text = (
        text
        or '[{"role": "user", "content": "a\\nb"}][{"role": "user", "content": "c"}][{"role": "user", "content": ""}]'
    )
    assert ChatTemplate(source).render(messages) == text


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 'a' * (2**23 * messages | length) }}", "25165824 characters"),
        ("{{ 'a'.ljust(10**11) }}", "MemoryError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "within its limits"),
    ],
)
def test_bad_template_is_refused_and_serves_on(source, wanted):
    template = ChatTemplate("{% if messages %}" + source + "{% else %}fine{% endif %}", time_limit=0.5)
    template._worker._patience = 300  # A busy machine may take long for the template's own half second.
    for _ in range(2):
        with pytest.raises(ValueError, match=wanted):
            template.render(CHAT)
        assert template.render([]) == "fine"


def test_wrong_template_or_messages_are_refused():
    with pytest.raises(ValueError, match="TemplateSyntaxError"):
        ChatTemplate("{% for %}")
    with pytest.raises(ValueError, match="messages must be what JSON can hold"):
        ChatTemplate("").render([{"role": object()}])
    with pytest.raises(ValueError, match="the chat template's prompt must be text without lone surrogates"):
        ChatTemplate("{{ x }}").render(CHAT, x="\ud800")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *[(lambda source=source: ChatTemplate(source), "source") for source in (5, None, b"x")],
        *[(lambda given=given: ChatTemplate("", given), "variables") for given in (5, "x", [1])],
        *[
            (lambda seconds=seconds: ChatTemplate("", time_limit=seconds), "time_limit")
            for seconds in (0, -1, math.nan, math.inf, 1e10, "1", None, True)
        ],
        *[(lambda chat=chat: ChatTemplate("").render(chat), "messages") for chat in ("abc", b"x", None, 5, CHAT[0])],
        (lambda: ChatTemplate("").render([*CHAT, "x"]), r"messages\[3\]"),
        (lambda: ChatTemplate("").render([{"content": NESTED}]), "messages"),
        (lambda: ChatTemplate("").render(CHAT, add_generation_prompt="no"), "add_generation_prompt"),
    ],
    ids=range(22),
)
def test_wrong_arguments_are_refused_by_name(make, name):
    with pytest.raises(ValueError, match=f"^{name} must be "):
        make()


def test_a_limit_that_is_less_than_the_timer_counts_is_a_limit():
    with pytest.raises(ValueError, match="must be done within its limits"):
        ChatTemplate("{% if 1 %}{% endif %}" * 10_000, time_limit=1e-9)


def test_variables_may_have_any_names_but_two():
    given = {"self": 1, "template": 2, "args": 3, "context": 4}
    assert ChatTemplate("{{ template }}{{ args }}{{ context }}").render(CHAT, **given) == "234"


def test_threads_get_their_own_prompts():
    template, wrong = ChatTemplate("{{ messages[0].content }}"), []

    def render(name):
        for number in range(50):
            text = f"{name} {number}"
            if template.render([{"content": text}]) != text:
                wrong.append(text)

    threads = [threading.Thread(target=render, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert wrong == []
