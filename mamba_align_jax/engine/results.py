"""What a row's sampled tokens mean for its request: which of them count, whether it ends, and what is counted."""

from collections.abc import Sequence

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.request import Request
from mamba_align_jax.engine.runner import RowResult
from mamba_align_jax.engine.scheduler import Row
from mamba_align_jax.engine.stats import Counters


def _stops(params: SamplingParams, token: int, eos_token_id: int | None) -> bool:
    return token in params.stop_token_ids or (token == eos_token_id and not params.ignore_eos)


def tokens_up_to_end(request: Request, sampled: Sequence[int], eos_token_id: int | None) -> Sequence[int]:
    """Returns the sampled tokens up to the first that ends the request: a stop token, or the last one allowed."""
    ends = (
        number
        for number, token in enumerate(sampled, 1)
        if _stops(request.params, token, eos_token_id) or number == request.num_left
    )
    return sampled[: next(ends, None)]


def finish_reason(request: Request, eos_token_id: int | None) -> str | None:
    """Returns "stop" or "length" if the request's last token ends it; None if it goes on."""
    if _stops(request.params, request.tokens[-1], eos_token_id):
        return "stop"
    return None if request.num_left else "length"


def count_row(counters: Counters, row: Row, result: RowResult) -> None:
    """Adds a row's result to the counters, and its drafts to its request."""
    request = row.request
    if row.is_prefilling:
        counters.prefill_tokens += row.num_tokens
        if is_first_admission(row):
            counters.admit(len(request.prompt), request.num_cached)
        return
    num_accepted = len(result.tokens) - 1
    request.num_draft_tokens += result.num_drafts
    request.num_accepted_tokens += num_accepted
    counters.verify(result.num_drafts, num_accepted)


def is_first_admission(row: Row) -> bool:
    """Whether the row is the first of its request, before any preemption."""
    return row.enters and row.admission == 1
