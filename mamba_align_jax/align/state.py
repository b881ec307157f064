"""What the device keeps for each slot between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import Put
from mamba_align_jax.align.columns import column_of
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.slots import set_slots
from mamba_align_jax.errors import FieldError


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class AlignState:
    """The counts of each slot. The host may know them only some steps later.

    Attributes:
        num_computed_tokens: Tokens whose states exist. Rejected drafts are not counted. int32 [slots].
        num_accepted_tokens: Tokens accepted in the slot's last step, the bonus token included, so at least 1. int32
            [slots].
        running_column: The first column that the last step wrote. Negative before the first token. int32 [slots].
        state_pos: The base, which is the number of tokens that the newest written state has read; None unless the policy
            is "deferred". int32 [slots].
    """

    num_computed_tokens: jax.Array
    num_accepted_tokens: jax.Array
    running_column: jax.Array
    state_pos: jax.Array | None = None

    @classmethod
    def create(cls, align: AlignConfig) -> "AlignState":
        """Creates the state in which no slot has computed any token."""
        values.instance("AlignState: align", align, AlignConfig)
        fill = lambda value: jnp.full((align.max_num_seqs,), value, jnp.int32)
        base = fill(0) if align.is_deferred else None
        return cls(num_computed_tokens=fill(0), num_accepted_tokens=fill(1), running_column=fill(-1), state_pos=base)

    def check(self, align: AlignConfig) -> None:
        """Raises ValueError if the state was made for an AlignConfig that has another policy or number of slots."""
        slots, wanted = self.num_computed_tokens.shape[0], align.max_num_seqs
        values.require(slots == wanted, "AlignState: slots", f"max_num_seqs = {wanted}", slots)
        if align.is_deferred != (self.state_pos is not None):
            made = "'deferred'" if self.state_pos is not None else "'copy_free' or 'pre_copy'"
            raise ValueError(f"AlignState: policy must be the one it was made for, {made}, got {align.policy!r}")


def entries_from_host(
    owner: str,
    align: AlignConfig,
    bucket: int,
    slots: Sequence[int],
    num_computed_tokens: Sequence[int],
    *,
    may_be_full: bool = False,
) -> tuple[int, np.ndarray, np.ndarray]:
    """Checks entries that each give a slot a number of tokens: at most `bucket` entries, with distinct slots.

    A number of tokens is below `max_model_len`, or may equal it with `may_be_full`.

    Returns:
        `bucket` as an int of Python, the slots, and their numbers of tokens, int32 [entries] each.

    Raises:
        ValueError: An entry is wrong. The text names it after its `owner`.
    """
    values.instance(f"{owner}: align", align, AlignConfig)
    bucket = values.integer(f"{owner}: bucket", bucket, 0)
    slots = values.integers(f"{owner}: slots", slots, -values.INT32_MAX)
    counts = values.integers(f"{owner}: num_computed_tokens", num_computed_tokens, -values.INT32_MAX)
    if len(slots) != len(counts) or len(slots) > bucket:
        raise ValueError(
            f"{owner}: slots and num_computed_tokens must have the same length, at most {bucket}, "
            f"got {len(slots)} and {len(counts)}"
        )
    values.require(len(set(slots)) == len(slots), f"{owner}: slots", "distinct", list(slots))
    limit = align.max_model_len + may_be_full
    for entry, (slot, count) in enumerate(zip(slots, counts, strict=True)):
        for name, value, end in (("slot", slot, align.max_num_seqs), ("num_computed_tokens", count, limit)):
            if not 0 <= value < end:
                raise FieldError(f"{owner}: {name} of entry {entry}", f"in [0, {end})", str(value))
    return bucket, np.asarray(slots, np.int32), np.asarray(counts, np.int32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Additions:
    """The slots that requests enter in this step, whether the requests are new or resumed.

    Attributes:
        slot: The slot, or -1 for padding. int32 [additions].
        num_computed_tokens: Tokens from whose state the request continues: those of its prefix hit, or any other number
            whose state the host has put into the block of `running_column`. int32 [additions].
        running_column: The column that holds the state after these tokens. int32 [additions].
    """

    slot: jax.Array
    num_computed_tokens: jax.Array
    running_column: jax.Array

    @classmethod
    def from_host(
        cls,
        align: AlignConfig,
        bucket: int,
        slots: Sequence[int],
        num_computed_tokens: Sequence[int],
        put: Put = jax.device_put,
    ) -> "Additions":
        """Checks the entries and pads them to `bucket`.

        Args:
            align: The configuration.
            bucket: Entries of the result.
            slots: The slot of each request, all distinct.
            num_computed_tokens: Tokens from whose state each request continues. 0 for none. Their recurrent states, and
                their conv windows from row 0 on, are in the block of the column (num_computed_tokens - 1) //
                `state_block_size`. Inside a block, that is for no multiple of the block size, the block must be the
                request's own, because its next step may write it. `StatePool.write_block` can put the states there.
            put: See `StepBatch.from_host`.

        Raises:
            ValueError: An entry is wrong. The text names it.
        """
        bucket, found, computed = entries_from_host("Additions", align, bucket, slots, num_computed_tokens)
        padded = np.full((3, bucket), -1, np.int32)
        padded[:, : len(found)] = found, computed, column_of(computed, align.state_block_size)
        slot, computed, column = map(put, padded)
        return cls(slot=slot, num_computed_tokens=computed, running_column=column)


def add_requests(state: AlignState, additions: Additions) -> AlignState:
    """Initialises the slots that requests enter. Other slots do not change. A jitted caller may donate `state`.

    Raises:
        ValueError: An argument is something else.
    """
    values.instances("add_requests", state=(state, AlignState), additions=(additions, Additions))
    put = lambda array, new: set_slots(array, additions.slot, new)
    return AlignState(
        num_computed_tokens=put(state.num_computed_tokens, additions.num_computed_tokens),
        num_accepted_tokens=put(state.num_accepted_tokens, 1),
        running_column=put(state.running_column, additions.running_column),
        # The state is at the request's first token, and nothing in the ring of the last request counts.
        state_pos=None if state.state_pos is None else put(state.state_pos, additions.num_computed_tokens),
    )
