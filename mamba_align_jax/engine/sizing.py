"""What an engine's configuration means for a model: its `AlignConfig`, and how many blocks and pages fit."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.engine.config import EngineConfig


@dataclass(frozen=True)
class PoolSizes:
    """Blocks and pages, the NULL ones included, and the bytes of each."""

    state_blocks: int
    kv_pages: int
    state_block_bytes: int
    kv_page_bytes: int


def align_config(config: EngineConfig, model: Any) -> AlignConfig:
    """How the model's states are kept.

    Raises:
        ValueError: `max_model_len` exceeds the model's.
    """
    limit = model.config.max_position_embeddings
    max_model_len = config.max_model_len or limit
    if max_model_len > limit:
        raise ValueError(f"max_model_len must be at most the model's {limit}, got {max_model_len}")
    return AlignConfig(
        groups=model.state_groups(config.state_dtype),
        block_size=config.block_size,
        num_speculative_tokens=config.num_speculative_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        mode=config.prefix_cache,
        policy=config.policy,
        checked=config.checked,
    )


def free_bytes(device: jax.Device) -> int | None:
    """Unused memory of a device; None where it doesn't say (a CPU)."""
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def pool_sizes(spec: AlignConfig, config: EngineConfig, model: Any, devices: Sequence[jax.Device] = ()) -> PoolSizes:
    """The configured sizes, or as many as fit: one state block for every `block_size` tokens of pages.

    Of several devices, the one with the least memory left decides; the first of all if none are given.

    Raises:
        ValueError: a pool is too small for one request.
    """
    kv = model.kv_spec(draft=True) if config.drafts_with_head else model.kv_spec()
    page_bytes = kv.bytes_per_page(config.kv_page_size)
    each = spec.blocks_per_request(config.steps_in_flight)
    running = config.max_num_seqs * each
    tokens_per_block = spec.max_model_len if spec.mode == "none" else spec.block_size
    pages_per_block = -(-tokens_per_block // config.kv_page_size)
    free = map(free_bytes, devices or jax.devices()[:1])
    available = min((size for size in free if size is not None), default=None)
    if available is None:
        columns = 4 * config.max_num_seqs * math.ceil(spec.max_model_len / tokens_per_block)
    else:
        budget = int(config.memory_fraction * available) - running * spec.bytes_per_block
        columns = max(budget, 0) // (spec.bytes_per_block + pages_per_block * page_bytes)
    blocks = config.num_state_blocks or 1 + running + (0 if spec.mode == "none" else columns)
    pages = config.num_kv_pages or 1 + columns * pages_per_block
    if blocks < 1 + each:
        raise ValueError(f"num_state_blocks must be at least {1 + each} for one request, got {blocks}")
    if pages < 2:
        raise ValueError(f"num_kv_pages must be at least 2, got {pages}")
    return PoolSizes(blocks, pages, spec.bytes_per_block, page_bytes)
