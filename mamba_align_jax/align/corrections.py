"""Corrections of the device's counts by a host that learns late that fewer tokens were accepted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.align.batch import Put
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.slots import set_slots
from mamba_align_jax.align.state import AlignState, entries_from_host


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Corrections:
    """Slots that go back inside the window of their last step. int32 [corrections] each.

    Attributes:
        slot: The slot, or -1 for padding.
        num_computed_tokens: The tokens that count as computed from now on.
    """

    slot: jax.Array
    num_computed_tokens: jax.Array

    @classmethod
    def from_host(
        cls,
        align: AlignConfig,
        bucket: int,
        slots: Sequence[int],
        num_computed_tokens: Sequence[int],
        put: Put = jax.device_put,
    ) -> "Corrections":
        """Checks the entries and pads them to `bucket`.

        Args:
            align: The configuration.
            bucket: Entries of the result.
            slots: The slots, all distinct.
            num_computed_tokens: What each slot has computed: see `correct_counts`.
            put: See `StepBatch.from_host`.

        Raises:
            ValueError: An entry is wrong. The text names it.
        """
        given = bucket, slots, num_computed_tokens
        bucket, found, computed = entries_from_host("Corrections", align, *given, may_be_full=True)
        padded = np.full((2, bucket), -1, np.int32)
        padded[:, : len(found)] = found, computed
        slot, counts = map(put, padded)
        return cls(slot=slot, num_computed_tokens=counts)


def correct_counts(state: AlignState, corrections: Corrections) -> tuple[AlignState, jax.Array]:
    """Takes back tokens that slots accepted in their last step.

    Call it after `finish_step` of the step that the correction is about, and before the next step with tokens of the
    slot. Let `nc` be the slot's computed tokens and `a` the tokens that it accepted in that step, as `state` has them.
    The states after nc - a + 1 to nc tokens exist, so a correction to any of these counts is right. The slot's accepted
    count falls by as many tokens, so that the next step reads the state after the new count.

    Other corrections change nothing and are counted, because the state is not there. More tokens than `nc` are refused,
    because the boundary that they pass was not saved. Fewer than nc - a + 1 were computed by an earlier step, or are not
    certain any more: the request must enter again. `a` is 1, so that nothing can be taken back, after a chunk, after
    `Additions`, and where all drafts were accepted and end on the boundary of the running column: its state was saved
    over the window. Under policy "deferred" only `fold_slots` saves over a window, and no slot goes back before a boundary
    that it has folded. A host that corrects such steps passes what it is sure of to `finish_step`.

    A boundary after the new count must not be published. If it was saved, it is saved again when the slot passes it.

    Args:
        state: The counts of the slots. A jitted caller may donate it.
        corrections: The slots, and what they have computed.

    Returns:
        The corrected state, and how many corrections were refused, int32 scalar. Padding is neither.

    Raises:
        ValueError: An argument is something else.
    """
    values.instances("correct_counts", state=(state, AlignState), corrections=(corrections, Corrections))
    is_real, slot = corrections.slot >= 0, jnp.maximum(corrections.slot, 0)
    taken_back = state.num_computed_tokens[slot] - corrections.num_computed_tokens
    accepted = state.num_accepted_tokens[slot] - taken_back
    is_right = is_real & (taken_back >= 0) & (accepted >= 1)
    if state.state_pos is not None:
        is_right &= corrections.num_computed_tokens >= state.state_pos[slot]
    to = jnp.where(is_right, slot, -1)
    put = lambda array, new: set_slots(array, to, new)
    corrected = replace(
        state,
        num_computed_tokens=put(state.num_computed_tokens, corrections.num_computed_tokens),
        num_accepted_tokens=put(state.num_accepted_tokens, accepted),
    )
    return corrected, jnp.sum(is_real & ~is_right, dtype=jnp.int32)
