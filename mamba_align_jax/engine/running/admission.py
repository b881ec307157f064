"""Which requests an engine takes: those that can run on it some time."""

import copy
from collections.abc import Sequence
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.errors import FieldError

NUM_SEEDS = 2**31  # which fit the device's int32


def check_request(
    prompt: Any,
    params: Any,
    *,
    config: EngineConfig,
    cache: HybridCache,
    vocab_size: int,
    max_model_len: int,
    has_tokenizer: bool,
) -> tuple[tuple[int, ...], SamplingParams]:
    """Checks that a request can run once it has the engine for itself.

    Args:
        prompt: The prompt's tokens: a sequence of whole numbers, or an array of one axis.
        params: How it is sampled; None takes the defaults.
        config: The engine's configuration.
        cache: The engine's cache.
        vocab_size: Number of the model's tokens.
        max_model_len: Number of tokens of the longest sequence.
        has_tokenizer: Whether the engine has a tokenizer, which stop strings need.

    Returns:
        The prompt as plain numbers, and the parameters.

    Raises:
        ValueError: The request is no sequence of tokens, is empty, too long for the model or the pools, has tokens
            outside the vocabulary, wants more draft tokens than the engine makes, or has stop strings where there is no
            tokenizer.
    """
    params = SamplingParams() if params is None else params
    values.require(isinstance(params, SamplingParams), "params", "SamplingParams or None", params)
    # A prompt may be longer than the memory, so its length is looked at first.
    num_tokens = values.count("prompt_token_ids", prompt)
    length = num_tokens + params.max_tokens
    if num_tokens > max_model_len:
        raise _too_long(f"max_model_len = {max_model_len}", f"{num_tokens} + {params.max_tokens}")
    tokens = values.integers("prompt_token_ids", prompt, 0, vocab_size - 1)
    if not tokens:
        raise FieldError("prompt_token_ids", "not be empty", must="must")
    values.integers("stop_token_ids", params.stop_token_ids, 0, vocab_size - 1)
    values.require(has_tokenizer or not params.stop, "stop", "empty in an engine without a tokenizer", params.stop)
    values.integers("logit_bias", [token for token, _ in params.logit_bias], 0, vocab_size - 1)
    max_drafts, drafts = config.num_speculative_tokens, params.num_speculative_tokens
    wanted = f"at most the engine's {max_drafts}"
    values.require((drafts or 0) <= max_drafts, "num_speculative_tokens", wanted, drafts)
    if length > max_model_len:
        raise _too_long(f"max_model_len = {max_model_len}", f"{num_tokens} + {params.max_tokens}")
    num_pages = cache.kv.pool.num_blocks - 1
    if cache.kv.pages_for(length) > num_pages:
        raise _too_long(f"{num_pages} KV pages of {config.kv_page_size}", f"{length} tokens")
    return tokens, params


def _too_long(limit: str, got: str) -> FieldError:
    return FieldError("prompt_token_ids", f"fit in {limit}", got, "and max_tokens must")


def params_for(num_prompts: int, params: Any) -> Sequence[Any]:
    """Returns the parameters of each prompt, from one for all or from one for each. `check_request` checks them.

    Raises:
        ValueError: There are not as many as prompts.
    """
    if not isinstance(params, Sequence) or isinstance(params, str):
        return [params] * num_prompts
    values.require(len(params) == num_prompts, "params", f"one, or one for each of {num_prompts} prompts", len(params))
    return params


def seeded(params: Any, n: int) -> list[Any]:
    """Returns a set of parameters for each of the `n` outputs of a prompt.

    The first output has the seed of `params`, and each of the others has the seed after that of the output before. The seed
    after the largest one is 0.

    Raises:
        ValueError: `n` is not at least 1.
    """
    if values.integer("n", n, 1) == 1:
        return [params]
    params = SamplingParams() if params is None else params
    values.require(isinstance(params, SamplingParams), "params", "SamplingParams or None", params)
    return [with_seed(params, params.seed + number) for number in range(n)]


def with_seed(params: SamplingParams, seed: int) -> SamplingParams:
    """Returns the same parameters with another seed, of which the last 31 bits count.

    The other fields were checked when `params` was made. To check them again takes a millisecond if there are many biases.
    """
    return _with(params, "seed", seed % NUM_SEEDS)


def with_tenant(params: SamplingParams, tenant: str) -> SamplingParams:
    """Returns the same parameters for another tenant. The other fields are not checked again."""
    return _with(params, "tenant", values.text("tenant", tenant))


def _with(params: SamplingParams, field: str, value: Any) -> SamplingParams:
    other = copy.copy(params)
    object.__setattr__(other, field, value)
    return other
