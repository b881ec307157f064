"""A mixture of experts: the router, the choice of a token's experts, and their two products.

In one launch, of a single token, these are three phases. The fetching warpgroup chooses the experts by the router's results,
while the shared experts' weights, which need no choice, are in flight. Every warp of it has all logits, some in each lane,
and finds the largest logits one after the other by warp-wide reductions, so no warp waits for another one. All warps store
the same values.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels._check import require
from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels._warpgroup import LANES, THREADS
from pallas_kernels.linear import linear_sums
from pallas_kernels.mixture_of_experts import Routing, routed_experts_sums
from pallas_kernels.product_chain.one_token import ROWS, weights_in_registers
from pallas_kernels.product_chain.schedule import FEW_K_TILES, FEW_TOKENS, WIDTH, Launch, Phase, WeightBlock, Work
from pallas_kernels.product_chain.step import Place, Separate, Step, Taken
from pallas_kernels.product_chain.steps.product import ProductPhase, in_k_tiles
from pallas_kernels.quantized import QuantizedWeight

_MAX_ROWS = 16  # of a block of the second products
_TAKEN = -(2**31)  # the key of an expert that has been chosen, or that does not exist
_FLIP = 2**31 - 1
_LOG2_E = 1.4426950408889634


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts(Step):
    """Choose a token's experts by a softmax over the router's outputs, and compute the weighted sum of their outputs.

    It is `linear_sums` with the router's weights, whose total is rounded to their dtype, and `routed_experts_sums` with
    "swiglu". Of experts with equal logits, the lower index is chosen first.

    Attributes:
        router: Weights of the router: a row for each routed expert, and with `shared_gate` one more row.
        up: First weights of all experts, shared experts last, with twice the rows of `size`: see `mixture_of_experts`.
        down: Second weights of all experts.
        valid: False for padding tokens, which get no experts. None if no token is padding.
        top_k: The number of routed experts per token.
        shared: The number of shared experts, which every token has.
        shared_gate: Whether the sigmoid of the router's last output is the weight of the shared experts.
        renormalise: Whether the weights of a token's experts are scaled to the sum 1.
    """

    router: Float[Array, "outputs inputs"]
    up: Float[Array | QuantizedWeight, "experts up_size inputs"]
    down: Float[Array | QuantizedWeight, "experts channels size"]
    valid: Bool[Array, " tokens"] | None = None
    top_k: int = field(default=1, metadata=dict(static=True))
    shared: int = field(default=0, metadata=dict(static=True))
    shared_gate: bool = field(default=False, metadata=dict(static=True))
    renormalise: bool = field(default=True, metadata=dict(static=True))

    roles: ClassVar[dict[str, tuple[str, ...]]] = dict(weights=("router", "up", "down"), valid=("valid",))

    @property
    def outputs(self) -> int:
        """The number of results."""
        return self.down.shape[1]

    @property
    def routed(self) -> int:
        """The number of experts that are not shared."""
        return self.router.shape[0] - self.shared_gate

    @property
    def chosen(self) -> int:
        """The number of experts per token."""
        return self.top_k + self.shared

    @property
    def gives(self) -> tuple[Taken, ...]:
        """See `Step`."""
        return ("sums",)

    def outputs_of(self, channels: int) -> int:
        """See `Step`."""
        return self.outputs

    def check(self, name: str, place: Place, x: jax.Array, residual: jax.Array | None) -> None:
        """See `Step`."""
        router, up, down = self.router.shape, self.up.shape, self.down.shape
        is_right = router[1] == place.channels
        require(is_right, f"{name}: router must be [outputs, {place.channels}], got {list(router)}")
        wanted = (self.routed + self.shared, 2 * down[2], place.channels)
        require(up == wanted, f"{name}: up must be {list(wanted)}, got {list(up)}")
        require(down[0] == wanted[0], f"{name}: down must be of {wanted[0]} experts, got {list(down)}")
        least = 1 if self.shared_gate else 0
        require(self.shared >= least, f"{name}: shared must be at least {least}, got {self.shared}")
        is_right = 1 <= self.top_k <= self.routed
        require(is_right, f"{name}: top_k must be from 1 to {self.routed}, got {self.top_k}")
        is_followed = place.after is None or place.after.takes == "sums"
        require(is_followed, f"{name}: a norm must follow experts, got {place.names}")

    def run_alone(self, value: jax.Array, place: Place, chain: Separate) -> jax.Array:
        """Run `linear_sums` and `routed_experts_sums`. Return partial sums [splits, tokens, channels]."""
        x = value.astype(self.router.dtype)
        routing = Routing(
            top_k=self.top_k,
            shared=self.shared,
            shared_gate=self.shared_gate,
            renormalise=self.renormalise,
            logits_dtype=str(self.router.dtype),
        )
        logits = linear_sums(x, self.router, run=chain.run)
        return routed_experts_sums(x, logits, self.up, self.down, routing, valid=self.valid, run=chain.run)

    def unsupported(self, place: Place, launch: Launch, x: jax.Array, capacity: int | None) -> str | None:
        """See `Step`."""
        if launch is FEW_TOKENS:
            return "experts must have one token"
        if not all(each is not None and each.takes == "sums" for each in (place.before, place.after)):
            return "experts must be between two norms"
        size = self.down.shape[2]
        if self.chosen > LANES or size % WIDTH or size > FEW_K_TILES * WIDTH:
            most = FEW_K_TILES * WIDTH
            return f"there must be at most {LANES} experts of multiples of {WIDTH} channels, up to {most}"
        return None

    def phases(self, place: Place, launch: Launch, first: int) -> list[Phase]:
        """See `Step`.

        The router's outputs are padded to a multiple of `THREADS` by outputs with weights 0. A block of the second product
        has the most rows with which it is no larger than a block of the first product.
        """
        inputs, size, chosen = self.up.shape[2], self.down.shape[2], self.chosen
        padded = -(-self.router.shape[0] // THREADS) * THREADS
        splits = next(s for s in range(1, chosen + 1) if chosen % s == 0 and chosen // s * size // WIDTH <= FEW_K_TILES)
        rows = ROWS
        while 2 * rows <= _MAX_ROWS and 2 * rows * size <= ROWS * inputs and self.outputs % (2 * rows) == 0:
            rows *= 2
        common, shape = (place.index, launch), (size, self.outputs, chosen // splits, rows)
        router = ProductPhase(first, *common, inputs, padded, 1, ROWS, place.source, place.is_normed, field="router")
        up = UpPhase(first + 1, *common, inputs, chosen * size, 2, ROWS, field="up", experts=self)
        down = DownPhase(first + 2, *common, *shape, splits=splits, sends="sums", field="down", experts=self)
        return [router, up, down]

    def prepared(self) -> Self:
        """See `Step`."""
        # Booleans in memory are read differently by different versions of the lowering. A step converts the array once.
        valid = None if self.valid is None else self.valid.astype(jnp.int32)
        router, up, down = map(in_k_tiles, self.weights)
        return replace(self, router=router, up=up, down=down, valid=valid)


@dataclass(frozen=True)
class UpPhase(ProductPhase):
    """The first products of the chosen experts, of the same inputs as the router's.

    CTAs take blocks round-robin. So the blocks of shared experts, which come first, are spread over all CTAs, which fetch
    them before the other experts are chosen.
    """

    experts: Any = None

    def work(self, cta: Any, ctas: int) -> Work:
        """See `Phase`."""
        return Work(jnp.int32(0), cta, ctas, _count_round_robin(self.blocks, cta, ctas))

    def weights_of_block(self, split: Any, block: Any, term: Any) -> WeightBlock:
        """See `Phase`."""
        each = jnp.int32(self.blocks // self.experts.chosen)
        row = term * each * self.rows + jax.lax.rem(block, each) * self.rows
        return WeightBlock(jax.lax.div(block, each), row, 0)

    def memory(self, phases: Sequence[Phase]) -> dict[str, Any]:
        """Return the SMEM and the barrier of a token's choice. They serve all choices, because they follow one another."""
        logits = max(phase.outputs for phase in phases if phase.field == "router")
        return dict(
            logits=hp.SMEM((logits,), jnp.float32),
            chosen=hp.SMEM((LANES,), jnp.int32),
            factors=hp.SMEM((LANES,), jnp.float32),
            decided=hp.Barrier(),
        )

    def fetch(self, cta: Any) -> None:
        """Copy the blocks of shared experts at once, and the blocks of other experts when they have been chosen."""
        stop, up = cta.copies_of(self), cta.steps[self.step].up
        count = _count_round_robin(self.experts.shared * self.blocks // self.experts.chosen, cta.cta, cta.ctas)
        shared = self.terms * count
        cta.copy_blocks(self, jnp.int32(0), shared, lambda expert: up.at[self.experts.routed + expert])
        self._choose(cta)
        cta.copy_blocks(self, shared, stop)

    def _choose(self, cta: Any) -> None:
        """Choose the token's experts by the results of the router's phase, for both warpgroups."""
        router = cta.plan.phases[self.index - 1]
        logits = cta.refs.logits.at[hp.ds(0, router.outputs)]
        cta.wait_for(router.index)
        (found,) = messages.receive([cta.sent(router.index, 0, 0, router.outputs)])
        logits[...] = found.astype(cta.dtype).astype(jnp.float32)
        hp.inline(hp.warpgroup_barrier)
        choose(logits, cta.refs.chosen, cta.refs.factors, self.experts)
        hp.inline(hp.warpgroup_barrier)
        hp.barrier_arrive(cta.refs.decided)

    def load_one_token(self, cta: Any) -> list[jax.Array]:
        """See `ProductPhase`."""
        return cta.x


@dataclass(frozen=True)
class DownPhase(Phase):
    """The second products of the chosen experts, whose outputs a CTA adds up, times their routing weights."""

    experts: Any = None

    @property
    def k_tiles(self) -> int:
        """The number of K tiles of a block: splits divide the experts, not the inputs."""
        return self.inputs // WIDTH

    @property
    def vector(self) -> int:
        """The number of inputs that a CTA multiplies."""
        return self.inputs * self.terms

    def weights_of_block(self, split: Any, block: Any, term: Any) -> WeightBlock:
        """See `Phase`."""
        return WeightBlock(split * self.terms + term, block * self.rows, 0)

    def load_one_token(self, cta: Any) -> list[jax.Array]:
        """Return the first products' results of the experts of this CTA's split, times their routing weights."""
        first = cta.work[self.index].split * self.terms
        cta.wait_for(self.index - 1)
        hp.barrier_wait(cta.refs.decided)
        terms = [first + n for n in range(self.terms)]
        values = messages.receive([cta.sent(self.index - 1, 0, term * self.inputs, self.inputs) for term in terms])
        rounded = [value.astype(cta.dtype).astype(jnp.float32) for value in values]
        return cta.for_each_warp([value * cta.refs.factors[n] for n, value in zip(terms, rounded, strict=True)])

    def multiply_one_token(self, cta: Any, own_block: Any, x: list[jax.Array]) -> list[jax.Array]:
        """Add up the outputs of several experts, for a block of rows, of which each warp has every fourth row."""
        split, first, _, _ = cta.work[self.index]
        groups = range(self.rows // ROWS)
        sums: list[Any] = [0.0 for _ in groups]
        for term in range(self.terms):
            with cta.block(self, own_block, term) as block:
                for group in groups:
                    weights = weights_in_registers(block.at[hp.ds(group * ROWS, ROWS)])
                    sums[group] = sums[group] + weights * hp.along_columns(x[term], ROWS)
        valid = cta.steps[self.step].valid
        values = [jnp.sum(each, axis=1) for each in sums]
        for group, value in enumerate(values):
            value = value if valid is None else hp.keep_if(valid[0] > 0, value)
            cta.store(self, split, (first + own_block) * self.rows + group * ROWS, value)
        return x


def _count_round_robin(blocks: int, cta: Any, ctas: int) -> Any:
    """Return the number of blocks that a CTA takes if CTAs take them round-robin."""
    return jax.lax.div(blocks + ctas - 1 - cta, jnp.int32(ctas))


def choose(logits: Any, chosen: Any, factors: Any, experts: Experts) -> None:
    """Choose a token's experts by their logits, and compute their routing weights. The whole warpgroup runs it.

    Args:
        logits: The router's outputs, in SMEM. float32 [at least the router's outputs]
        chosen: Receives the experts' indices, shared experts first, then the best expert, and so on, in SMEM. int32 [32]
        factors: Receives their routing weights, in the same order, in SMEM. float32 [32]
        experts: The mixture.
    """
    hp.inline(functools.partial(_choose, experts=experts), (logits, ()), (chosen, ()), (factors, ()))


def _choose(logits: Any, chosen: Any, factors: Any, experts: Experts) -> None:
    lane = hp.thread_index() & (LANES - 1)
    exp = lambda x: hp.exp2(x * _LOG2_E)

    names = [lane + first for first in range(0, experts.routed, LANES)]
    exists = [name < experts.routed for name in names]
    keys = [hp.select(real, _key(logits[name]), _TAKEN) for name, real in zip(names, exists, strict=True)]
    left, best, best_key, found = keys, lane, hp.i32(0), []
    for rank in range(experts.top_k):
        key = hp.reduce_warp("max", functools.reduce(hp.maximum, left))
        found.append(key)
        pairs = [*zip(names, left, strict=True)]
        candidates = [hp.select(own == key, name, _FLIP) for name, own in pairs]
        expert = hp.reduce_warp("min", functools.reduce(hp.minimum, candidates))
        left = [hp.select(name == expert, _TAKEN, own) for name, own in pairs]
        is_here = lane == rank
        best, best_key = hp.select(is_here, expert, best), hp.select(is_here, key, best_key)

    largest = _logit(found[0])
    is_routed = lane < experts.top_k
    weight = hp.select(is_routed, exp(_logit(best_key) - largest), 0.0)
    if experts.renormalise:
        total = weight
    else:
        each = [exp(_logit(key) - largest) for key in keys]
        each = [hp.select(real, one, 0.0) for real, one in zip(exists, each, strict=True)]
        total = hp.add(*each)
    total = hp.sum_over_lanes(total, (16, 8, 4, 2, 1))
    gate = hp.f32(1.0)
    if experts.shared_gate:
        odds = exp(-logits[experts.routed])
        gate = hp.f32(1.0) / (hp.f32(1.0) + odds)
    shared = lane + (experts.routed - experts.top_k)
    after_shared = lane + experts.shared
    slot = hp.index(hp.select(is_routed, after_shared, lane - experts.top_k))
    with hp.predicated(lane < experts.chosen):
        chosen[slot] = hp.select(is_routed, best, shared)
        factors[slot] = hp.select(is_routed, weight / total, gate)


def _key(logit: Any) -> Any:
    """Return an int32 key per logit, float32, with the order of the logits."""
    bits = hp.bitcast(logit, jnp.int32)
    is_negative = bits < 0
    return hp.select(is_negative, bits ^ _FLIP, bits)


def _logit(key: Any) -> Any:
    """Return the logit, float32, of a key, int32: the inverse of `_key`."""
    is_negative = key < 0
    return hp.bitcast(hp.select(is_negative, key ^ _FLIP, key), jnp.float32)
