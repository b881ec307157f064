"""Describes serving load: sessions of random tokens, and the loops that say when each session begins.

A session is what one user sends, turn by turn. The prompt of a turn is everything said before it (the user's turns and
the engine's answers) followed by the turn's own tokens. Every class here raises a ValueError for a number that is none,
and where there would be no session, no turn, or a prompt or an answer without tokens.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from mamba_align_jax import _values as values

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

    def __post_init__(self) -> None:
        _check(self, "PrefixRepetition", prefix=0, suffix=0, output=1, prefixes=1, prompts=1)
        wanted = "at least 1 without a prefix"
        values.require(self.prefix + self.suffix > 0, "PrefixRepetition: suffix", wanted, self.suffix)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, prompt and answer."""
        return self.prefix + self.suffix + self.output

    def sessions(self, vocab: int, seed: int) -> list[Session]:
        """Draws the sessions. Tokens are in [0, `vocab`); equal seeds, from 0 on, give equal sessions."""
        rng = _random(vocab, seed)
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

    def __post_init__(self) -> None:
        _check(self, "MultiTurn", conversations=1, turns=1, first=1, turn=0, output=1)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, prompt and answer."""
        return self.first + (self.turns - 1) * self.turn + self.turns * self.output

    def sessions(self, vocab: int, seed: int) -> list[Session]:
        """See `PrefixRepetition.sessions`."""
        rng = _random(vocab, seed)
        sizes = [self.first, *[self.turn] * (self.turns - 1)]
        return [tuple(_draw(rng, size, vocab) for size in sizes) for _ in range(self.conversations)]


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Agents with the same tools. An answer begins with reasoning, which the prompts of later turns leave out.

    So a turn's prompt is the previous prompt, the end of its answer and some new tokens, and what was computed of the
    answer is of no use to it. As a server does for chats, the client names the places where prompts part from each other
    (`SamplingParams.checkpoint_at`).

    Attributes:
        agents: The number of sessions.
        turns: The number of turns of each session.
        tools: The number of tokens of the instructions and tools with which all prompts begin.
        turn: The number of new tokens of each turn.
        reasoning: The number of tokens of each answer that later prompts leave out.
        answer: The number of tokens of each answer that later prompts contain.
    """

    agents: int = 8
    turns: int = 20
    tools: int = 6000
    turn: int = 200
    reasoning: int = 500
    answer: int = 100
    name: str = field(default="agents", init=False)

    def __post_init__(self) -> None:
        _check(self, "Agents", agents=1, turns=1, tools=1, turn=1, reasoning=0, answer=1)

    @property
    def output(self) -> int:
        """The number of tokens of each answer."""
        return self.reasoning + self.answer

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence, prompt and answer."""
        return self.tools + self.turns * (self.turn + self.answer) + self.reasoning

    def sessions(self, vocab: int, seed: int) -> list[Session]:
        """See `PrefixRepetition.sessions`."""
        rng = _random(vocab, seed)
        tools = _draw(rng, self.tools, vocab)
        turns = [[_draw(rng, self.turn, vocab) for _ in range(self.turns)] for _ in range(self.agents)]
        return [(tools + first, *others) for first, *others in turns]


Workload = PrefixRepetition | MultiTurn | Agents


def _check(load: object, kind: str, **minima: int) -> None:
    """Raises a ValueError if a field is no whole number or is less than its minimum."""
    for name, minimum in minima.items():
        values.integer(f"{kind}: {name}", getattr(load, name), minimum)


def _random(vocab: int, seed: int) -> np.random.Generator:
    values.integer("vocab", vocab, 1)
    return np.random.default_rng(values.integer("seed", seed, 0))


def _draw(rng: np.random.Generator, size: int, vocab: int) -> Tokens:
    return tuple(rng.integers(0, vocab, size).tolist())


@dataclass(frozen=True)
class ClosedLoop:
    """Keeps `concurrency` sessions open, at least 1: the next session begins when one ends."""

    concurrency: int
    name: str = field(default="closed", init=False)

    def __post_init__(self) -> None:
        _check(self, "ClosedLoop", concurrency=1)

    def due(self, sessions: int) -> list[float]:
        """When each session begins, in seconds; infinity means that it begins when another session ends."""
        return [0.0 if number < self.concurrency else math.inf for number in range(sessions)]


@dataclass(frozen=True)
class OpenLoop:
    """Begins sessions at random times, `rate` a second on average (a Poisson process), however many are open.

    The rate is greater than 0, and the seed at least 0.
    """

    rate: float
    seed: int = 0
    name: str = field(default="open", init=False)

    def __post_init__(self) -> None:
        limits = values.FLOAT32_MIN, values.FLOAT32_MAX
        values.number("OpenLoop: rate", self.rate, *limits, "finite and greater than 0")
        _check(self, "OpenLoop", seed=0)

    def due(self, sessions: int) -> list[float]:
        """When each session begins, in seconds."""
        return np.cumsum(np.random.default_rng(self.seed).exponential(1 / self.rate, sessions)).tolist()


Loop = ClosedLoop | OpenLoop
