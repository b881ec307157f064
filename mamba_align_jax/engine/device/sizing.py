"""What an engine's configuration means for a model: its `AlignConfig`, and how many blocks and pages fit."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from mamba_align_jax import _values as values
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.drafting.protocols import DeviceDrafter
from mamba_align_jax.engine.model import ServedModel
from mamba_align_jax.kv import KVSpec
from pallas_kernels import CHUNK_SIZE, UnsupportedError

# At least, a step's bytes for each token: where it is in its row, its sequence and the pages.
_TOKEN_BYTES = 32
# The bytes of a free id in a list of Python.
_ID_BYTES = 36


@dataclass(frozen=True)
class PoolSizes:
    """The sizes of both pools on one device.

    Attributes:
        state_blocks: Number of state blocks, NULL_BLOCK included.
        kv_pages: Number of KV pages, the NULL page included.
        state_block_bytes: Bytes of one state block in all groups and layers.
        kv_page_bytes: Bytes of one KV page in all layers.
    """

    state_blocks: int
    kv_pages: int
    state_block_bytes: int
    kv_page_bytes: int


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of the device that has the least, as JAX reports it.

    Attributes:
        kind: The device's kind, as JAX names it.
        limit: Bytes that JAX may use; None if the device reports none, as a CPU.
        free: Those that nothing uses yet; None as for `limit`.
    """

    kind: str
    limit: int | None = None
    free: int | None = None

    @classmethod
    def of(cls, devices: Sequence[jax.Device] = ()) -> "DeviceMemory":
        """Reads the memory of the devices, or of JAX's first one if there are none."""
        found = [(device.device_kind, device.memory_stats() or {}) for device in devices or jax.devices()[:1]]
        kind, stats = min(found, key=lambda each: each[1].get("bytes_limit", math.inf))
        if "bytes_limit" not in stats:
            return cls(kind)
        return cls(kind, stats["bytes_limit"], min(s["bytes_limit"] - s.get("bytes_in_use", 0) for _, s in found))


def without_interior(model: ServedModel) -> list[str]:
    """Returns the layers of a model that keep no boundaries inside a chunk. A model that does not say is taken to be one."""
    return model.without_interior() if hasattr(model, "without_interior") else [type(model).__name__]


def align_config(config: EngineConfig, model: ServedModel) -> AlignConfig:
    """Returns how the model's states are kept. The model already has the layouts of the configuration.

    Raises:
        ValueError: `max_model_len` exceeds the model's limit, or the model's states can't be deferred.
        UnsupportedError: The mode is "all", and a layer keeps no boundaries inside a chunk.
    """
    if config.prefix_cache == "all":
        lossy = without_interior(model)
        if lossy:
            raise UnsupportedError(
                "prefix_cache must be 'align' or 'none' for layers that keep no boundaries inside a chunk, got 'all' and "
                f"{', '.join(lossy)}"
            )
    limit = model.config.max_position_embeddings
    max_model_len = config.max_model_len or limit
    values.require(max_model_len <= limit, "max_model_len", f"at most the model's {limit}", max_model_len)
    return AlignConfig(
        groups=model.state_groups(config.state_dtype),
        block_size=config.block_size,
        num_speculative_tokens=config.num_speculative_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        mode=config.prefix_cache,
        policy=config.policy,
        fold_length=config.fold_length,
        checked=config.checked,
    )


def pages_spec(model: ServedModel, drafter: DeviceDrafter | None = None) -> KVSpec:
    """Returns what a KV page holds for each token: the model's layers, then those of the drafter."""
    spec = model.kv_spec()
    return replace(spec, num_layers=spec.num_layers + (drafter.num_kv_layers if drafter else 0))


def pool_sizes(
    align: AlignConfig,
    config: EngineConfig,
    model: ServedModel,
    memory: DeviceMemory,
    *,
    drafter: DeviceDrafter | None = None,
    reserved_bytes: int = 0,
    steps_in_flight: int | None = None,
) -> PoolSizes:
    """Returns the configured sizes, or as many blocks and pages as fit.

    States and pages get the same number of bytes, unless running requests need more states. So whatever mixture is right for
    the traffic, at least half of it fits.

    Args:
        align: How states are kept.
        config: The engine's configuration, complete.
        model: The model, or one device's share of it.
        memory: The memory of the device with the least.
        drafter: The drafter on the device, which may keep layers of keys and values.
        reserved_bytes: Bytes of the free memory that the pools must leave: what a step needs, and weights that are not in
            the device's memory yet.
        steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread; None is the
            configuration's number.

    Raises:
        ValueError: A pool is too small for one request.
    """
    page_bytes = pages_spec(model, drafter).bytes_per_page(config.kv_page_size)
    # The chunks of one step share its tokens, and return the blocks of the boundaries inside them after its dispatch.
    unread = config.steps_in_flight if steps_in_flight is None else steps_in_flight
    held = align.blocks_per_request(unread, max_chunk=0)
    chunks = align.blocks_of_chunk(min(config.max_num_batched_tokens, align.max_model_len))
    running, blocks_per_request = config.max_num_seqs * held + chunks, held + chunks
    tokens_per_block = align.max_model_len if align.mode == "none" else align.block_size
    pages_per_block = -(-tokens_per_block // config.kv_page_size)
    if memory.free is None:
        columns = 4 * config.max_num_seqs * math.ceil(align.max_model_len / tokens_per_block)
        blocks = config.num_state_blocks or 1 + running + (0 if align.mode == "none" else columns)
        pages = config.num_kv_pages or 1 + columns * pages_per_block
    else:
        budget = int(config.memory_fraction * max(memory.free - reserved_bytes, 0)) - align.ring_bytes
        of_pages = min(budget // 2, budget - running * align.bytes_per_block) if page_bytes else 0
        if config.num_kv_pages is not None:
            of_pages = config.num_kv_pages * page_bytes
        fits = 0 if align.mode == "none" else (budget - of_pages) // align.bytes_per_block
        blocks = config.num_state_blocks or max(fits, 1 + running)
        left = max(budget - blocks * align.bytes_per_block, 0)
        pages = config.num_kv_pages or (left // page_bytes if page_bytes else blocks * pages_per_block)
    least = 1 + blocks_per_request
    values.require(blocks >= least, "num_state_blocks", f"at least {least} for one request", blocks)
    values.require(pages >= 2, "num_kv_pages", "at least 2", pages)
    return PoolSizes(blocks, pages, align.bytes_per_block, page_bytes)


def state_granularity(align: AlignConfig, config: EngineConfig, sizes: PoolSizes, steps_in_flight: int) -> int:
    """Returns how many tokens lie between the positions at which the cache may keep a state, a divisor of the block size.

    A hit at such a position ends with a page, and with a chunk of the prefill ops where blocks do: so the tokens after it
    run in the same chunks as without a hit. Only boundaries are left if the pool has no block more than one request needs.
    """
    longest = min(config.max_num_batched_tokens, align.max_model_len)
    least = 1 + align.blocks_per_request(steps_in_flight, max_chunk=longest)
    if align.mode == "none" or sizes.state_blocks <= least:
        return config.block_size
    return math.lcm(config.kv_page_size, math.gcd(config.block_size, CHUNK_SIZE))


def memory_bytes(devices: Sequence[jax.Device] = ()) -> int:
    """Returns all bytes of memory of the device that has the least, used or not: those of the host for a CPU.

    The device is JAX's first one if there are none.
    """
    limit = DeviceMemory.of(devices).limit
    return _host_bytes() if limit is None else limit


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(
    align: AlignConfig, config: EngineConfig, sizes: PoolSizes, vocab_size: int, devices: Sequence[jax.Device] = ()
) -> None:
    """Refuses sizes that can't be in memory whatever else is, before any memory is asked for.

    Args:
        align: How states are kept.
        config: The engine's configuration.
        sizes: The sizes of the pools.
        vocab_size: The number of tokens that the model knows.
        devices: As for `pool_sizes`.

    Raises:
        ValueError: The pools, the tables of all slots or the arrays of the largest step need more memory than there is.
    """
    logits = 4 * vocab_size
    pages = -(-align.max_model_len // config.kv_page_size)
    tables = 4 * (len(align.groups) * align.num_columns + pages)
    needed = {
        "num_state_blocks": (sizes.state_blocks, sizes.state_block_bytes),
        "num_kv_pages": (sizes.kv_pages, sizes.kv_page_bytes),
        "max_num_seqs": (config.max_num_seqs, tables + align.window * logits + align.ring_bytes_per_slot),
        "max_prefill_rows": (config.max_prefill_rows, logits),
        "max_num_batched_tokens": (config.max_num_batched_tokens, _TOKEN_BYTES),
    }
    ids = sizes.state_blocks + sizes.kv_pages + config.max_num_seqs + config.max_prefill_rows
    for limit, total in (
        (memory_bytes(devices), sum(count * size for count, size in needed.values())),
        (_host_bytes(), ids * _ID_BYTES),
    ):
        if total > limit:
            got = ", ".join(f"{name} = {count} of {size} bytes each" for name, (count, size) in needed.items())
            raise ValueError(f"the engine must fit in {limit} bytes of memory, got at least {total}: {got}")
