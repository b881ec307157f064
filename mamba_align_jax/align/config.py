"""Static description of a model's recurrent states: everything that shapes, bytes and columns follow from."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from mamba_align_jax._deprecated import renamed_fields
from mamba_align_jax.align.columns import blocks_per_request
from mamba_align_jax.align.policy import POLICIES


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _itemsize(dtype: str) -> int:
    sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
    if dtype not in sizes:
        raise ValueError(f"dtype must be one of {sorted(sizes)}, got {dtype!r}")
    return sizes[dtype]


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a name, a NumPy dtype or a JAX scalar type."""
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name


@dataclass(frozen=True)
class ConvState:
    """Window of a depthwise causal convolution: the last width-1 inputs, and one more row per speculative token.

    `layout` is "SD", [window, channels], or vLLM's other one, "DS", [channels, window], which the convolution's Triton
    kernels don't take.
    """

    width: int
    channels: int
    dtype: str = "bfloat16"
    layout: Literal["SD", "DS"] = "SD"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        _itemsize(self.dtype)
        if not 2 <= self.width <= 5 or self.channels < 1:
            raise ValueError(
                f"ConvState: width must be 2 to 5 and channels positive, got {self.width}, {self.channels}"
            )
        if self.layout not in ("SD", "DS"):
            raise ValueError(f"ConvState: layout must be 'SD' or 'DS', got {self.layout!r}")

    def block_shape(self, num_speculative_tokens: int) -> tuple[int, ...]:
        """Of one layer's block, in the order of `layout`."""
        window = self.width - 1 + num_speculative_tokens
        return (window, self.channels) if self.layout == "SD" else (self.channels, window)


@dataclass(frozen=True)
class RecurrentState:
    """State of one layer: [heads, value_dim, key_dim], or [heads, head_dim, state_dim] for Mamba."""

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "shape", tuple(self.shape))
        _itemsize(self.dtype)
        if len(self.shape) < 2 or min(self.shape) < 1:
            raise ValueError(f"RecurrentState: shape must have two axes or more, all positive, got {self.shape}")

    def block_shape(self, num_speculative_tokens: int) -> tuple[int, ...]:
        """The state's own shape: tokens that may be rejected have blocks of their own."""
        del num_speculative_tokens
        return self.shape


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share a block table and block ids."""

    name: str
    num_layers: int
    states: tuple[ConvState | RecurrentState, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(self.states))
        if self.num_layers < 1 or not self.states:
            raise ValueError(f"GroupSpec {self.name!r}: needs at least one layer and one state")
        other = next((state for state in self.states if not isinstance(state, ConvState | RecurrentState)), None)
        if other is not None:
            raise ValueError(f"GroupSpec {self.name!r}: states must be ConvState or RecurrentState, got {other!r}")


@renamed_fields(max_num_reqs="max_num_seqs")
@dataclass(frozen=True)
class AlignConfig:
    """How states are kept: what `StatePool`, `AlignState`, `BlockTables` and every step are made from.

    Attributes:
        groups: Layers that share block ids; most models have one group.
        block_size: Tokens between state boundaries.
        num_speculative_tokens: Draft tokens that a verify row may carry (K).
        max_num_seqs: Slots.
        max_model_len: Longest sequence in tokens, drafts included.
        mode: "align" keeps states at block boundaries; "none" keeps only the running state; "all" is "align" whose prefill
            chunks also keep the boundaries inside them (`align.interior.prefill_checkpoints`), and so may end anywhere.
        policy: "copy_free" reads from the old block and writes to the new; "pre_copy" copies at a crossing.
        checked: Whether `align.checked.StepChecker` verifies each step on the host, which waits for it: for debugging.
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    num_speculative_tokens: int = 0
    max_num_seqs: int = 8
    max_model_len: int = 4096
    mode: str = "align"
    policy: str = "copy_free"
    checked: bool = False
    state_block_size: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise ValueError("AlignConfig: groups must not be empty")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            raise ValueError(f"AlignConfig: groups must have distinct names, got {names}")
        for name, least in (
            ("block_size", 1),
            ("num_speculative_tokens", 0),
            ("max_num_seqs", 1),
            ("max_model_len", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"AlignConfig: {name} must be at least {least}, got {getattr(self, name)}")
        if self.mode not in ("none", "align", "all"):
            raise ValueError(f"AlignConfig: mode must be 'none', 'align' or 'all', got {self.mode!r}")
        if self.policy not in POLICIES:
            raise ValueError(f"AlignConfig: policy must be one of {sorted(POLICIES)}, got {self.policy!r}")
        if self.mode != "none" and self.block_size < self.num_speculative_tokens + 1:
            # A decode step could jump a whole column, and the boundary to save would have no block.
            raise ValueError(
                f"AlignConfig: block_size must be at least num_speculative_tokens + 1 = "
                f"{self.num_speculative_tokens + 1}, got {self.block_size}"
            )
        # Mode "none" is one block that no sequence outgrows: its boundary is never reached, so nothing is ever saved.
        size = self.max_model_len + 1 if self.mode == "none" else self.block_size
        object.__setattr__(self, "state_block_size", size)

    @property
    def window(self) -> int:
        """Columns that one step may write: the running one and one per draft."""
        return 1 + self.num_speculative_tokens

    @property
    def num_columns(self) -> int:
        """Columns of a block table's row."""
        return _ceil_div(self.max_model_len, self.state_block_size) + self.num_speculative_tokens

    def blocks_per_request(self, steps_in_flight: int = 0) -> int:
        """Blocks per group that a running request holds at most, prefix-cached ones aside."""
        if self.mode == "none":
            return self.window
        if self.mode == "all":
            # A chunk may keep a state in every column that it passes.
            return self.num_columns
        return blocks_per_request(self.block_size, self.num_speculative_tokens, steps_in_flight)

    def state_bytes_per_block(self, group: int, state: ConvState | RecurrentState) -> int:
        """Bytes of one block of one state of one group, all layers together."""
        shape = state.block_shape(self.num_speculative_tokens)
        return self.groups[group].num_layers * math.prod(shape) * _itemsize(state.dtype)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block in every group."""
        return sum(self.state_bytes_per_block(g, s) for g, group in enumerate(self.groups) for s in group.states)
