"""What the Mosaic GPU kernel multiplies values by: everything that needs only keys, queries and gates of a row and head.

Single threads compute it while the row's state is on its way. A warp has eight places of a group. Its lanes load the keys of
places and the keys and queries of the row's tokens from where they are, multiply them on tensor cores, and add up the log
decays between a place and a token, one after the other and in the order of the places. So a sum does not depend on how many
tokens come with a call.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, math, memref, vector
from pallas_kernels.gated_delta_rule._gate_code import Gate
from pallas_kernels.gated_delta_rule.deferred._factors import Factors
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_PIECE = 32  # keys of a vector that the four lanes of a row have, eight each
_ROWS = 8  # places that a warp has, and tokens in a tile of the product, which also has their queries


class Inputs(NamedTuple):
    """References to the inputs of one head, in the GPU's memory.

    Attributes:
        queries: Those of all tokens of the call. [tokens, key_dim], a part of the array of all channels
        keys: Like the queries.
        a: The raw decays of all tokens. [tokens], a part of the array of all heads
        b: The raw projections of beta, like `a`.
        A_log: The logarithm of the decay rate. [1]
        dt_bias: What is added to `a`. [1]
        ring_k: The ring's keys, which get those of the row's tokens. [ring places, key_dim]
        ring_g: The ring's log decays, which get those of the row's tokens. [ring places]
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
    """References to shared memory that gets the results.

    Attributes:
        x: The vectors, 0 for those that do not exist. [vectors, key_dim], tiled
        weight: The factors of the corrections, 0 for places that a vector does not see. float32 [groups, vectors, places]
        factors: All other factors: see `Factors`. float32
        fold: The keys of group 0, 0 for places without an entry. [places, key_dim], tiled
        row_bytes: The bytes of a row of a tile of `x`. Those of `fold` have `places` keys.
    """

    x: Any
    weight: Any
    factors: Any
    fold: Any
    row_bytes: int


class Group(NamedTuple):
    """A row's place in a group, in numbers of the kernel.

    Attributes:
        first: The group's first position.
        low: Its first position of which there can be an entry.
        place: Its first place in the ring.
        start: The row's first token in the call.
        count: The number of the row's tokens.
        position: The position of the first one.
    """

    first: Any
    low: Any
    place: Any
    start: Any
    count: Any
    position: Any


def store_weights(
    number: int,
    inputs: Inputs,
    group: Group,
    gate: Gate,
    results: Results,
    folds: Any,
    keeps_keys: Any,
    keeps_decays: Any,
) -> None:
    """Computes the results of a group, and stores the entries of the row's tokens in the ring.

    Args:
        number: 0 for the group of the row's base, and 1 for the next one.
        inputs: The inputs.
        group: The group.
        gate: How gates are computed.
        results: The results. The vectors and those of the fold are stored for group 0 only.
        folds: Whether the fold's keys are wanted.
        keeps_keys: Whether the keys of the row's tokens are stored. One program for each head of keys does.
        keeps_decays: Whether their log decays are stored. One program for each head of values does.
    """
    length, key_dim = inputs.ring_k.shape[0] // 2, inputs.keys.shape[1]
    vectors, places = results.weight.shape[1:]
    tokens = inputs.keys.shape[0]
    options = dict(
        number=number, gate=gate, length=length, key_dim=key_dim, vectors=vectors, places=places, tokens=tokens
    )
    numbers = *group, *(flag.astype("int32") for flag in (folds, keeps_keys, keeps_decays))

    def body(_: Any, *given: Any) -> None:
        refs, given = Inputs(*given[: len(inputs)]), given[len(inputs) :]
        x, weight, factors, fold, *rest = given
        tiles = Results(x, weight, factors, fold, results.row_bytes)
        _Threads(refs, tiles, Group(*rest[: len(group)]), *rest[len(group) :], **options).run()

    tiled = lambda ref, row_bytes: (ref, pm.tiling(ref.dtype, swizzle=row_bytes))
    tiles = [tiled(results.x, results.row_bytes), (results.weight, ()), (results.factors, ())]
    tiles += [tiled(results.fold, 2 * places)]
    pm.inline(body, *((ref, ()) for ref in inputs), *tiles, *numbers)
    pm.commit()


class _Threads:
    """The code of single threads: see `store_weights`."""

    def __init__(
        self, inputs: Inputs, results: Results, group: Group, folds: Any, keeps_keys: Any, keeps_decays: Any, *,
        number: int, gate: Gate, length: int, key_dim: int, vectors: int, places: int, tokens: int,
    ) -> None:  # fmt: skip
        self.inputs, self.results, self.group, self.gate = inputs, results, group, gate
        self.folds, self.keeps_keys, self.keeps_decays = folds, keeps_keys, keeps_decays
        self.number, self.length, self.pieces = number, length, key_dim // _PIECE
        self.vectors, self.places, self.last = vectors, places, tokens - 1
        self.kind = ir.MemRefType(inputs.keys.type).element_type
        lane, self.warp = code.lane_and_warp(pm.thread_index())
        self.row, self.quarter = arith.shrui(lane, pm.constant(2)), arith.andi(lane, pm.constant(3))
        self.column = code.scaled(self.quarter, 8)
        self.lane = arith.andi(lane, pm.constant(places - 1))

    def run(self) -> None:
        """Runs the warps that have places."""
        with pm.only_if(code.is_less(self.warp, self.places // _ROWS)):
            place = code.total(code.scaled(self.warp, _ROWS), self.row)
            # All loads come first, so that they wait for the memory together.
            keys, exists = self.keys_of(place), self.exists(place)
            firsts = range(0, self.vectors // 2, _ROWS)
            tiles = [self.vectors_of(first) for first in firsts]
            betas = [code.load_number(self.inputs.b, self.token_of(first)) for first in firsts]
            raw, stored, rate, bias = self.load_decay()
            # Vectors are used and stored before anything else, so that their registers are free again.
            products = [self.products(tile, keys) for tile in tiles]
            factors = [(self.factor(key, 1.0), self.factor(query, self.gate.scale)) for key, query in tiles]
            if self.number == 0:
                with pm.only_if(_is_set(self.folds)):
                    self.store_row(self.results.fold, 2 * self.places, place, keys, exists)
            for first, tile in zip(firsts, tiles, strict=True):
                self.store_vectors(first, *tile)
            decays = self.log_decays(raw, stored, rate, bias)
            if self.number == 0:
                self.store_fold(decays)
            for first, sums, factor, beta in zip(firsts, products, factors, betas, strict=True):
                self.store_tile(first, sums, factor, beta, decays)

    def exists(self, place: Any) -> Any:
        """Whether there is an entry of a place, of the ring or of the call."""
        group = self.group
        return code.is_between(code.total(group.first, place), group.low, code.total(group.position, group.count))

    def is_new(self, place: Any) -> Any:
        """Whether the entry of a place is that of one of the row's tokens."""
        group = self.group
        return code.is_between(code.total(group.first, place), group.position, code.total(group.position, group.count))

    def token_at(self, place: Any) -> Any:
        """The token of the call that has a place, or any token if there is none."""
        group = self.group
        token = arith.subi(code.total(group.start, group.first, place), group.position)
        return code.clamped(token, pm.constant(0), pm.constant(self.last))

    def token_of(self, first: int) -> Any:
        """The token of the call that this lane has of a tile, or any token if there is none."""
        token = code.total(self.group.start, self.row, pm.constant(first))
        return arith.minsi(token, pm.constant(self.last))

    def keys_of(self, place: Any) -> list[list[Any]]:
        """Loads this lane's part of the key of a place. It is anything if there is no entry."""
        group = self.group
        is_old = arith.cmpi(arith.CmpIPredicate.slt, code.total(group.first, place), group.position)
        in_ring = self.address(self.inputs.ring_k, code.total(group.place, place))
        at = code.either(is_old, in_ring, self.address(self.inputs.keys, self.token_at(place)))
        return [code.load_words(at, 2 * _PIECE * piece) for piece in range(self.pieces)]

    def vectors_of(self, first: int) -> tuple[list[list[Any]], list[list[Any]]]:
        """Loads this lane's part of its token's key and query."""
        at = [self.address(ref, self.token_of(first)) for ref in (self.inputs.keys, self.inputs.queries)]
        key, query = ([code.load_words(one, 2 * _PIECE * piece) for piece in range(self.pieces)] for one in at)
        return key, query

    def address(self, ref: Any, row: Any) -> Any:
        """The address of this lane's first numbers in a row of an array [rows, key_dim], or of a part of a wider one."""
        return pm.address_in_row(ref, row, self.column)

    def load_decay(self) -> tuple[Any, Any, Any, Any]:
        """Loads what the log decay of the place that has the lane's number is computed from, and the one in the ring."""
        inputs, zero = self.inputs, pm.constant(0)
        at = self.token_at(self.lane), code.total(self.group.place, self.lane), zero, zero
        refs = inputs.a, inputs.ring_g, inputs.A_log, inputs.dt_bias
        raw, stored, rate, bias = (code.load_number(ref, index) for ref, index in zip(refs, at, strict=True))
        return raw, stored, rate, bias

    def log_decays(self, raw: Any, stored: Any, rate: Any, bias: Any) -> list[Any]:
        """Returns the log decays of all places, 0 for those without an entry. New ones are stored in the ring."""
        decay = self.gate.log_decay(raw, rate, bias)
        is_new, exists = self.is_new(self.lane), self.exists(self.lane)
        with pm.only_if(_all(is_new, _is_set(self.keeps_decays), code.is_less(self.warp, 1))):
            memref.store(decay, self.inputs.ring_g, [code.index(code.total(self.group.place, self.lane))])
        found = code.either(is_new, decay, code.either(exists, stored, code.number(0.0)))
        return [pm.from_lane(found, place) for place in range(self.length)]

    def products(self, tile: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
        """Multiplies the keys and queries of up to eight tokens with the keys of the warp's places: see `multiply_tile`."""
        sums = [code.number(0.0)] * 4
        for key, query, right in zip(*tile, keys, strict=True):
            for turn in (0, 2):
                left = [words[turn + n] for n in range(2) for words in (key, query)]
                sums = code.multiply_tile(sums, left, right[turn : turn + 2], self.kind)
        return sums

    def factor(self, words: Sequence[Sequence[Any]], factor: float) -> Any:
        """Returns the factor of a vector, whose parts four lanes have."""
        if not self.gate.use_qk_l2norm:
            return code.number(factor)
        wide = [code.wide(code.numbers(part, self.kind)) for part in words]
        squares = code.added([arith.mulf(each, each) for each in wide])
        total = vector.reduction(ir.F32Type.get(), vector.CombiningKind.ADD, squares)
        total = pm.sum_over(total, (1, 2))
        return arith.mulf(math.rsqrt(arith.addf(total, code.number(L2_EPSILON))), code.number(factor))

    def store_fold(self, decays: Sequence[Any]) -> None:
        """Stores the factors of a fold of the group."""
        at, zero = Factors.of(self.vectors, self.places), code.number(0.0)
        after = [code.either(_is_above(other, self.lane), decay, zero) for other, decay in enumerate(decays)]
        memref.store(math.exp(code.added(after)), self.results.factors, [_offset(self.lane, at.fold)])
        memref.store(math.exp(code.added(decays)), self.results.factors, [_offset(pm.constant(0), at.decay)])

    def store_vectors(self, first: int, key: Sequence[Sequence[Any]], query: Sequence[Sequence[Any]]) -> None:
        """Stores the keys and queries of up to eight tokens, and in the ring those keys that belong to the group."""
        token = code.total(self.row, pm.constant(first))
        exists = arith.cmpi(arith.CmpIPredicate.slt, token, self.group.count)
        place = arith.subi(code.total(self.group.position, token), self.group.first)
        with pm.only_if(code.is_less(self.warp, 1)):
            if self.number == 0:
                for kind, words in enumerate((key, query)):
                    row = code.total(token, pm.constant(kind * self.vectors // 2))
                    self.store_row(self.results.x, self.results.row_bytes, row, words, exists)
            is_own = code.is_between(place, pm.constant(0), pm.constant(self.length))
            with pm.only_if(_all(exists, is_own, _is_set(self.keeps_keys))):
                to = self.address(self.inputs.ring_k, code.total(self.group.place, place))
                for piece, words in enumerate(key):
                    code.store_words(to, words, 2 * _PIECE * piece)

    def store_row(self, ref: Any, row_bytes: int, row: Any, pieces: Sequence[Sequence[Any]], exists: Any) -> None:
        """Stores this lane's parts of a row of a tiled array, or 0.

        Of a row of a tile, parts of 16 bytes change places. In which way depends on the row's place among eight.

        Args:
            ref: The array.
            row_bytes: The bytes of a row of a tile.
            row: The row.
            pieces: The parts, four words each.
            exists: Whether the row has numbers. If not, 0 is stored.
        """
        per_row = row_bytes // 16
        in_tile = arith.andi(row, pm.constant(7))
        swap = arith.andi(arith.shrui(code.scaled(in_tile, row_bytes), pm.constant(7)), pm.constant(per_row - 1))
        for piece, words in enumerate(pieces):
            part = code.total(self.quarter, pm.constant(4 * piece))
            tile = arith.divui(part, pm.constant(per_row))
            column = code.scaled(arith.xori(arith.remui(part, pm.constant(per_row)), swap), 8)
            kept = [code.either(exists, word, pm.constant(0)) for word in words]
            where = [code.index(each) for each in (arith.shrui(row, pm.constant(3)), tile, in_tile, column)]
            vector.store(code.numbers(kept, self.kind), ref, where, alignment=16)

    def store_tile(
        self, first: int, products: Sequence[Any], factors: Sequence[Any], beta: Any, decays: Sequence[Any]
    ) -> None:
        """Stores the weights and factors of the keys and queries of up to eight tokens."""
        group, zero, at = self.group, code.number(0.0), Factors.of(self.vectors, self.places)
        token = code.total(self.row, pm.constant(first))
        place = arith.subi(code.total(group.position, token), group.first)
        until = [code.either(_is_above(other, place), zero, decay) for other, decay in enumerate(decays)]
        of_state, of_group = math.exp(code.added(until)), self.number * self.vectors
        own = [
            code.total(code.scaled(self.warp, _ROWS), code.scaled(self.quarter, 2), pm.constant(n)) for n in range(2)
        ]
        between = []
        for start in own:
            after = [code.either(_is_above(other, start), decay, zero) for other, decay in enumerate(until)]
            between.append(math.exp(code.added(after)))
        low = arith.subi(group.low, group.first)
        # A key sees the places before its own, and a query sees its token's place too.
        ends = place, code.total(place, pm.constant(1))
        for kind, (end, factor) in enumerate(zip(ends, factors, strict=True)):
            index = code.total(token, pm.constant(kind * self.vectors // 2))
            seen = []
            for start, product, decay in zip(own, products[2 * kind : 2 * kind + 2], between, strict=True):
                weight = arith.mulf(arith.mulf(product, decay), factor)
                seen.append(code.either(code.is_between(start, low, end), weight, zero))
            where = [code.index(each) for each in (pm.constant(self.number), index, own[0])]
            vector.store(code.from_parts(seen), self.results.weight, where, alignment=8)
            memref.store(arith.mulf(of_state, factor), self.results.factors, [_offset(index, at.of_state + of_group)])
        memref.store(
            arith.mulf(self.gate.beta(beta), factors[0]), self.results.factors, [_offset(token, at.of_key + of_group)]
        )


def _all(*conditions: Any) -> Any:
    """Whether all conditions are met."""
    return functools.reduce(arith.andi, conditions)


def _is_set(flag: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.ne, flag, pm.constant(0))


def _is_above(number: int, x: Any) -> Any:
    """Whether a constant is greater than an integer."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, pm.constant(number))


def _offset(index: Any, first: int) -> Any:
    return code.index(code.total(index, pm.constant(first)))
