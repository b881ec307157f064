"""Describes serving load: sessions of random tokens, and the loops that say when each session begins.

A session is what one user sends, turn by turn. The prompt of a turn is everything said before it (the user's turns and the
engine's answers) followed by the turn's own tokens.
"""

import math
from dataclasses import dataclass, field

import numpy as np

Tokens = tuple[int, ...]
Session = tuple[Tokens, ...]  # the user's tokens in each turn


@dataclass(frozen=True, kw_only=True)
class PrefixRepetition:
    """Prompts that begin with a shared prefix and end with a suffix of their own. Each session has one turn.

    Prompts with the same prefix are sent one after another.

    Attributes:
        prefix: The number of tokens of each shared prefix.
        suffix: The number of tokens that only one prompt has.
        output: The number of tokens of each answer.
        prefixes: The number of different prefixes.
        prompts: The number of prompts.
    """

    prefix: int = 4096
    suffix: int = 128
    output: int = 512
    prefixes: int = 1
    prompts: int = 64
    name: str = field(default="prefix_repetition", init=False)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, prompt and answer."""
        return self.prefix + self.suffix + self.output

    @property
    def num_requests(self) -> int:
        """The number of requests in all sessions."""
        return self.prompts

    def sessions(self, vocab: int, seed: int) -> list[Session]:
        """Draws the sessions. Tokens are in [0, `vocab`); equal seeds give equal sessions."""
        rng = np.random.default_rng(seed)
        prefixes = [_draw(rng, self.prefix, vocab) for _ in range(self.prefixes)]
        owners = [number * self.prefixes // self.prompts for number in range(self.prompts)]
        return [(prefixes[owner] + _draw(rng, self.suffix, vocab),) for owner in owners]


@dataclass(frozen=True, kw_only=True)
class MultiTurn:
    """Conversations: the prompt of each turn is the previous prompt, its answer and some new tokens.

    Attributes:
        conversations: The number of sessions.
        turns: The number of turns of each session.
        first: The number of tokens of the first prompt.
        turn: The number of new tokens of each later turn.
        output: The number of tokens of each answer.
    """

    conversations: int = 16
    turns: int = 8
    first: int = 1024
    turn: int = 128
    output: int = 256
    name: str = field(default="multi_turn", init=False)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, prompt and answer."""
        return self.first + (self.turns - 1) * self.turn + self.turns * self.output

    @property
    def num_requests(self) -> int:
        """The number of requests in all sessions."""
        return self.conversations * self.turns

    def sessions(self, vocab: int, seed: int) -> list[Session]:
        """Draws the sessions. Tokens are in [0, `vocab`); equal seeds give equal sessions."""
        rng = np.random.default_rng(seed)
        sizes = [self.first, *[self.turn] * (self.turns - 1)]
        return [tuple(_draw(rng, size, vocab) for size in sizes) for _ in range(self.conversations)]


Workload = PrefixRepetition | MultiTurn


def _draw(rng: np.random.Generator, size: int, vocab: int) -> Tokens:
    return tuple(rng.integers(0, vocab, size).tolist())


@dataclass(frozen=True)
class ClosedLoop:
    """Keeps `concurrency` sessions open: the next session begins when one ends."""

    concurrency: int
    name: str = field(default="closed", init=False)

    def due(self, sessions: int) -> list[float]:
        """When each session begins, in seconds; infinity means that it begins when another session ends."""
        return [0.0 if number < self.concurrency else math.inf for number in range(sessions)]


@dataclass(frozen=True)
class OpenLoop:
    """Begins sessions at random times, `rate` a second on average (a Poisson process), however many are open."""

    rate: float
    seed: int = 0
    name: str = field(default="open", init=False)

    def due(self, sessions: int) -> list[float]:
        """When each session begins, in seconds."""
        return np.cumsum(np.random.default_rng(self.seed).exponential(1 / self.rate, sessions)).tolist()


Loop = ClosedLoop | OpenLoop
