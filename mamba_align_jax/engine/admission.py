"""Which requests an engine takes: those that can run on it some time."""

from collections.abc import Sequence

from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.engine.config import EngineConfig, SamplingParams


def check_request(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    config: EngineConfig,
    cache: HybridCache,
    vocab_size: int,
    max_model_len: int,
) -> None:
    """Checks that a request can run once it has the engine for itself.

    Args:
        prompt: The prompt's tokens.
        params: How it is sampled.
        config: The engine's configuration.
        cache: The engine's cache.
        vocab_size: Number of the model's tokens.
        max_model_len: Number of tokens of the longest sequence.

    Raises:
        ValueError: The request is empty, too long for the model or the pools, has tokens outside the vocabulary, or
            wants more draft tokens than the engine makes.
    """
    if not prompt:
        raise ValueError("prompt_token_ids must not be empty")
    outside = next((t for t in (*prompt, *params.stop_token_ids) if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise ValueError(f"prompt_token_ids and stop_token_ids must be in [0, {vocab_size}), got {outside}")
    max_drafts, wanted = config.num_speculative_tokens, params.num_speculative_tokens
    if (wanted or 0) > max_drafts:
        raise ValueError(f"num_speculative_tokens must be at most the engine's {max_drafts}, got {wanted}")
    length = len(prompt) + params.max_tokens
    if length > max_model_len:
        raise ValueError(
            f"prompt_token_ids and max_tokens must fit in max_model_len = {max_model_len}, "
            f"got {len(prompt)} + {params.max_tokens}"
        )
    num_pages = cache.kv.pool.num_blocks - 1
    if cache.kv.pages_for(length) > num_pages:
        raise ValueError(
            f"prompt_token_ids and max_tokens must fit in {num_pages} KV pages of {config.kv_page_size}, "
            f"got {length} tokens"
        )
