"""A norm, which adds the results of the step before to the residual stream.

In one launch, each CTA adds up all channels of a single token. Of several tokens, each of 128 CTAs, the owners, has some
channels of all tokens. It adds up their split-K partial sums, and sends the rounded sums times the norm's weights, and
the sum of their squares, to all CTAs. The sums times weights are the next product's inputs. The norm's reciprocal root is a
factor for each token, by which CTAs multiply the product's results.
"""

import functools
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels._check import check_argument, dtype_of, require
from pallas_kernels._lazy_hopper import hp, messages
from pallas_kernels.all_reduce import all_reduce_rms_norm
from pallas_kernels.product_chain import fragments
from pallas_kernels.product_chain.over_devices import added_up
from pallas_kernels.product_chain.schedule import FEW_TOKENS, OWNERS, Launch, Phase
from pallas_kernels.product_chain.step import Place, Separate, Step, Taken
from pallas_kernels.rms_norm import add_rms_norm

_THREADS = 256  # that multiply, of several tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Norm(Step):
    """Add the results of the step before to the residual stream, and normalise the sum: see `add_rms_norm`.

    Attributes:
        weight: Weights of the norm.
        epsilon: Added to the mean square.
        offset: Added to the weights.
        scale: Factor of the results that are added.
        out_dtype: Dtype of the normed values; None is the residual stream's dtype.
        over_devices: Whether the results are first summed over the devices: see `all_reduce_product_chain`.
    """

    weight: Float[Array, " channels"]
    epsilon: float = field(metadata=dict(static=True))
    offset: float = field(default=0.0, metadata=dict(static=True))
    scale: float = field(default=1.0, metadata=dict(static=True))
    out_dtype: str | None = field(default=None, metadata=dict(static=True))
    over_devices: bool = field(default=False, metadata=dict(static=True))

    takes: ClassVar[Taken] = "sums"
    computes_inputs: ClassVar[bool] = True
    roles: ClassVar[dict[str, tuple[str, ...]]] = dict(norms=("weight",))

    def check(self, name: str, place: Place, x: jax.Array, residual: jax.Array | None) -> None:
        """See `Step`."""
        can_norm = place.before is None or "sums" in place.before.gives
        require(can_norm, f"{name}: a norm must be the first step or follow a product that is not gated")
        require(residual is not None, f"{name}: a norm needs a residual stream, got residual=None")
        shapes = dict(residual=(residual, [x.shape[-2], place.channels]), weight=(self.weight, [place.channels]))
        for argument, (array, wanted) in shapes.items():
            shape = list(array.shape) if array is not None else None
            require(shape == wanted, f"{name}: {argument} must be {wanted}, got {shape}")
        check_argument(name, "out_dtype", self.out_dtype, str | None)
        dtype_of(name, "out_dtype", self.out_dtype, x.dtype)

    def run_alone(self, value: jax.Array, place: Place, chain: Separate) -> jax.Array:
        """Run `add_rms_norm`, or `all_reduce_rms_norm` over devices."""
        assert chain.residual is not None
        partial_sums = value if value.ndim == 3 else value[None]
        options: dict[str, Any] = dict(epsilon=self.epsilon, offset=self.offset, scale=self.scale)
        options |= dict(out_dtype=self.out_dtype, run=chain.run)
        if not self.over_devices:
            chain.residual, value = add_rms_norm(chain.residual, partial_sums, self.weight, **options)
            return value
        assert chain.mailboxes is not None
        assert chain.epoch is not None
        chain.residual, value, chain.epoch = all_reduce_rms_norm(
            chain.residual, partial_sums, self.weight, chain.mailboxes, chain.epoch, **options
        )
        return value

    def unsupported(self, place: Place, launch: Launch, x: jax.Array, capacity: int | None) -> str | None:
        """See `Step`."""
        if launch is FEW_TOKENS:
            if place.before is None or place.after is None:
                return "of several tokens, the first and the last step must be products"
            dtypes = {x.dtype, jnp.dtype(self.out_dtype or x.dtype)}
            if len(dtypes) > 1:
                return f"all arrays of several tokens must have one dtype, got {sorted(map(str, dtypes))}"
        if place.channels % launch.normed:
            return f"a norm must have a multiple of {launch.normed} channels, got {place.channels}"
        words = x.shape[-2] * place.channels
        if self.over_devices and capacity is not None and words > capacity:
            return f"a mailbox must hold {words} elements, got {capacity}"
        return None

    # One token

    def load_one_token(self, cta: Any, phase: Phase) -> list[jax.Array]:
        """Return the normed values of a phase's split. A norm needs all channels, also where a CTA multiplies a split."""
        value, count = self.normed(cta, phase.index), phase.vector
        cut = None if phase.splits == 1 else hp.ds(cta.work[phase.index].split * count, count)
        return cta.for_each_warp([value.astype(cta.dtype)], cut)

    def normed(self, cta: Any, index: int) -> jax.Array:
        """Add the results of the phase before phase `index` to the residual stream. Return the normed sum."""
        residual = cta.refs.residual
        channels = residual.shape[0]
        added = functools.reduce(operator.add, cta.results_before(index, 0, channels))
        before = hp.load_spread(residual) if cta.total is None else cta.total
        rounded = (before + self.scale * added).astype(residual.dtype)
        if self is cta.norms[-1]:

            @hp.when(cta.cta == 0)
            def _() -> None:
                cta.refs.stream[...] = rounded

        cta.total = rounded.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.sum(cta.total * cta.total) / channels + self.epsilon)
        value = cta.total * factor * (self.offset + hp.load_spread(self.weight))
        return value.astype(self.out_dtype or residual.dtype)

    # Several tokens

    def factors(self, cta: Any) -> Any:
        """Return the norm's factors, one for each token, in SMEM."""
        return cta.refs.factors.at[self._ordinal(cta)]

    def _ordinal(self, cta: Any) -> int:
        """Return the index among the chain's norms."""
        return next(n for n, step in enumerate(cta.norms) if step is self)

    def load_few_tokens(self, cta: Any, phase: Phase, first: Any) -> jax.Array:
        """Return this thread's inputs of a phase: the residual stream times the norm's weights, from `first` on."""
        at, before = cta.where[phase.index - 1], phase.index - 1
        # The loads that need no other CTA are issued before the first wait.
        weights = _load_own(self.weight, cta.owner, phase.inputs, cta.tokens, of_tokens=False)
        if cta.total is None:
            cta.total = _load_own(cta.refs.residual, cta.owner, phase.inputs, cta.tokens, of_tokens=True)
        cta.wait_for(before)
        own = functools.partial(self._own, cta, before, weights)
        cta.total = jax.lax.cond(cta.cta < OWNERS, own, lambda: cta.total)
        messages.wait(cta.counter(before, of_owners=True), OWNERS)
        stream = fragments.Vectors(cta.refs.sent, at.stream, phase.inputs, first)
        return self._receive(cta, stream, at.squares, phase.k_tiles)

    def _own(self, cta: Any, index: int, weights: jax.Array) -> jax.Array:
        """Add a phase's results to an owner's channels of the residual stream, and send them to all CTAs.

        It sends the sums times the norm's `weights`, and the sum of the squares of the sums. It returns the sums. They are
        in the layout of `_load_own`.
        """
        phase, at, refs, tokens, dtype = cta.plan.phases[index], cta.where[index], cta.refs, cta.tokens, cta.dtype
        channels, size = phase.outputs, tokens * phase.outputs
        splits, each = [at.results + split * size for split in range(phase.splits)], channels // 2 // OWNERS
        out = refs.stream if self is cta.norms[-1] else None
        devices = cta.devices(cta.norms[: self._ordinal(cta)]) if self.over_devices else None

        def body(sent: Any, staging: Any, before: Any, weights: Any, owner: Any, *more: Any) -> Any:
            f32 = jnp.float32
            thread, totals, old, of_norm = hp.thread_of_cta(), [], hp.elements(before), hp.elements(weights)
            own_offsets = _own_offsets(owner, channels, tokens)
            addresses = [hp.address(sent, offset + start) for _, _, offset in own_offsets for start in splits]
            found = messages.poll(messages.load(addresses, 2, f32), addresses, f32)
            added = []
            for start in range(0, len(found), len(splits)):
                added.append([hp.add(*[pair[n] for pair in found[start : start + len(splits)]]) for n in range(2)])
            if devices is not None:
                added = added_up(devices, more[-2], more[-1], added, [offset for _, _, offset in own_offsets])
            for index, (pair, _, offset) in enumerate(own_offsets):
                both = slice(2 * index, 2 * index + 2)
                scaled = [hp.f32(self.scale) * one for one in added[index]]
                sums = [x + y for x, y in zip(old[both], scaled, strict=True)]
                rounded = hp.pack(sums).astype(dtype)
                totals += hp.unpack(rounded.astype(jnp.float32))
                factors = [hp.f32(self.offset) + weight for weight in of_norm[both]]
                weighted = [x * y for x, y in zip(totals[-2:], factors, strict=True)]
                weighted = [hp.f32(_scale_of(dtype)) * one for one in weighted]
                messages.store(hp.word_address(sent, at.stream, offset), [hp.word(hp.rounded_pair(weighted, dtype))])
                if out is not None:
                    hp.store_vector(rounded, more[0], offset)
                staging[pair] = hp.add(*[x * x for x in totals[-2:]])
            hp.barrier_of_warpgroups(fragments.WARPGROUPS)
            with hp.predicated(thread < tokens):
                start = thread * each
                total = hp.add(*[staging[start + n] for n in range(each)])
                offset = hp.add(thread * OWNERS, owner, at.squares)
                messages.store(hp.address(sent, offset), [total])
            return (hp.strided(totals),)

        operands = [(refs.sent, ()), (refs.staging, ()), cta.total, weights, cta.cta]
        operands += [] if out is None else [(out, ())]
        operands += [] if devices is None else devices.operands
        total = hp.inline(body, *operands, results=[(256 * _own_pairs(channels, tokens), jnp.float32)])[0]
        messages.signal(cta.counter(index, of_owners=True))
        return total

    def _receive(self, cta: Any, x: fragments.Vectors, squares: int, k_tiles: int) -> jax.Array:
        """Poll GMEM for the residual stream times the norm's weights, and compute the norm's factors. `_own` sends both.

        `x` is the stream, two channels in each word, and `squares` the offset of each owner's sums of squares, float32
        [tokens, OWNERS], in its array. A thread sees all factors after the next barrier of the CTA.
        """
        tokens = cta.tokens

        def body(ref: Any, factors: Any, first: Any) -> Any:
            f32, i32 = jnp.float32, jnp.int32
            addresses = [hp.word_address(ref, x.start, at) for at in fragments.offsets_of(x, first, k_tiles, tokens)]
            thread = hp.thread_of_cta()
            token = hp.minimum(thread >> 4, tokens - 1)
            owner = (thread & 15) * (OWNERS // 16)
            start = hp.add(token * OWNERS, owner, squares)
            of_squares = [hp.address(ref, start + n) for n in range(0, OWNERS // 16, 4)]
            asked_squares, asked = messages.load(of_squares, 4, f32), messages.load(addresses, fragments.PAIRS, i32)
            total = hp.add(*[n for four in messages.poll(asked_squares, of_squares, f32) for n in four])
            total = hp.sum_over_lanes(total, (1, 2, 4, 8))
            factor = hp.approximate("rsqrt", total * (1.0 / x.length) + self.epsilon)
            factor = factor * (1.0 / _scale_of(cta.dtype))
            factors[thread >> 4] = factor
            held = [hp.pack(words) for words in messages.poll(asked, addresses, i32)]
            return (held,)

        operands = (x.ref, ()), (self.factors(cta), ()), x.first
        return hp.inline(body, *operands, results=[(fragments.registers(k_tiles, tokens), jnp.int32)])[0]


def _scale_of(dtype: Any) -> float:
    """Return the factor of weighted sums before they are sent, which keeps them in the range of float16."""
    return 2.0**-8 if dtype == jnp.float16 else 1.0


def _own_pairs(channels: int, tokens: int) -> int:
    """Return the number of pairs of channels that a thread of an owner holds."""
    return -(-channels // 2 // OWNERS * tokens // _THREADS)


def _load_own(ref: Any, cta: Any, channels: int, tokens: int, *, of_tokens: bool) -> jax.Array:
    """Load the elements of an array at this CTA's channels: float32 [256 * _own_pairs].

    The array is the residual stream, [tokens * channels], or with `of_tokens` False the norm's weights, [channels].
    """

    def body(ref: Any, cta: Any) -> Any:
        at = [offset if of_tokens else channel for _, channel, offset in _own_offsets(cta, channels, tokens)]
        pairs = [hp.load_vector(ref, offset, count=2).astype(jnp.float32) for offset in at]
        return (hp.strided([value for pair in pairs for value in hp.unpack(pair)]),)

    return hp.inline(body, (ref, ()), cta, results=[(256 * _own_pairs(channels, tokens), jnp.float32)])[0]


def _own_offsets(cta: Any, channels: int, tokens: int) -> list[tuple[Any, Any, Any]]:
    """Return the index in the CTA, the first channel, and the offset of each pair of channels that a thread holds.

    The offset is in [tokens, channels]. Threads beyond the last pair hold the last pair, too.
    """
    each, found = channels // 2 // OWNERS, []
    for n in range(_own_pairs(channels, tokens)):
        pair = hp.thread_of_cta() + n * _THREADS
        pair = hp.minimum(pair, tokens * each - 1)
        token, index = pair // each, pair % each
        channel = (index + cta * each) * 2
        found.append((pair, channel, token * channels + channel))
    return found
