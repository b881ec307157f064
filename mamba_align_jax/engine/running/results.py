"""What a row's sampled tokens mean for its request: which of them count, whether it ends, and what is counted."""

from collections.abc import Sequence
from functools import partial

from mamba_align_jax.engine.device.read_step import RowResult
from mamba_align_jax.engine.scheduling.request import EndTokens, Request
from mamba_align_jax.engine.scheduling.scheduler import Row
from mamba_align_jax.engine.scheduling.stats import Counters
from mamba_align_jax.engine.text.generated_text import GeneratedText


def tokens_up_to_end(
    request: Request, sampled: Sequence[int], eos_token_id: EndTokens
) -> tuple[Sequence[int], str | None]:
    """Returns the sampled tokens up to the first that ends the request, and why it ends.

    The reason is "stop" for a stop token or a stop string, "length" for the last token that is allowed, and None if the
    request goes on.

    Raises:
        Exception: The tokenizer's, for a request with stop strings.
    """
    if sampled and request.num_left == 0:
        # Nothing was to be generated. The prompt has run.
        return (), "length"
    num_left, text = request.num_left, request.read_text() if request.params.stop else None
    for number, token in enumerate(sampled, 1):
        reason = _end_reason(request, token, num_left - number, eos_token_id)
        if text:
            read = text.read_stop_token if reason == "stop" else partial(text.read, (token,))
            text = request.text = request.read(read)
            reason = _reason_in_text(request, text, reason)
        if reason:
            return sampled[:number], reason
    return sampled, None


def end_reason(request: Request, eos_token_id: EndTokens) -> str | None:
    """Returns why a request has ended by the tokens that it has: see `tokens_up_to_end`, also for what it raises."""
    if len(request.tokens) == len(request.prompt):
        return None
    reason = _end_reason(request, request.tokens[-1], request.num_left, eos_token_id)
    text = request.read_text(has_stop_token=reason == "stop") if request.params.stop else None
    return _reason_in_text(request, text, reason) if text else reason


def _reason_in_text(request: Request, text: GeneratedText, reason: str | None) -> str | None:
    # With the last token, the text ends in a character that may be part of a stop string.
    return "stop" if (request.read(text.ended) if reason else text).found is not None else reason


def _end_reason(request: Request, token: int, num_left: int, eos_token_id: EndTokens) -> str | None:
    """Returns why a request ends at a generated token, after which `num_left` more are allowed."""
    if token in request.params.stop_token_ids or request.ends_at(token, eos_token_id):
        return "stop"
    return "length" if num_left == 0 else None


def count_row(counters: Counters, row: Row, result: RowResult) -> bool:
    """Adds a row's result to the counters, and its drafts to its request. Returns whether it is its request's first result.

    A request whose step was cut off is admitted again before it has a result.
    """
    request, is_first = row.request, not row.request.is_counted
    if is_first:
        counters.admit(len(request.prompt), request.num_cached)
        request.is_counted = True
    if row.is_prefilling:
        counters.add(prefill_tokens=row.num_tokens)
    elif result.num_drafts:
        num_accepted = len(result.tokens) - 1
        request.num_draft_tokens += result.num_drafts
        request.num_accepted_tokens += num_accepted
        counters.verify(result.num_drafts, num_accepted)
    return is_first
