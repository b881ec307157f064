"""The states at which later chats part from a prompt stay cached, with no field that says where."""

import asyncio
import re
import zlib

import pytest

from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.serve.api.checkpoints import ChatCheckpoints, ChatPrompt, shared_characters
from mamba_align_jax.serve.refusals import Refusal, overloaded

# It writes tools after the instructions, and the reasoning of an answer only after the newest message of the user.
TEMPLATE = """\
{%- set state = namespace(newest=-1) -%}
{%- for one in messages -%}{%- if one.role == 'user' -%}{%- set state.newest = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if messages[0].role == 'system' -%}<system>{{ messages[0].content }}{{ tools | tojson if tools }}{%- endif -%}
{%- for one in messages if one.role != 'system' -%}
<{{ one.role }}>{%- if one.role == 'assistant' and loop.index0 + 1 > state.newest -%}
<think>{{ one.reasoning_content }}</think>{%- endif -%}{{ one.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant><think>{%- endif -%}"""
TOOLS = [{"name": "read", "parameters": {"path": "string"}}]
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text):
    return {"role": "user", "content": text}


def step(number):
    """A call and its result: what an agent adds to its chat before the user says anything."""
    answer = {"role": "assistant", "content": f"call {number}", "reasoning_content": f"I must read {number}."}
    return [answer, {"role": "tool", "content": f"result {number}"}]


def in_bytes(text):
    return list(text.encode())


def in_words(text):
    """Tokens of several characters: one may reach from a template's text into a message."""
    return [zlib.crc32(word.encode()) >> 1 for word in re.findall(r"\W+\w|\w+|\W+", text)]


class Chats:
    """Renders chats and encodes them, and counts both."""

    def __init__(self, tokenize=in_bytes, source=TEMPLATE, refuse=()):
        self.template, self.tokenize, self.refuse = ChatTemplate(source), tokenize, list(refuse)
        self.rendered, self.encoded = 0, 0
        self.checkpoints = ChatCheckpoints(self.render, self.encode)

    async def render(self, messages, variables):
        self.rendered += 1
        if self.refuse:
            raise self.refuse.pop(0)
        try:
            return self.template.render(messages, **variables)
        except ValueError as error:
            raise Refusal(400, str(error)) from error

    async def encode(self, text):
        self.encoded += len(text)
        return self.tokenize(text)

    def prompt(self, *messages, **variables):
        text = self.template.render(messages, **variables)
        return ChatPrompt(messages, variables, text, self.tokenize(text))

    def offsets(self, prompt):
        return asyncio.run(self.checkpoints.offsets(prompt))


def shared(*prompts):
    """The number of tokens with which all prompts begin."""
    columns = zip(*(prompt.tokens for prompt in prompts), strict=False)
    return next((at for at, column in enumerate(columns) if len(set(column)) > 1), min(len(p.tokens) for p in prompts))


@pytest.mark.parametrize("tokenize", [in_bytes, in_words])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("turns", [0, 2])
def test_offsets_are_where_other_chats_and_later_turns_part_from_a_prompt(tokenize, steps, turns):
    chats = Chats(tokenize)
    before = [one for n in range(turns) for one in (user(f"Question {n}?"), *step(n), *step(n + 9), *step(n + 99)[:1])]
    chat = [SYSTEM, *before, user("And then?"), *(one for n in range(steps) for one in step(50 + n))]
    now = chats.prompt(*chat, tools=TOOLS)
    others = [chats.prompt(SYSTEM, user(text), tools=TOOLS) for text in ("Who?", "What?", "xyz")]
    later = [chats.prompt(*chat, *step(70)[:1], user(text), tools=TOOLS) for text in ("Who?", "xyz")]
    assert chats.offsets(now) == (shared(now, *others), shared(now, *later))
    # Each later prompt of the chat goes on from there, or has that many tokens more.
    assert shared(now, *later) < len(now.tokens) - len(tokenize("<think>")) + 1
    assert shared(now, *others) < shared(now, *later)


def test_instructions_and_tools_are_looked_at_once():
    chats = Chats()
    counts = []
    for text in ("Who?", "What?", "Where?"):
        before = chats.rendered, chats.encoded
        chats.offsets(chats.prompt(SYSTEM | {"content": "x" * 5000}, user(text), tools=TOOLS))
        counts.append((chats.rendered - before[0], chats.encoded - before[1] > 5000))
    assert counts == [(3, True), (1, False), (1, False)]
    chats.offsets(chats.prompt(SYSTEM | {"content": "x" * 5000}, user("Who?")))
    assert chats.rendered == 8, "other tools are another beginning"


def test_few_beginnings_are_remembered():
    chats = Chats()
    for number in range(100):
        chats.offsets(chats.prompt(SYSTEM | {"content": str(number)}, user("Who?")))
    assert len(chats.checkpoints._beginnings) == 64


def test_what_a_template_refuses_has_no_offsets_and_refuses_no_call():
    refusing = TEMPLATE + "{%- if messages[-2].role == 'assistant' -%}{{ raise_exception('no') }}{%- endif -%}"
    chats = Chats(source=refusing)
    prompt = chats.prompt(SYSTEM, user("Who?"))
    assert chats.offsets(prompt) == (len("<system>Be brief.<user>"),)
    assert Chats(refuse=[Refusal(400, "no")] * 4).offsets(prompt) == ()


def test_a_busy_server_looks_at_a_beginning_later():
    chats = Chats(refuse=[overloaded("busy")] * 2)
    prompt = chats.prompt(SYSTEM, user("Who?"))
    assert chats.offsets(prompt) == ()
    assert len(chats.offsets(prompt)) == 2


def test_long_texts_are_not_rendered_again():
    chats = Chats()
    assert chats.offsets(chats.prompt(user("x" * 2**20))) == ()
    assert chats.rendered == 0
    chats.offsets(chats.prompt(SYSTEM, user("Who?"), *(one for n in range(1000) for one in step(n))))
    assert chats.encoded < 100


@pytest.mark.parametrize(
    ("first", "second", "count"), [("", "a", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("b", "a", 0)]
)
def test_shared_characters_by_hand(first, second, count):
    assert shared_characters(first, second) == shared_characters(second, first) == count
