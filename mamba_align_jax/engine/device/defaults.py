"""Chooses what an engine's configuration leaves out: the rules, and the measurements behind them.

A CPU gets small numbers. For a GPU the rules are these; rows are those of an H200 in `benchmarks/results`.

- Asynchronous stepping: of the 2.4 ms of a decode step of one row of a 4B model, the host takes 1.5 ms to start it
  (`start_us` in model.jsonl), while the device runs the step before.
- Mode "all" where every layer keeps the boundaries inside a chunk: a prompt then runs as one chunk, and hits what it shares
  with any earlier one. Under "align" its last boundary ends a chunk, so a prompt of 512 tokens takes two steps.
- Blocks of 64 tokens, the chunk of the prefill kernels, because a hit loses half a block on average. They are longer where
  writing a state for each block would take more than a thirtieth of a prompt's time, or where the states of one step's
  prompts would take a sixth of the pools.
- Pages of 64 tokens, which the rows of model.jsonl have, too.
- Up to 256 requests at once, as many as leave two thirds of the pools to what is cached.
- 8192 prompt tokens in a step. While requests decode, as many as delay them by 50 ms: 8192 of a 4B model give 104 ms between
  tokens at the 99th percentile, and 2048 give 33 (serving.jsonl).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.device.model_facts import ModelFacts
from mamba_align_jax.engine.device.sizing import DeviceMemory, align_config, without_interior
from mamba_align_jax.engine.model import ServedModel
from pallas_kernels import CHUNK_SIZE

# What a CPU gets.
_SMALL: Mapping[str, Any] = MappingProxyType(
    dict(prefix_cache="align", async_stepping=False, max_num_seqs=8, max_prefill_rows=4)
)
_SMALL_TOKENS, _SMALL_PAGE, _PAGE = 512, 16, 64
_PROMPT_TOKENS, _PREFILL_ROWS = 8192, 4
_MAX_DELAY_S = 0.05  # of decoding requests by the prompts of a step
_MIN_MIXED_TOKENS = 256
_SEQS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
_LONGEST_BLOCK = 1024
_SHORTEST_STEP_S = 0.002  # of a model whose time is that of its launches


class Speed(NamedTuple):
    """What a device reaches with prompts.

    Attributes:
        flops: Floating point operations per second.
        bandwidth: Bytes per second of its memory.
    """

    flops: float
    bandwidth: float


# By a part of the device's name. An H200 runs 4096 tokens of a 4B model in 50 ms (model.jsonl).
_SPEEDS: Mapping[str, Speed] = MappingProxyType(
    {"H200": Speed(500e12, 4.2e12), "H100": Speed(450e12, 2.9e12), "A100": Speed(180e12, 1.7e12)}
)
_SLOWEST = Speed(50e12, 0.7e12)


def speed_of(kind: str) -> Speed:
    """Returns the speed of a kind of device, as JAX names it. Unknown ones are taken to be slow."""
    return next((speed for name, speed in _SPEEDS.items() if name in kind), _SLOWEST)


def scratch_bytes(config: EngineConfig, model: ServedModel, facts: ModelFacts) -> int:
    """Returns what a step needs besides weights and pools at most, with the sizes of a configuration that is complete.

    These are the activations of its prompt tokens, at most four of the widest at a time, and its rows' logits, of which
    sampling has four copies.
    """
    activations = 4 * config.max_num_batched_tokens * facts.widest * 2
    rows = config.max_num_seqs * (1 + config.num_speculative_tokens) + config.max_prefill_rows
    return activations + 4 * rows * model.config.vocab_size * 4


def complete(
    config: EngineConfig, model: ServedModel, facts: ModelFacts, memory: DeviceMemory, *, drafts_on_host: bool = False
) -> tuple[EngineConfig, dict[str, str]]:
    """Chooses what a configuration leaves out.

    It depends on the model and on the device's kind and size alone, so equal devices get equal configurations.

    Args:
        config: The configuration. What it has stays.
        model: The model, or one device's share of it.
        facts: Its sizes.
        memory: The device's memory.
        drafts_on_host: Whether a drafter on the host was given, which needs synchronous steps.

    Returns:
        The configuration, and why each field is what it is that was chosen.

    Raises:
        ValueError: What is given leaves no choice.
    """
    chosen = _Choices(config)
    if memory.limit is None:
        small = dict(_SMALL, max_num_batched_tokens=max(_SMALL_TOKENS, config.max_mixed_tokens or 0))
        for name, value in small.items():
            chosen.put(name, value, "the device is a CPU")
        _choose_blocks(chosen, _SMALL_PAGE, "the device is a CPU")
        chosen.put("max_mixed_tokens", chosen.config.max_num_batched_tokens, "as for other steps")
        return chosen.config, chosen.reasons
    speed = speed_of(memory.kind)
    why = "the drafter runs on the host" if drafts_on_host else "the device then never waits for the host"
    chosen.put("async_stepping", not drafts_on_host, why)
    lossy = without_interior(model)
    why = (
        f"{', '.join(lossy)} keep no boundaries inside a chunk"
        if lossy
        else "prompts hit what they share with any other"
    )
    chosen.put("prefix_cache", "align" if lossy else "all", why)
    chosen.put("max_prefill_rows", _PREFILL_ROWS, "more of them make long prompts slower")
    _choose_tokens(chosen, facts, speed)
    _choose_blocks(chosen, _PAGE, "attention of many rows is fast with it")
    if config.block_size is None:
        _lengthen_blocks(chosen, model, facts, speed, memory)
    _choose_seqs(chosen, model, facts, memory)
    return chosen.config, chosen.reasons


class _Choices:
    """A configuration that is being completed, and why each chosen field is what it is."""

    def __init__(self, config: EngineConfig) -> None:
        self.config, self.reasons = config, dict[str, str]()

    def put(self, name: str, value: Any, why: str) -> None:
        """Chooses a field, unless it is given."""
        if getattr(self.config, name) is None:
            self.config = replace(self.config, **{name: value})
            self.reasons[name] = why


def _choose_tokens(chosen: _Choices, facts: ModelFacts, speed: Speed) -> None:
    if chosen.config.max_num_batched_tokens is not None:
        chosen.put("max_mixed_tokens", chosen.config.max_num_batched_tokens, "as for other steps")
        return
    left = max(_MAX_DELAY_S - facts.weight_bytes / speed.bandwidth, 0.0)
    fits = int(left * speed.flops / (2 * max(facts.active_weights, 1)))
    mixed = min(max(2 ** max(fits, 1).bit_length() // 2, _MIN_MIXED_TOKENS), _PROMPT_TOKENS)
    why = f"they delay decoding requests by about {1000 * _MAX_DELAY_S:.0f} ms at most on this device"
    chosen.put("max_mixed_tokens", mixed, why)
    chosen.put("max_num_batched_tokens", max(_PROMPT_TOKENS, chosen.config.max_mixed_tokens), "where nothing decodes")


def _choose_blocks(chosen: _Choices, page: int, why: str) -> None:
    """Chooses the smallest blocks and the pages. Whichever is given decides the other."""
    config = chosen.config
    if config.block_size is not None:
        chosen.put("kv_page_size", math.gcd(page, config.block_size), why)
        return
    fold = config.fold_length if config.policy == "deferred" else 1
    size = math.lcm(CHUNK_SIZE, config.kv_page_size or 1, fold)
    size *= -(-(1 + config.num_speculative_tokens) // size)
    if config.checkpoint_interval is not None:
        size = math.gcd(size, config.checkpoint_interval)
    chosen.put("kv_page_size", math.gcd(page, size), why)
    chosen.put("block_size", size, "a hit loses half a block on average")


def _lengthen_blocks(
    chosen: _Choices, model: ServedModel, facts: ModelFacts, speed: Speed, memory: DeviceMemory
) -> None:
    """Doubles the blocks that were chosen while their states cost too much time or memory."""
    config = chosen.config
    if config.prefix_cache != "all" or config.checkpoint_interval is not None:
        return
    block_bytes = _align(config, model).bytes_per_block
    write_s = block_bytes / speed.bandwidth
    token_s = max(2 * facts.active_weights / speed.flops, _SHORTEST_STEP_S / config.max_num_batched_tokens)
    pools = _pool_bytes(config, model, facts, memory)
    size = config.block_size
    while size < _LONGEST_BLOCK and (
        30 * write_s > size * token_s or 6 * block_bytes * config.max_num_batched_tokens > pools * size
    ):
        size *= 2
    if size != config.block_size:
        chosen.config = replace(config, block_size=size)
        chosen.reasons["block_size"] = (
            f"a state has {block_bytes:,} bytes, and smaller blocks would have too many of them"
        )


def _choose_seqs(chosen: _Choices, model: ServedModel, facts: ModelFacts, memory: DeviceMemory) -> None:
    if chosen.config.max_num_seqs is not None:
        return
    align = _align(chosen.config, model)
    held = align.blocks_per_request(chosen.config.steps_in_flight, max_chunk=0)
    of_one = held * align.bytes_per_block + align.ring_bytes_per_slot
    fits = (
        n for n in _SEQS if 3 * n * of_one <= _pool_bytes(replace(chosen.config, max_num_seqs=n), model, facts, memory)
    )
    count = next(fits, 1)
    why = "more at once are seldom faster" if count == _SEQS[0] else f"each holds {of_one:,} bytes of states"
    chosen.put("max_num_seqs", count, why)


def _align(config: EngineConfig, model: ServedModel) -> Any:
    """Returns how states are kept, whatever the number of requests."""
    return align_config(config if config.max_num_seqs else replace(config, max_num_seqs=1), model)


def _pool_bytes(config: EngineConfig, model: ServedModel, facts: ModelFacts, memory: DeviceMemory) -> float:
    """Returns the bytes that both pools may have on a device that holds nothing else."""
    if not config.max_num_seqs:
        config = replace(config, max_num_seqs=_SEQS[0])
    assert memory.limit is not None
    left = memory.limit - facts.weight_bytes - scratch_bytes(config, model, facts)
    return config.memory_fraction * max(left, 0)
