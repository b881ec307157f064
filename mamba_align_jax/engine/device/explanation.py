"""What an engine has chosen for its model and device, why, and what fits: for `Engine.explain` and `mamba-align info`."""

import ctypes
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.device.model_facts import ModelFacts
from mamba_align_jax.engine.device.sizing import DeviceMemory, PoolSizes


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What an engine has chosen, and what fits on one device.

    Attributes:
        device: The device's kind, as JAX names it.
        device_bytes: Bytes of the whole device's memory; None if it is not known.
        client_bytes: Bytes that JAX may use of them; None for a CPU.
        weight_bytes: Bytes of the weights.
        scratch_bytes: Bytes that are left for what a step needs besides.
        state_bytes: Bytes of the pool of states.
        page_bytes: Bytes of the pool of KV pages.
        state_block_bytes: Bytes of one state.
        token_bytes: Bytes of the keys and values of one token.
        cached_tokens: Number of tokens whose keys and values fit.
        cached_states: Number of states that fit.
        longest_requests: Number of requests of `max_model_len` tokens that fit at once.
        chosen: The fields of the configuration that were left out, each with its value and why.
    """

    device: str
    device_bytes: int | None
    client_bytes: int | None
    weight_bytes: int
    scratch_bytes: int
    state_bytes: int
    page_bytes: int
    state_block_bytes: int
    token_bytes: int
    cached_tokens: int
    cached_states: int
    longest_requests: int
    chosen: Mapping[str, tuple[Any, str]]

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        reasons: Mapping[str, str],
        align: AlignConfig,
        sizes: PoolSizes,
        memory: DeviceMemory,
        facts: ModelFacts,
        scratch: int,
    ) -> "Explanation":
        """Explains an engine's sizes.

        Args:
            config: The configuration, complete.
            reasons: Why each field is what it is that was chosen.
            align: How states are kept.
            sizes: The sizes of the pools.
            memory: The memory of the device with the least.
            facts: The sizes of the model.
            scratch: Bytes that are left for what a step needs.
        """
        states, tokens = sizes.state_blocks - 1, (sizes.kv_pages - 1) * config.kv_page_size
        return cls(
            device=memory.kind,
            device_bytes=None if memory.limit is None else device_bytes(),
            client_bytes=memory.limit,
            weight_bytes=facts.weight_bytes,
            scratch_bytes=scratch,
            state_bytes=sizes.state_blocks * sizes.state_block_bytes,
            page_bytes=sizes.kv_pages * sizes.kv_page_bytes,
            state_block_bytes=sizes.state_block_bytes,
            token_bytes=sizes.kv_page_bytes // config.kv_page_size,
            cached_tokens=tokens,
            cached_states=states,
            longest_requests=min(states, tokens // align.max_model_len, config.max_num_seqs),
            chosen={name: (getattr(config, name), reason) for name, reason in reasons.items()},
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON takes them."""
        return asdict(self) | dict(chosen={name: dict(value=v, why=why) for name, (v, why) in self.chosen.items()})

    def lines(self) -> list[tuple[str, str]]:
        """Returns what a person reads: names and values."""
        client = "unknown" if self.client_bytes is None else _gigabytes(self.client_bytes)
        if self.client_bytes is not None and self.device_bytes:
            client += f", {self.client_bytes / self.device_bytes:.0%} of the device's {_gigabytes(self.device_bytes)}"
        states = f"{self.cached_states:,} of {self.state_block_bytes:,} bytes"
        tokens = f"{self.cached_tokens:,} tokens of {self.token_bytes:,} bytes"
        return [
            ("device", self.device),
            ("memory of JAX", client),
            ("weights", _gigabytes(self.weight_bytes)),
            ("left for steps", _gigabytes(self.scratch_bytes)),
            ("states", f"{_gigabytes(self.state_bytes)}: {states}"),
            ("keys and values", f"{_gigabytes(self.page_bytes)}: {tokens}"),
            ("longest requests", f"{self.longest_requests:,} fit at once"),
            *((name, f"{value} ({why})") for name, (value, why) in self.chosen.items()),
        ]

    def __str__(self) -> str:
        """Returns the lines as a table."""
        lines = self.lines()
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def device_bytes() -> int | None:
    """Returns the bytes of the first GPU's whole memory, which JAX does not report; None without NVIDIA's driver."""
    total, device = ctypes.c_size_t(), ctypes.c_int()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0)
        failed = failed or cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    except (OSError, AttributeError):
        return None
    return None if failed else total.value


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
