"""What a drafter does: the protocols of drafters on the host and on the device, and the values that they take.

This module imports no JAX, because the scheduler needs only the host's protocol.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import jax

    from mamba_align_jax.align.batch import StepBatch
    from mamba_align_jax.engine.model import ServedModel
    from mamba_align_jax.kv import KVPages
    from mamba_align_jax.metadata.step_inputs import StepInputs
    from pallas_kernels.rows import TokenRows

# Stands for a token, drafted or sampled, that only the device knows.
UNKNOWN = -1


class Drafter(Protocol):
    """Proposes tokens on the host, which the next step verifies.

    A wrong draft costs time but changes no generated token. A drafter must not draw its proposals at random:
    verification keeps the model's distribution only because a draft is determined by the tokens before it.
    """

    def draft(self, request: Hashable, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Proposes tokens that may follow a request's tokens.

        The scheduler passes `max_drafts` by position.

        Args:
            request: The request's name.
            tokens: All tokens of the request, to be read. They extend those of the last call for this request. The
                engine passes a sequence that can't be changed and may be kept; a slice of it is a list.
            max_drafts: The largest number of drafts that is used, at least 1.

        Returns:
            At most `max_drafts` tokens.
        """
        ...

    def forget(self, request: Hashable) -> None:
        """Drops what the drafter keeps for a request. An unknown request is ignored."""
        ...


class Sampled(NamedTuple):
    """The tokens that the rows of one step sampled. All arrays are int32.

    Attributes:
        slot: Slot of each row; out of range for a row that samples nothing. [rows]
        tokens: Row r sampled `tokens[r, :counts[r]]`: its accepted drafts, then one token more. [rows, 1 + K]
        counts: Number of tokens that each row sampled. [rows]
        known: Number of tokens that the request had before those. [rows]
    """

    slot: "jax.Array"
    tokens: "jax.Array"
    counts: "jax.Array"
    known: "jax.Array"


class SampledStep(NamedTuple):
    """A step whose tokens have been sampled, as a device drafter takes it.

    Attributes:
        model: The model that ran the step.
        hidden: Hidden states of the step's tokens. [tokens, hidden]
        inputs: The inputs that the model took.
        kv: Pages of keys and values after the step.
        batch: The step's rows.
        rows: The row and the offset of each packed token.
        history: All tokens of each slot's request, the sampled ones included. int32 [slots, length]
        sampled: The tokens that were sampled.
    """

    model: "ServedModel"
    hidden: "jax.Array"
    inputs: "StepInputs"
    kv: "KVPages"
    batch: "StepBatch"
    rows: "TokenRows"
    history: "jax.Array"
    sampled: Sampled


@runtime_checkable
class DeviceDrafter(Hashable, Protocol):
    """Proposes tokens inside the jitted step, where a sampled token is known before the host has read it.

    Its proposals follow the rule of `Drafter`. It is a static argument of the step: equal drafters share compiled
    programs.
    """

    @property
    def num_kv_layers(self) -> int:
        """The number of KV layers that the drafter needs besides the model's. They follow the model's in the pages."""
        ...

    def draft(self, step: SampledStep, max_drafts: int) -> "tuple[jax.Array, jax.Array, KVPages]":
        """Proposes tokens that may follow those that each row has sampled.

        Args:
            step: The step.
            max_drafts: The number of drafts per row (static), at least 1.

        Returns:
            The drafts, int32 [rows, max_drafts]; how many of each row's drafts are valid, int32 [rows]; and the pages
            of keys and values. The first layers of the pages, which are the model's, are unchanged.
        """
        ...
