"""What a program can do when it samples. A step pays only for what one of its rows needs."""

from enum import IntEnum

from mamba_align_jax.engine.config import SamplingParams


class Level(IntEnum):
    """What a program can do when it samples. A program of one level can run every step of a lower level.

    Attributes:
        MOST_LIKELY: Every row takes its most likely token.
        DRAW: Rows draw tokens at random, for which the logits are read a dozen times.
        FULL: Rows have penalties, biases, `min_tokens` or `min_p`, or ask how likely their tokens are. The program takes
            and returns a `SamplerState`.
        CONSTRAINED: Rows have grammars. The host sends which tokens may follow.
        PROMPT: Rows ask how likely the tokens of their prompts are, for which the logits after every token are computed.
    """

    MOST_LIKELY = 0
    DRAW = 1
    FULL = 2
    CONSTRAINED = 3
    PROMPT = 4


def changes_logits(params: SamplingParams) -> bool:
    """Whether a request's logits are changed before a token is chosen."""
    penalties = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
    return bool(penalties or params.logit_bias or params.min_tokens or params.min_p)


def level_of(params: SamplingParams) -> Level:
    """Returns the lowest level that samples a request's tokens."""
    if params.grammar is not None:
        return Level.CONSTRAINED
    if changes_logits(params) or params.logprobs is not None:
        return Level.FULL
    return Level.DRAW if params.temperature > 0 else Level.MOST_LIKELY
