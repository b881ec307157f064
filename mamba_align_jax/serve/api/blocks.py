"""A reply as blocks in the order in which they come: what Anthropic's API and OpenAI's Responses are made of."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from mamba_align_jax.serve.replies.parts import Call, Content, Part, Reasoning

REASONING, TEXT, CALL = "reasoning", "text", "call"


@dataclass
class Block:
    """A block of a reply.

    Attributes:
        kind: REASONING, TEXT or CALL.
        text: The text so far; of a call, its arguments.
        name: The called function; empty if it is no call.
    """

    kind: str
    text: str = ""
    name: str = ""


class Change(NamedTuple):
    """What has happened to a block.

    Attributes:
        kind: "opened", "grown" or "closed".
        index: The block's number.
        text: The text that is new, if it has grown.
    """

    kind: str
    index: int
    text: str = ""


@dataclass
class Blocks:
    """The blocks of a reply, as far as it has come. Neighbouring pieces of one kind are one block."""

    blocks: list[Block] = field(default_factory=list)
    _is_open: bool = False

    def add(self, parts: Iterable[Part]) -> list[Change]:
        """Adds parts, and returns what they change."""
        changes: list[Change] = []
        for part in parts:
            match part:
                case Reasoning(text):
                    changes += self._grow(REASONING, text)
                case Content(text):
                    changes += self._grow(TEXT, text)
                case Call(name, arguments):
                    changes += [*self.close(), *self._open(Block(CALL, name=name)), *self._grow(CALL, arguments)]
                    changes += self.close()
        return changes

    def close(self) -> list[Change]:
        """Closes the block that is open, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        return [Change("closed", len(self.blocks) - 1)]

    def _open(self, block: Block) -> list[Change]:
        self.blocks.append(block)
        self._is_open = True
        return [Change("opened", len(self.blocks) - 1)]

    def _grow(self, kind: str, text: str) -> list[Change]:
        if not text:
            return []
        changes = []
        if not self._is_open or self.blocks[-1].kind != kind:
            changes = [*self.close(), *self._open(Block(kind))]
        self.blocks[-1].text += text
        return [*changes, Change("grown", len(self.blocks) - 1, text)]
