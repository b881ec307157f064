"""Decayed Gram coefficients of a fold group on Hopper GPUs: all products that need only keys, queries and gates.

Single threads compute them while the row's state is copied to SMEM. A warp has eight ring slots of a group. Its lanes load
the slots' keys and the keys and queries of the row's tokens from GMEM, multiply them on tensor cores, and add up the log
decays between a slot and a token, one after the other and in the order of the slots. So a sum does not depend on the number
of tokens of a call.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.gated_delta_rule._arguments import Options
from pallas_kernels.gated_delta_rule._gate_code import beta, log_decay
from pallas_kernels.gated_delta_rule.deferred._factors import Factors
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_KEYS = 32  # keys of a vector that four lanes load at once, eight each
_ROWS = 8  # ring slots of a warp, and tokens in a tile of the product, which also has their queries


class Inputs(NamedTuple):
    """References to the inputs of one head, in GMEM.

    Attributes:
        queries: The queries of all tokens of the call. [tokens, key_dim], a view of the array of all channels
        keys: Like the queries.
        a: The raw decays of all tokens. [tokens], a view of the array of all heads
        b: The raw projections of beta, like `a`.
        A_log: The logarithm of the decay rate. [1]
        dt_bias: The bias that is added to `a`. [1]
        ring_k: The ring's keys, to which the row's keys are stored. [ring_slots, key_dim]
        ring_g: The ring's log decays, to which the row's are stored. [ring_slots]
    """

    queries: Any
    keys: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    ring_k: Any
    ring_g: Any


class Results(NamedTuple):
    """References to SMEM that receives the results.

    Attributes:
        x: The vectors, 0 for those that do not exist. [vectors, key_dim], tiled
        coefficients: The corrections' coefficients, 0 for slots that a vector does not see. float32 [groups, vectors,
            group_slots]
        factors: All other factors: see `Factors`. float32
        fold: The keys of group 0, 0 for slots without an entry. [group_slots, key_dim], tiled
        row_bytes: The bytes of a row of a tile of `x`. A row of a tile of `fold` has `group_slots` keys.
    """

    x: Any
    coefficients: Any
    factors: Any
    fold: Any
    row_bytes: int


class Group(NamedTuple):
    """The indices of a row in a group, int32.

    Attributes:
        first: The group's first position.
        low: Its first position that may have an entry.
        slot: Its first slot in the ring.
        start: The row's first token in the call.
        count: The number of the row's tokens.
        position: The position of the first one.
    """

    first: Any
    low: Any
    slot: Any
    start: Any
    count: Any
    position: Any


def store_gram(
    index: int,
    inputs: Inputs,
    group: Group,
    options: Options,
    results: Results,
    folds: Any,
    keeps_keys: Any,
    keeps_decays: Any,
) -> None:
    """Compute the coefficients of a group, and store the entries of the row's tokens in the ring.

    Args:
        index: 0 for the group of the row's base, and 1 for the next one.
        inputs: The inputs of the head.
        group: The indices of the row in the group.
        options: The op's options.
        results: Receives the results. `x`, `fold` and the fold's factors are stored for group 0 only.
        folds: Whether the fold's keys are needed.
        keeps_keys: Whether the keys of the row's tokens are stored. One CTA for each key head stores them.
        keeps_decays: Whether their log decays are stored. One CTA for each value head stores them.
    """
    length, key_dim = inputs.ring_k.shape[0] // 2, inputs.keys.shape[1]
    vectors, group_slots = results.coefficients.shape[1:]
    tokens = inputs.keys.shape[0]
    sizes = dict(length=length, key_dim=key_dim, tokens=tokens, vectors=vectors, group_slots=group_slots)
    scalars = *group, *(flag.astype("int32") for flag in (folds, keeps_keys, keeps_decays))

    def body(*given: Any) -> None:
        refs, given = Inputs(*given[: len(inputs)]), given[len(inputs) :]
        x, coefficients, factors, fold, *rest = given
        tiles = Results(x, coefficients, factors, fold, results.row_bytes)
        _Threads(
            refs, tiles, Group(*rest[: len(group)]), *rest[len(group) :], index=index, options=options, **sizes
        ).run()

    tiled = lambda ref, row_bytes: (ref, hp.tiling(ref.dtype, swizzle=row_bytes))
    tiles = [tiled(results.x, results.row_bytes), (results.coefficients, ()), (results.factors, ())]
    tiles += [tiled(results.fold, 2 * group_slots)]
    hp.inline(body, *((ref, ()) for ref in inputs), *tiles, *scalars)
    hp.commit_smem()


class _Threads:
    """The code of single threads: see `store_gram`."""

    def __init__(
        self, inputs: Inputs, results: Results, group: Group, folds: Any, keeps_keys: Any, keeps_decays: Any, *,
        index: int, options: Options, length: int, key_dim: int, vectors: int, group_slots: int, tokens: int,
    ) -> None:  # fmt: skip
        self.inputs, self.results, self.group, self.options = inputs, results, group, options
        self.folds, self.keeps_keys, self.keeps_decays = folds, keeps_keys, keeps_decays
        self.index, self.length, self.slices = index, length, key_dim // _KEYS
        self.vectors, self.group_slots, self.last = vectors, group_slots, tokens - 1
        self.kind = inputs.keys.dtype
        lane, self.warp = hp.lane_and_warp(hp.thread_index())
        self.row, self.quarter = lane >> 2, lane & 3
        self.column = self.quarter * 8
        self.lane = lane & (group_slots - 1)

    def run(self) -> None:
        """Run the warps that have slots."""
        with hp.predicated(self.warp < self.group_slots // _ROWS):
            slot = self.warp * _ROWS + self.row
            # All loads come first, so that they wait for the memory together.
            keys, exists = self.keys_of(slot), self.exists(slot)
            firsts = range(0, self.vectors // 2, _ROWS)
            tiles = [self.vectors_of(first) for first in firsts]
            betas = [self.inputs.b[self.token_of(first)].astype(jnp.float32) for first in firsts]
            raw, stored, rate, bias = self.load_decay()
            # Vectors are used and stored before anything else, so that their registers are free again.
            products = [self.products(tile, keys) for tile in tiles]
            factors = [(self.factor(key, 1.0), self.factor(query, self.options.scale)) for key, query in tiles]
            if self.index == 0:
                with hp.predicated(_is_set(self.folds)):
                    self.store_row(self.results.fold, 2 * self.group_slots, slot, keys, exists)
            for first, tile in zip(firsts, tiles, strict=True):
                self.store_vectors(first, *tile)
            decays = self.log_decays(raw, stored, rate, bias)
            if self.index == 0:
                self.store_fold(decays)
            for first, sums, factor, raw_beta in zip(firsts, products, factors, betas, strict=True):
                self.store_tile(first, sums, factor, raw_beta, decays)

    def exists(self, slot: Any) -> Any:
        """Whether slot `slot` of the group has an entry, in the ring or of the call."""
        group = self.group
        return hp.is_between(group.first + slot, group.low, group.position + group.count)

    def is_new(self, slot: Any) -> Any:
        """Whether the entry of a slot is one of the row's tokens."""
        group = self.group
        return hp.is_between(group.first + slot, group.position, group.position + group.count)

    def token_at(self, slot: Any) -> Any:
        """The token of the call whose entry belongs in a slot, or any token if there is none."""
        group = self.group
        token = group.start + group.first + slot - group.position
        return hp.clamp(token, 0, self.last)

    def token_of(self, first: int) -> Any:
        """The call's token in this lane's row of a tile, or any token if there is none."""
        token = hp.add(self.group.start, self.row, first)
        return hp.minimum(token, self.last)

    def keys_of(self, slot: Any) -> list[list[Any]]:
        """Load this lane's slices of the key in a slot. Undefined if the slot has no entry: the caller masks it."""
        group = self.group
        is_old = group.first + slot < group.position
        in_ring = self.address(self.inputs.ring_k, group.slot + slot)
        at = hp.select(is_old, in_ring, self.address(self.inputs.keys, self.token_at(slot)))
        return [hp.load_words(at, 2 * _KEYS * n) for n in range(self.slices)]

    def vectors_of(self, first: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """Load this lane's slices of its token's key and query."""
        at = [self.address(ref, self.token_of(first)) for ref in (self.inputs.keys, self.inputs.queries)]
        key, query = ([hp.load_words(one, 2 * _KEYS * n) for n in range(self.slices)] for one in at)
        return key, query

    def address(self, ref: Any, row: Any) -> Any:
        """The address of this lane's first elements in a row of an array [rows, key_dim], or of a view of a wider one."""
        return hp.row_address(ref, row, self.column)

    def load_decay(self) -> tuple[Any, Any, Any, Any]:
        """Load the raw gate of the slot with the lane's index, its log decay in the ring, and A_log and dt_bias."""
        inputs, zero = self.inputs, hp.i32(0)
        at = self.token_at(self.lane), self.group.slot + self.lane, zero, zero
        refs = inputs.a, inputs.ring_g, inputs.A_log, inputs.dt_bias
        raw, stored, rate, bias = (ref[index].astype(jnp.float32) for ref, index in zip(refs, at, strict=True))
        return raw, stored, rate, bias

    def log_decays(self, raw: Any, stored: Any, rate: Any, bias: Any) -> list[Any]:
        """Return the log decays of all slots, 0 for slots without an entry. New ones are stored in the ring."""
        decay = log_decay(self.options.gates, raw, rate, bias)
        is_new, exists = self.is_new(self.lane), self.exists(self.lane)
        with hp.predicated(_all(is_new, _is_set(self.keeps_decays), self.warp < 1)):
            self.inputs.ring_g[self.group.slot + self.lane] = decay
        found = hp.select(is_new, decay, hp.select(exists, stored, 0.0))
        return [hp.shfl_idx(found, slot) for slot in range(self.length)]

    def products(self, tile: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
        """Multiply the keys and queries of up to eight tokens with the keys of the warp's slots: see `mma`."""
        sums = [hp.f32(0.0)] * 4
        for key, query, right in zip(*tile, keys, strict=True):
            for first in (0, 2):
                left = [words[first + n] for n in range(2) for words in (key, query)]
                sums = hp.mma(sums, left, right[first : first + 2], self.kind)
        return sums

    def factor(self, words: Sequence[Sequence[Any]], factor: float) -> Any:
        """Return a vector's norm factor times `factor`. Four lanes have slices of the vector."""
        if not self.options.use_qk_l2norm:
            return hp.f32(factor)
        wide = [hp.from_words(slice_, self.kind).astype(jnp.float32) for slice_ in words]
        squares = hp.add(*[each * each for each in wide])
        total = hp.reduce_add(squares)
        total = hp.sum_over_lanes(total, (1, 2))
        return hp.rsqrt(total + L2_EPSILON) * factor

    def store_fold(self, decays: Sequence[Any]) -> None:
        """Store the factors of a fold of the group."""
        at, zero = Factors.of(self.vectors, self.group_slots), hp.f32(0.0)
        after = [hp.select(_is_above(other, self.lane), decay, zero) for other, decay in enumerate(decays)]
        self.results.factors[_offset(self.lane, at.fold)] = hp.exp(hp.add(*after))
        self.results.factors[_offset(hp.i32(0), at.decay)] = hp.exp(hp.add(*decays))

    def store_vectors(self, first: int, key: Sequence[Sequence[Any]], query: Sequence[Sequence[Any]]) -> None:
        """Store the keys and queries of up to eight tokens, and in the ring the group's new keys."""
        token = self.row + first
        exists = token < self.group.count
        slot = self.group.position + token - self.group.first
        with hp.predicated(self.warp < 1):
            if self.index == 0:
                for kind, words in enumerate((key, query)):
                    row = token + kind * self.vectors // 2
                    self.store_row(self.results.x, self.results.row_bytes, row, words, exists)
            is_own = hp.is_between(slot, 0, self.length)
            with hp.predicated(_all(exists, is_own, _is_set(self.keeps_keys))):
                to = self.address(self.inputs.ring_k, self.group.slot + slot)
                for n, words in enumerate(key):
                    hp.store_words(to, words, 2 * _KEYS * n)

    def store_row(self, ref: Any, row_bytes: int, row: Any, slices: Sequence[Sequence[Any]], exists: Any) -> None:
        """Store this lane's slices of a row, four words each, in a swizzled array, or 0 for a row that does not exist.

        The swizzle of a row's groups of 16 bytes depends on the row's index among eight. Tiles have rows of `row_bytes`.
        """
        per_row = row_bytes // 16
        in_tile = row & 7
        swap = ((in_tile * row_bytes) >> 7) & (per_row - 1)
        for n, words in enumerate(slices):
            group = self.quarter + 4 * n
            tile = group // per_row
            column = ((group % per_row) ^ swap) * 8
            kept = [hp.select(exists, word, 0) for word in words]
            where = [hp.index(each) for each in (row >> 3, tile, in_tile, column)]
            hp.store_vector(hp.from_words(kept, self.kind), ref, *where)

    def store_tile(
        self, first: int, products: Sequence[Any], factors: Sequence[Any], raw_beta: Any, decays: Sequence[Any]
    ) -> None:
        """Store the coefficients and factors of the keys and queries of up to eight tokens."""
        group, zero, at = self.group, hp.f32(0.0), Factors.of(self.vectors, self.group_slots)
        token = self.row + first
        slot = group.position + token - group.first
        until = [hp.select(_is_above(other, slot), zero, decay) for other, decay in enumerate(decays)]
        of_state, of_group = hp.exp(hp.add(*until)), self.index * self.vectors
        own = [hp.add(self.warp * _ROWS, self.quarter * 2, n) for n in range(2)]
        between = []
        for start in own:
            after = [hp.select(_is_above(other, start), decay, zero) for other, decay in enumerate(until)]
            between.append(hp.exp(hp.add(*after)))
        low = group.low - group.first
        # A key sees the slots before its own, and a query sees its token's slot too.
        ends = slot, slot + 1
        for kind, (end, factor) in enumerate(zip(ends, factors, strict=True)):
            index = token + kind * self.vectors // 2
            seen = []
            for start, product, decay in zip(own, products[2 * kind : 2 * kind + 2], between, strict=True):
                coefficient = product * decay * factor
                seen.append(hp.select(hp.is_between(start, low, end), coefficient, zero))
            where = [hp.index(each) for each in (hp.i32(self.index), index, own[0])]
            hp.store_vector(hp.pack(seen), self.results.coefficients, *where)
            self.results.factors[_offset(index, at.of_state + of_group)] = of_state * factor
        self.results.factors[_offset(token, at.of_key + of_group)] = beta(self.options.gates, raw_beta) * factors[0]


def _all(*conditions: Any) -> Any:
    """Whether all conditions are met."""
    return functools.reduce(operator.and_, conditions)


def _is_set(flag: Any) -> Any:
    return flag != 0


def _is_above(constant: int, x: Any) -> Any:
    """Whether a constant is greater than an integer."""
    return x < constant


def _offset(index: Any, first: int) -> Any:
    return hp.index(index + first)
