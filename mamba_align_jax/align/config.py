"""The static description of a model's recurrent states, which determines all shapes, sizes and columns."""

import math
from dataclasses import dataclass, field
from typing import Literal

from mamba_align_jax import _values as values
from mamba_align_jax.align._fields import dtype_name, itemsize, set_fields
from mamba_align_jax.align.columns import blocks_per_request
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.align.ring import DeltaRuleRing, Mamba2Ring, Ring
from mamba_align_jax.errors import FieldError

# The layers that policy "deferred" serves, in messages.
HAVE_RINGS = "gated delta nets and Mamba-2"
_NEEDS_RING = f"have groups with a ring, which only {HAVE_RINGS} have"


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def check_fold_length(name: str, fold_length: int, num_speculative_tokens: int, block_size: int | bool) -> None:
    """Checks the length of a fold group, which the field `name` has. `block_size` is False if there are no boundaries.

    Raises:
        FieldError: A step could write entries that it reads, or a boundary would not be the end of a fold group.
    """
    doubled = 2 * num_speculative_tokens
    wanted = f"more than 2 * num_speculative_tokens = {doubled} under policy 'deferred'"
    values.require(fold_length > doubled, name, wanted, fold_length)
    wanted = f"divide block_size = {block_size} under policy 'deferred'"
    values.require(not block_size or block_size % fold_length == 0, name, wanted, fold_length, "must")


@dataclass(frozen=True)
class ConvState:
    """The window of a depthwise causal convolution: the last width - 1 inputs, and one more row per speculative token.

    Attributes:
        width: Taps of the convolution, 2 to 5.
        channels: Channels of the convolution.
        dtype: "float32", "bfloat16" or "float16".
        layout: "SD" for [window, channels], or "DS" for [channels, window].
    """

    width: int
    channels: int
    dtype: str = "bfloat16"
    layout: Literal["SD", "DS"] = "SD"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        itemsize(self.dtype)
        width, channels = (values.integer(f"ConvState: {name}", getattr(self, name)) for name in ("width", "channels"))
        set_fields(self, width=width, channels=channels)
        if not 2 <= width <= 5 or channels < 1:
            raise FieldError("ConvState: width", "2 to 5 and channels positive", f"{width}, {channels}")
        is_layout = isinstance(self.layout, str) and self.layout in ("SD", "DS")
        values.require(is_layout, "ConvState: layout", "'SD' or 'DS'", self.layout)

    def block_shape(self, num_speculative_tokens: int) -> tuple[int, ...]:
        """Returns the shape of one layer's block, in the order of `layout`."""
        window = self.width - 1 + num_speculative_tokens
        return (window, self.channels) if self.layout == "SD" else (self.channels, window)


@dataclass(frozen=True)
class RecurrentState:
    """The recurrent state of one layer.

    Attributes:
        shape: [heads, value_dim, key_dim], or [heads, head_dim, state_dim] for Mamba. It does not depend on `layout`.
        dtype: "float32", "bfloat16" or "float16".
        layout: "VK" if a block has this shape, or "KV" if its last two axes are swapped: [heads, key_dim, value_dim]. Only
            the gated delta rule takes "KV".
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: Literal["VK", "KV"] = "VK"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        set_fields(self, shape=values.integers("RecurrentState: shape", self.shape, -values.INT32_MAX))
        itemsize(self.dtype)
        wanted, is_shape = "have two axes or more, all positive", len(self.shape) >= 2 and min(self.shape) >= 1
        values.require(is_shape, "RecurrentState: shape", wanted, self.shape, "must")
        is_layout = isinstance(self.layout, str) and self.layout in ("VK", "KV")
        values.require(is_layout, "RecurrentState: layout", "'VK' or 'KV'", self.layout)

    def block_shape(self, num_speculative_tokens: int) -> tuple[int, ...]:
        """Returns the shape of one layer's block, in the order of `layout`.

        Drafts do not enlarge a block, because the state after each draft has its own block.
        """
        *heads, value_dim, key_dim = self.shape
        return self.shape if self.layout == "VK" else (*heads, key_dim, value_dim)


@dataclass(frozen=True)
class GroupSpec:
    """Layers that share a block table and block ids.

    Attributes:
        name: Distinct from the names of other groups.
        num_layers: Recurrent layers in the group.
        states: The states that each of these layers keeps.
        ring: The entries that each of them keeps under policy "deferred"; None if its states can't be deferred.
    """

    name: str
    num_layers: int
    states: tuple[ConvState | RecurrentState, ...]
    ring: Ring | None = None

    def __post_init__(self) -> None:
        num_layers = values.integer(f"GroupSpec {self.name!r}: num_layers", self.num_layers)
        states = values.members(f"GroupSpec {self.name!r}: states", self.states)
        set_fields(self, name=values.text("GroupSpec: name", self.name), num_layers=num_layers, states=states)
        if self.num_layers < 1 or not self.states:
            got = f"num_layers = {self.num_layers} and states = {self.states}"
            raise FieldError(f"GroupSpec {self.name!r}:", "have at least one layer and one state", got, "must")
        for state in self.states:
            values.instance(f"GroupSpec {self.name!r}: states", state, ConvState, RecurrentState)
        values.instance(f"GroupSpec {self.name!r}: ring", self.ring, DeltaRuleRing, Mamba2Ring, optional=True)

    def check_deferred(self) -> None:
        """Raises ValueError if the group's states can't be deferred."""
        recurrent = [state for state in self.states if isinstance(state, RecurrentState)]
        if self.ring is None:
            if recurrent:
                raise FieldError(
                    "AlignConfig: policy 'deferred'", _NEEDS_RING, f"group {self.name!r} without one", "must"
                )
            return
        shape = self.ring.state_shape
        if [(state.shape, state.layout) for state in recurrent] != [(shape, "VK")]:
            wanted = f"have one recurrent state {list(shape)} of layout 'VK' for the ring of group {self.name!r}"
            raise FieldError("AlignConfig: policy 'deferred'", wanted, str(recurrent), "must")


@dataclass(frozen=True)
class AlignConfig:
    """Describes how states are kept. `StatePool`, `AlignState`, `BlockTables` and every step are made from it.

    Attributes:
        groups: The groups of layers. Most models have one group.
        block_size: Tokens between state boundaries.
        num_speculative_tokens: The largest number of draft tokens in a verify row, K.
        max_num_seqs: Slots, that is the largest number of requests that run at once.
        max_model_len: The longest sequence in tokens, drafts included.
        mode: "align" keeps states at block boundaries. "none" keeps only the running state. "all" is "align" with
            prefill chunks that may pass boundaries and that also keep the boundaries inside them
            (`align.interior.prefill_checkpoints`).
        policy: "copy_free" reads from the old block and writes to the new one. "pre_copy" copies the state to the new
            block first, and reads and writes there. "deferred" writes an entry per token and a state per fold group.
        checked: True if `align.checked.StepChecker` verifies each step on the host. It waits for each step, so it is
            debugging only.
        fold_length: Tokens of a fold group, L, under policy "deferred". It divides `block_size`, except in mode "none",
            and is more than 2 * `num_speculative_tokens`.
        state_block_size: Tokens per column. It is `block_size`, except in mode "none", where it is `max_model_len` + 1.
    """

    groups: tuple[GroupSpec, ...]
    block_size: int
    num_speculative_tokens: int = 0
    max_num_seqs: int = 8
    max_model_len: int = 4096
    mode: str = "align"
    policy: str = "copy_free"
    checked: bool = False
    fold_length: int = 16
    state_block_size: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        groups, checked = (
            values.members("AlignConfig: groups", self.groups),
            values.flag("AlignConfig: checked", self.checked),
        )
        set_fields(self, groups=groups, checked=checked)
        for group in self.groups:
            values.require(isinstance(group, GroupSpec), "AlignConfig: groups", "GroupSpec each", group)
        if not self.groups:
            raise FieldError("AlignConfig: groups", "not be empty", must="must")
        names = [group.name for group in self.groups]
        values.require(len(set(names)) == len(names), "AlignConfig: groups", "have distinct names", names, "must")
        for name, minimum in (
            ("block_size", 1),
            ("num_speculative_tokens", 0),
            ("max_num_seqs", 1),
            ("max_model_len", 1),
            ("fold_length", 1),
        ):
            set_fields(self, **{name: values.integer(f"AlignConfig: {name}", getattr(self, name), minimum)})
        is_mode = isinstance(self.mode, str) and self.mode in ("none", "align", "all")
        values.require(is_mode, "AlignConfig: mode", "'none', 'align' or 'all'", self.mode)
        if self.mode == "none":
            values.integer("AlignConfig: max_model_len", self.max_model_len, 1, values.INT32_MAX - 1)
        is_policy = isinstance(self.policy, str) and self.policy in POLICIES
        values.require(is_policy, "AlignConfig: policy", f"one of {sorted(POLICIES)}", self.policy)
        # A decode step that jumped over a whole column would leave the boundary to save without a block.
        window = self.num_speculative_tokens + 1
        fits, wanted = self.block_size >= window, f"at least num_speculative_tokens + 1 = {window}"
        values.require(self.mode == "none" or fits, "AlignConfig: block_size", wanted, self.block_size)
        if self.is_deferred:
            size = self.mode != "none" and self.block_size
            check_fold_length("AlignConfig: fold_length", self.fold_length, self.num_speculative_tokens, size)
            for group in self.groups:
                group.check_deferred()
            has_ring = any(group.ring is not None for group in self.groups)
            values.require(has_ring, "AlignConfig: policy 'deferred'", _NEEDS_RING, names, "must")
        # In mode "none" a block is longer than any sequence. Its boundary is never reached, so nothing is ever saved.
        size = self.max_model_len + 1 if self.mode == "none" else self.block_size
        object.__setattr__(self, "state_block_size", size)

    @property
    def is_deferred(self) -> bool:
        """True if states are written per fold group instead of per token."""
        return self.policy == "deferred"

    @property
    def passes_boundaries(self) -> bool:
        """True if acceptance may pass a boundary inside a step's window, so that it must be kept there.

        Without drafts each step ends in its running column, so a boundary's state and window are in their column already.
        """
        return self.mode != "none" and self.num_speculative_tokens > 0

    @property
    def window(self) -> int:
        """The largest number of tokens in a verify row: a certain one and K drafts.

        It is also the number of columns that a step may write, except under policy "deferred", where that is one.
        """
        return 1 + self.num_speculative_tokens

    @property
    def num_columns(self) -> int:
        """The number of columns in a block table."""
        columns = _ceil_div(self.max_model_len, self.state_block_size)
        return columns if self.is_deferred else columns + self.num_speculative_tokens

    def blocks_per_request(self, steps_in_flight: int = 0, max_chunk: int | None = None) -> int:
        """Returns the largest number of blocks per group that a running request holds, apart from cached ones.

        Args:
            steps_in_flight: How many steps may be dispatched while the result of an earlier one is unread.
            max_chunk: The tokens of the longest chunk. It counts in mode "all" only. None for chunks of any length.
        """
        if self.mode == "none":
            return 1 if self.is_deferred else self.window
        if self.mode == "all" and max_chunk is None:
            return self.num_columns
        fold_length = self.fold_length if self.is_deferred else None
        held = blocks_per_request(self.block_size, self.num_speculative_tokens, steps_in_flight, fold_length)
        return held + self.blocks_of_chunk(max_chunk or 0)

    def blocks_of_chunk(self, num_tokens: int) -> int:
        """Returns how many blocks a chunk takes besides those of `blocks_per_request`: 0, except in mode "all".

        There it keeps a state in each column that it passes, until the step was dispatched.
        """
        return _ceil_div(num_tokens, self.block_size) if self.mode == "all" else 0

    def state_bytes_per_block(self, group: int, state: ConvState | RecurrentState) -> int:
        """Returns the bytes of one block of one state of a group, all layers together."""
        shape = state.block_shape(self.num_speculative_tokens)
        return self.groups[group].num_layers * math.prod(shape) * itemsize(state.dtype)

    @property
    def ring_bytes_per_slot(self) -> int:
        """The bytes of one slot's rings in all groups and layers together. 0 unless the policy is "deferred"."""
        if not self.is_deferred:
            return 0
        rings = [(group.num_layers, group.ring) for group in self.groups if group.ring is not None]
        return sum(layers * ring.bytes_per_slot(self.fold_length) for layers, ring in rings)

    @property
    def ring_bytes(self) -> int:
        """The bytes of the rings of all slots."""
        return self.max_num_seqs * self.ring_bytes_per_slot

    @property
    def bytes_per_block(self) -> int:
        """The bytes of one block in all groups together."""
        return sum(self.state_bytes_per_block(g, s) for g, group in enumerate(self.groups) for s in group.states)
