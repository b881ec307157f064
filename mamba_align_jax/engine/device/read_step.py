"""Reads the result of a step in host memory: which tokens each row sampled, and what the step counted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from mamba_align_jax.align.config import AlignConfig, ConvState
from mamba_align_jax.engine.device.program import StepResult
from mamba_align_jax.engine.scheduling.request import TokenLogprobs
from mamba_align_jax.engine.scheduling.scheduler import Row


class RowResult(NamedTuple):
    """What the host has read of one row.

    Attributes:
        tokens: The tokens that it sampled, accepted drafts first.
        num_drafts: How many drafts it had.
        logprobs: The log-probabilities of the tokens, if the request asks for them.
        prompt_logprobs: Those of the prompt's tokens after the row's tokens, if the request asks for them.
    """

    tokens: list[int]
    num_drafts: int
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()


class ReadStep(NamedTuple):
    """The result of a step, in host memory.

    Attributes:
        rows: The result of each row. Rows that don't sample have no tokens.
        copied_bytes: Bytes of states that were copied between blocks in the step, just before it or just after it.
        null_reads: Number of rows whose state was lost.
    """

    rows: list[tuple[Row, RowResult]]
    copied_bytes: int
    null_reads: int

    @classmethod
    def of(cls, result: StepResult, places: Sequence[Row | None], align: AlignConfig) -> "ReadStep":
        """Reads a result in host memory, of a step that had these rows in its places."""
        columns = result.tokens.tolist(), result.counts.tolist(), result.drafts.tolist()
        rows = [
            (row, RowResult(sampled[: count if row.samples else 0], num_drafts))
            for row, sampled, count, num_drafts in zip(places, *columns, strict=True)
            if row is not None
        ]
        if result.scores is not None:
            rows = _with_logprobs(result, places, rows)
        given = [row.allocation for row, _ in rows]
        whole = sum((blocks.load is not None) + (blocks.save is not None) for blocks in given) * align.bytes_per_block
        return cls(rows, _copied_bytes(result.copies, align) + whole, int(result.null_reads))


def _copied_bytes(copies: Any, align: AlignConfig) -> int:
    """Returns the bytes of copied blocks, int32 [2, groups] as in `StepResult.copies`."""
    return sum(
        int(copies[int(isinstance(state, ConvState)), number]) * align.state_bytes_per_block(number, state)
        for number, group in enumerate(align.groups)
        for state in group.states
    )


def _with_logprobs(
    result: StepResult, places: Sequence[Row | None], rows: Sequence[tuple[Row, RowResult]]
) -> list[tuple[Row, RowResult]]:
    """Returns the results of the rows, in the order of their places, with the log-probabilities that they ask for."""
    found, begin = [], 0
    used = (place for place, row in enumerate(places) if row is not None)
    for place, (row, own) in zip(used, rows, strict=True):
        logprobs, of_prompt = _logprobs(result, row, place, own.tokens), _prompt_logprobs(result, row, begin)
        found.append((row, own._replace(logprobs=logprobs, prompt_logprobs=of_prompt)))
        begin += row.num_tokens
    return found


def _logprobs(result: StepResult, row: Row, place: int, tokens: Sequence[int]) -> Sequence[TokenLogprobs]:
    """Returns the log-probabilities of the tokens that a row sampled, if its request asks for them."""
    num_top = row.request.params.logprobs
    if num_top is None or result.scores is None:
        return ()
    return [result.scores.read((place, number), token, num_top) for number, token in enumerate(tokens)]


def _prompt_logprobs(result: StepResult, row: Row, begin: int) -> Sequence[TokenLogprobs]:
    """Returns the log-probabilities of the prompt's tokens after the row's tokens, which are packed from `begin` on."""
    num_top = row.request.params.prompt_logprobs
    if num_top is None or result.prompt is None or not row.scores_prompt:
        return ()
    following = row.request.prompt[row.start + 1 : row.start + 1 + row.num_tokens]
    return [result.prompt.read(begin + number, token, num_top) for number, token in enumerate(following)]
