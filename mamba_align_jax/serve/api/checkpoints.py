"""Finds where later chats will part from a prompt, so that the states there stay cached.

Other chats have the same instructions and tools. And a chat's later turns begin like its prompt now only up to some place,
because many chat templates drop the reasoning that came before the newest message of the user. Both places are found by
rendering such a chat with the same template and comparing the tokens, so no template is known here by name.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mamba_align_jax.serve.api.tools import Function
from mamba_align_jax.serve.refusals import Refusal

Messages = Sequence[Mapping[str, Any]]
# Returns the text of a chat, if an answer is to follow it. Raises a Refusal if the template refuses the chat.
Render = Callable[[Messages, Mapping[str, Any]], Awaitable[str]]
Encode = Callable[[str], Awaitable[Sequence[int]]]
# The tokens of beginnings, by their digests, the one that was used last at the end.
Beginnings = OrderedDict[bytes, np.ndarray]

# No answer begins like this where a template begins one itself, with a line break or a tag.
_ANSWER, _QUESTION, _OTHER_QUESTION = "0", "1", "2"
# Texts are compared in characters first. Tokens are compared from so many characters before the first difference, because
# a token may contain it.
_OVERLAP = 256
# A chat whose text is longer is not rendered again. Nor are tokens compared where more characters follow the first
# difference: then the state was kept when an earlier prompt of this chat ended there.
_LONGEST, _LONGEST_REST = 2**20, 2**14
_MAX_BEGINNINGS = 64


class ChatPrompt(NamedTuple):
    """The prompt of a chat.

    Attributes:
        messages: The messages, as the template takes them.
        variables: What else the template takes, for instance tools.
        text: What the template has written.
        tokens: The text's tokens.
        tools: The functions that it offers to the model.
    """

    messages: Messages
    variables: Mapping[str, Any]
    text: str
    tokens: Sequence[int]
    tools: tuple[Function, ...] = ()


class ChatCheckpoints:
    """Finds the offsets into prompts at which later chats part from them: `SamplingParams.checkpoint_at`.

    It remembers the tokens of the last beginnings that it has seen, which are instructions with their tools.
    """

    def __init__(self, render: Render, encode: Encode, beginnings: Beginnings | None = None) -> None:
        """Makes a finder that renders and encodes on one caller's account.

        `beginnings` are those that it remembers, which several may share; None makes an empty memory.
        """
        self._render, self._encode = render, encode
        self._beginnings: Beginnings = OrderedDict() if beginnings is None else beginnings

    async def offsets(self, prompt: ChatPrompt) -> tuple[int, ...]:
        """Returns the offsets, in tokens, in rising order. It costs up to three further renderings, usually one.

        There are none where the template refuses a chat like those that may follow, where the server is too busy for it,
        or if the prompt has more than 2**20 characters.
        """
        if len(prompt.text) > _LONGEST:
            return ()
        found = set()
        for find in (self._of_beginning, self._of_next_turn):
            try:
                found.add(await find(prompt))
            except Refusal:
                continue
        return tuple(sorted(found - {0}))

    async def _of_beginning(self, prompt: ChatPrompt) -> int:
        """Returns how many tokens all prompts with the same instructions and tools share."""
        is_instruction = [one.get("role") in ("system", "developer") for one in prompt.messages]
        count = [*is_instruction, False].index(False)
        instructions = prompt.messages[:count]
        key = await asyncio.to_thread(_digest, instructions, prompt.variables)
        if key not in self._beginnings:
            self._beginnings[key] = await self._beginning(instructions, prompt.variables)
            if len(self._beginnings) > _MAX_BEGINNINGS:
                self._beginnings.popitem(last=False)
        self._beginnings.move_to_end(key)
        return _shared_tokens(self._beginnings[key], prompt.tokens)

    async def _beginning(self, instructions: Messages, variables: Mapping[str, Any]) -> np.ndarray:
        """Returns the tokens of what the template writes before the user's first word."""
        try:
            asked = [{"role": "user", "content": text} for text in (_QUESTION, _OTHER_QUESTION)]
            first, second = [await self._render([*instructions, one], variables) for one in asked]
        except Refusal as refusal:
            if refusal.status != 400:  # The server is too busy now, and may have time later.
                raise
            return np.zeros(0, np.int32)
        return np.asarray(await self._encode(first[: shared_characters(first, second)]), np.int32)

    async def _of_next_turn(self, prompt: ChatPrompt) -> int:
        """Returns how many tokens the chat's prompt will share with this one when the user has said something new."""
        messages = list(prompt.messages)
        while messages and messages[-1].get("role") == "assistant":
            messages.pop()
        answered = [*messages, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _QUESTION}]
        later, text, tokens = await self._render(answered, prompt.variables), prompt.text, prompt.tokens
        same = shared_characters(text, later)
        if len(text) - same > _LONGEST_REST:
            return 0
        begin = max(0, same - _OVERLAP)
        now, then = [await self._encode(part) for part in (text[begin:], later[begin : same + _OVERLAP])]
        rest = len(now) - _shared_tokens(now, then)
        if list(now[len(now) - rest :]) != list(tokens[len(tokens) - rest :]):
            return 0  # The tokens of a text's end are not the end of its tokens.
        return len(tokens) - rest


def _digest(instructions: Messages, variables: Mapping[str, Any]) -> bytes:
    return hashlib.sha256(json.dumps([instructions, variables], sort_keys=True).encode()).digest()


def shared_characters(first: str, second: str) -> int:
    """Returns the number of characters that two texts begin with alike."""
    same, end = 0, min(len(first), len(second))
    while same < end:
        middle = (same + end + 1) // 2
        if first[same:middle] == second[same:middle]:
            same = middle
        else:
            end = middle - 1
    return same


def _shared_tokens(first: Sequence[int] | np.ndarray, second: Sequence[int]) -> int:
    """Returns the number of tokens that two sequences begin with alike."""
    length = min(len(first), len(second))
    differ = np.asarray(first[:length], np.int64) != np.asarray(second[:length], np.int64)
    return int(np.argmax(differ)) if differ.any() else length
