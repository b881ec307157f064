"""What a kind of step is made of: its contract, the op that runs it alone, its products in one launch, and its GPU code.

Each kind has a file in `steps/`, whose class extends `Step`. A launch takes the steps apart into instructions: each is a
product with the step that computes its inputs, how its blocks of weights are multiplied, and the step that stores its
results (see schedule.py). In a launch, a step's arrays are the references of its arrays.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

import jax

from pallas_kernels._check import check_argument
from pallas_kernels.all_reduce import Mailboxes
from pallas_kernels.dispatch import Run

# What a step takes from a product before it: rounded results, split-K partial sums, or the arrays of `parts`.
Taken: TypeAlias = Literal["results", "sums", "parts"]


class Place(NamedTuple):
    """A step's position in its chain.

    Attributes:
        steps: The chain.
        index: The step's index in it.
        channels: The number of its inputs.
        parts: The sizes of the chain's results: see api.py.
    """

    steps: "Sequence[Step]"
    index: int
    channels: int
    parts: tuple[int, ...] | None

    @property
    def step(self) -> "Step":
        """The step."""
        return self.steps[self.index]

    @property
    def names(self) -> list[str]:
        """The kinds of the chain's steps."""
        return [type(step).__name__ for step in self.steps]

    @property
    def before(self) -> "Step | None":
        """The step before, if there is one."""
        return self.steps[self.index - 1] if self.index else None

    @property
    def after(self) -> "Step | None":
        """The step after it, if there is one."""
        return self.steps[self.index + 1] if self.index + 1 < len(self.steps) else None

    @property
    def source(self) -> int | None:
        """The index of the step before, if that computes the inputs of a product in this position."""
        return self.index - 1 if self.before is not None and self.before.computes_inputs else None

    @property
    def is_normed(self) -> bool:
        """Whether the step before is a norm."""
        return self.before is not None and self.before.takes == "sums"

    @property
    def taken(self) -> Taken:
        """What is taken from the step: by the step after it, or by the caller."""
        if self.after is None:
            return "sums" if self.parts is None else "parts"
        return self.after.takes


@dataclasses.dataclass
class Separate:
    """What ops that run one step each hand on beside their results."""

    residual: jax.Array | None
    mailboxes: Mailboxes | None
    epoch: jax.Array | None
    run: Run


class Step:
    """A step of a chain: a frozen dataclass of arrays and of static fields.

    In a launch it is one of three things, each with code for one token and for several. A step with products (`phases`) has
    them loaded and multiplied by `load_one_token` and `multiply_one_token` of its phases. One that computes the inputs of
    the product after it does so by its own `load_one_token`. One that takes "parts" stores the chain's results: it loads
    what it needs for a block by `load_one_token`, and stores the block by `store_one_token`. For several tokens these are
    `load_few_tokens`, `multiply_few_tokens` and `emit`.

    Attributes:
        takes: What it takes from a product before it.
        computes_inputs: Whether it computes the inputs of the product after it.
        is_counted: Whether one launch saves time by it: see `schedule.is_short`.
        roles: The fields that a launch takes, by what they are. A launch's operands have the order of these names.
    """

    takes: ClassVar[Taken] = "results"
    computes_inputs: ClassVar[bool] = False
    is_counted: ClassVar[bool] = True
    roles: ClassVar[dict[str, tuple[str, ...]]] = {}

    @property
    def weights(self) -> list[jax.Array]:
        """The weights of its products, in the order in which they are multiplied."""
        return [getattr(self, name) for name in self.roles.get("weights", ())]

    @property
    def gives(self) -> tuple[Taken, ...]:
        """What may be taken from it."""
        return ("results",)

    def outputs_of(self, channels: int) -> int:
        """Return the number of results of `channels` inputs."""
        return channels

    # The contract, and the step alone

    def check_fields(self, name: str) -> None:
        """Raise ValueError, in the name of a step, unless its arrays have the dtypes and axes of their annotations."""
        for field in dataclasses.fields(self):  # pyrefly: ignore[bad-argument-type]
            if not field.metadata.get("static"):
                check_argument(name, field.name, getattr(self, field.name), field.type)

    def check(self, name: str, place: Place, x: jax.Array, residual: jax.Array | None) -> None:
        """Raise ValueError, in the name of a step, if it cannot be in its position. `x` and `residual` are the chain's."""
        raise NotImplementedError

    def run_alone(self, value: Any, place: Place, chain: Separate) -> Any:
        """Run the step by an op of its own."""
        raise NotImplementedError

    # One launch

    def unsupported(self, place: Place, launch: Any, x: jax.Array, capacity: int | None) -> str | None:
        """Return why a launch, ONE_TOKEN or FEW_TOKENS, cannot run the step, or None. See `schedule.unsupported`."""
        return None

    def unsupported_inputs(self, phase: Any, launch: Any) -> str | None:
        """Return why a launch cannot compute a phase's inputs by the step, or None."""
        return None

    def phases(self, place: Place, launch: Any, first: int) -> list[Any]:
        """Return its products, whose indices begin at `first`."""
        return []

    def prepared(self) -> Self:
        """Return the step with its arrays as a launch takes them."""
        return self

    def operands(self) -> dict[str, list[Any]]:
        """Return the arrays of a prepared step by their roles."""
        return {role: [getattr(self, field) for field in fields] for role, fields in self.roles.items()}

    def with_references(self, refs: dict[str, list[Any]]) -> Self:
        """Return the step with the references of its `operands`."""
        pairs = [pair for role, fields in self.roles.items() for pair in zip(fields, refs[role], strict=True)]
        return dataclasses.replace(self, **dict(pairs))  # pyrefly: ignore[bad-specialization]

    def factors(self, cta: Any) -> Any:
        """Return the factors of the results of the product after it, one for each of several tokens, in SMEM; or None."""
        return None

    def updated(self) -> tuple[jax.Array, ...]:
        """Return the arrays of a prepared step that the launch has updated. They follow the chain's results."""
        return ()


def places(steps: Sequence[Step], channels: int, parts: tuple[int, ...] | None) -> Iterator[Place]:
    """Return the position of each step of a chain of `channels` inputs."""
    for index, step in enumerate(steps):
        yield Place(steps, index, channels, parts)
        channels = step.outputs_of(channels)


def weights_of(steps: Sequence[Step]) -> list[jax.Array]:
    """Return the weights of a chain's products, in the order in which they are multiplied."""
    return [weight for step in steps for weight in step.weights]


def norms_of(steps: Sequence[Any]) -> list[Any]:
    """Return the norms of a chain, without the gated norm."""
    return [step for step in steps if step.takes == "sums"]
