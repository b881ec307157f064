"""gated_delta_rule's update on Hopper GPUs. A warp has some value dims of one head of one row.

The state is in registers. A lane has 16 bytes of keys of every value dim, or of every second or fourth one, so that what it
loads and stores are neighbours of what its own neighbours do. It multiplies them with the same keys of the token's key and
query. Then the lanes add up their sums: they exchange half of them with each partner, so at the end every lane has the whole
sum of one value dim. Products are fused with sums, which a kernel that XLA gives to Triton's compiler cannot do.

The order of a sum depends on the state's dtype and key_dim only, so a state has the same bits after a decode row and after a
verify row.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, math, memref, vector
from pallas_kernels.blocks import NULL_BLOCK, StateLayout
from pallas_kernels.gated_delta_rule.gate_code import Gate
from pallas_kernels.gated_delta_rule.xla import L2_EPSILON

_KEY_DIMS = (64, 128)
_WARPS, _LANES = 4, 32
_LOAD_BYTES = 16  # that a lane loads at once
_MAX_VALUES = 16  # value dims of a warp: their keys fill 64 registers of a lane


def loads_of_lane(window: int, key_dim: int, itemsize: int) -> int:
    """Returns the number of loads by which a lane gets its part of a state, for rows of at most `window` tokens."""
    values_of_load = _LANES // _lanes_of_row(key_dim, itemsize)
    return _MAX_VALUES // values_of_load if window > 1 else min(4, _MAX_VALUES // values_of_load)


def _lanes_of_row(key_dim: int, itemsize: int) -> int:
    """Returns the number of lanes that have the keys of a value dim."""
    return key_dim * itemsize // _LOAD_BYTES


def unsupported(qkv: jax.Array, a: jax.Array, pool: jax.Array, layout: StateLayout) -> str | None:
    """Returns the reason why the kernel cannot run these arguments, or None if it can."""
    if layout != "VK":
        return f"layout must be 'VK', got {layout!r}"
    if a.ndim != 2:
        return f"a must have a decay per head [tokens, value_heads], got {list(a.shape)}"
    value_dim, key_dim = pool.shape[3:]
    if key_dim not in _KEY_DIMS or value_dim % (_WARPS * _MAX_VALUES):
        return f"key_dim must be 64 or 128 and value_dim a multiple of 64, got {key_dim} and {value_dim}"
    if 4 not in (qkv.dtype.itemsize, 2 * qkv.dtype.itemsize) or 4 not in (pool.dtype.itemsize, 2 * pool.dtype.itemsize):
        return f"qkv and pool must have 16 or 32 bits, got {qkv.dtype} and {pool.dtype}"
    return None


def _kernel(
    layer_of, query_start_loc, read_block, write_blocks, qkv, a, b, A_log, dt_bias, pool, out, *, loads: int, gate: Gate
):  # fmt: skip
    """Handles some value dims of one head of one row. The arguments are the arrays of `gated_delta_rule_update`."""
    row, head, part = (pm.axis_index(axis) for axis in ("row", "head", "part"))
    rows = read_block.shape[0]
    # All numbers are loaded at once. The compiler would load some of them only when it knows others.
    start, end, total, layer, read = pm.computed(
        (query_start_loc[row], query_start_loc[row + 1], query_start_loc[rows], layer_of[0], read_block[row])
    )

    def body(_: Any, *given: Any) -> None:
        _Warp(*given, loads=loads, gate=gate).run()

    refs = write_blocks, qkv, a, b, A_log, dt_bias, pool, out
    pm.inline(body, *((ref, ()) for ref in refs), row, head, part, start, end, total, layer, read)


class _Warp:
    """The code of single threads. Lists of sums have one number for each load of a lane: see `loads_of_lane`."""

    def __init__(
        self, write_blocks: Any, qkv: Any, a: Any, b: Any, A_log: Any, dt_bias: Any, pool: Any, out: Any,
        row: Any, head: Any, part: Any, start: Any, end: Any, total: Any, layer: Any, read: Any, *,
        loads: int, gate: Gate,
    ) -> None:  # fmt: skip
        self.write_blocks, self.qkv, self.a, self.b, self.pool, self.out = write_blocks, qkv, a, b, pool, out
        self.row, self.head, self.start, self.end, self.total = row, head, start, end, total
        self.layer, self.read, self.loads, self.gate = layer, read, loads, gate
        shape, self.kind = ir.MemRefType(pool.type).shape, ir.MemRefType(pool.type).element_type
        _, self.blocks, self.heads, self.value_dim, self.key_dim = shape
        self.window, self.rows = ir.MemRefType(write_blocks.type).shape[1], ir.MemRefType(write_blocks.type).shape[0]
        self.tokens, channels = ir.MemRefType(qkv.type).shape
        self.keys = _LOAD_BYTES // pm.bytes_of(self.kind)
        self.lanes = self.key_dim // self.keys  # that have the keys of a value dim
        self.values_of_load = _LANES // self.lanes
        thread = pm.thread_index()
        warp, self.lane = arith.shrui(thread, pm.constant(5)), arith.andi(thread, pm.constant(_LANES - 1))
        self.key = code.scaled(arith.andi(self.lane, pm.constant(self.lanes - 1)), self.keys)
        values = loads * self.values_of_load  # of a warp
        first = code.total(code.scaled(part, _WARPS * values), code.scaled(warp, values))
        self.value = code.total(first, arith.divui(self.lane, pm.constant(self.lanes)))  # of the lane's first load
        self.own_value = code.total(self.value, code.scaled(self.own_load(), self.values_of_load))
        key_channels = (channels - self.heads * self.value_dim) // 2
        key_head = arith.divui(head, pm.constant(self.heads // (key_channels // self.key_dim)))
        self.query_channel = code.total(code.scaled(key_head, self.key_dim), self.key)
        self.key_channel = code.total(self.query_channel, pm.constant(key_channels))
        self.value_channel = code.total(
            pm.constant(2 * key_channels), code.scaled(head, self.value_dim), self.own_value
        )
        self.rate, self.bias = (self.load_number(ref, head) for ref in (A_log, dt_bias))

    def run(self) -> None:
        """Runs the row's tokens, and clears this row's share of the outputs of tokens after the last row."""
        with pm.only_if(arith.cmpi(arith.CmpIPredicate.slt, self.start, self.end)):
            at = self.address(self.read)
            exists = code.differs(self.read, NULL_BLOCK)
            state = [code.load_words_if(exists, at, self.offset(n)) for n in range(self.loads)]
            inputs = self.take(self.start)
            values = [*(x for words in state for x in self.wide(words)), *inputs]
            if self.window == 1:
                self.advance(self.start, values)
            else:
                pm.repeated(code.index(self.start), code.index(self.end), self.advance_in_loop, values)
        self.clear()

    def clear(self) -> None:
        """Writes zeros to the outputs of some tokens after the last row: of as many rows, each has every other one."""
        first, rows = code.total(self.total, self.row), pm.constant(self.rows)
        left = arith.maxsi(arith.subi(pm.constant(self.tokens + self.rows - 1), first), pm.constant(0))

        def clear(n: Any, values: list[Any]) -> list[Any]:
            token = code.total(first, arith.muli(arith.index_cast(pm.integer(), n), rows))
            self.store_output(token, code.number(0.0))
            return values

        pm.repeated(code.index(pm.constant(0)), code.index(arith.divui(left, rows)), clear, [])

    def load_number(self, ref: Any, *at: Any) -> Any:
        """Loads a number as float32."""
        x = memref.load(ref, [code.index(index) for index in at])
        return x if x.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), x)

    def take(self, token: Any) -> list[Any]:
        """Loads what a token needs: its query and key, its value, its gates, and the block that gets its state."""
        kind = ir.MemRefType(self.qkv.type).element_type
        vectors = []
        for channel in (self.query_channel, self.key_channel):
            at, alignment = [code.index(token), code.index(channel)], min(16, self.keys * pm.bytes_of(kind))
            vectors.append(vector.load(code.vector_type(self.keys, kind), self.qkv, at, alignment=alignment))
        value = self.load_number(self.qkv, token, self.value_channel)
        gates = [self.load_number(ref, token, self.head) for ref in (self.a, self.b)]
        place = arith.subi(token, self.start)
        return [*vectors, value, *gates, memref.load(self.write_blocks, [code.index(self.row), code.index(place)])]

    def advance_in_loop(self, number: Any, values: list[Any]) -> list[Any]:
        """Runs a token. The next one's inputs are loaded before."""
        token = arith.index_cast(pm.integer(), number)
        last = arith.subi(self.end, pm.constant(1))
        following = self.take(arith.minsi(code.total(token, pm.constant(1)), last))
        return [*self.advance(token, values), *following]

    def advance(self, token: Any, values: list[Any]) -> list[Any]:
        """Runs a token. `values` are the lane's part of the state, and what `take` loads. Returns the new part."""
        numbers, (query, key, value, raw, beta, write) = values[:-6], values[-6:]
        state = [numbers[n : n + self.keys] for n in range(0, len(numbers), self.keys)]
        query, key = (code.parts(code.wide(x)) for x in (query, key))
        query, key, query_of_key = self.scale(query, key)
        decay = math.exp(self.gate.log_decay(raw, self.rate, self.bias))
        before = [[arith.mulf(decay, x) for x in each] for each in (key, query)]
        known, answer = (self.sum([self.product(part, each) for part in state]) for each in before)
        correction = arith.mulf(self.gate.beta(beta), arith.subf(value, known))
        self.store_output(token, math.fma(correction, query_of_key, answer))
        after = []
        for n, part in enumerate(state):
            factor = pm.from_lane(correction, self.lane_of_load(n), of=self.lanes)
            after.append([math.fma(factor, k, arith.mulf(decay, x)) for k, x in zip(key, part, strict=True)])
        at, is_kept = self.address(write), code.differs(write, NULL_BLOCK)
        for n, part in enumerate(after):
            code.store_words_if(is_kept, at, self.narrow(part), self.offset(n))
        return [x for part in after for x in part]

    def scale(self, query: list[Any], key: list[Any]) -> tuple[list[Any], list[Any], Any]:
        """Returns the lane's part of the query and the key, normalised and scaled, and the product of all of both."""
        distances = [1 << n for n in range(self.lanes.bit_length() - 1)]
        whole = lambda x, y: pm.sum_over(self.product(x, y), distances)
        of_query, of_key = code.number(self.gate.scale), code.number(1.0)
        if self.gate.use_qk_l2norm:
            norm = lambda x: math.rsqrt(arith.addf(whole(x, x), code.number(L2_EPSILON)))
            of_query, of_key = arith.mulf(norm(query), of_query), norm(key)
        query, key = ([arith.mulf(f, x) for x in each] for f, each in ((of_query, query), (of_key, key)))
        return query, key, whole(query, key)

    def product(self, x: Sequence[Any], y: Sequence[Any]) -> Any:
        """Returns the product of a lane's parts of two vectors."""
        found = arith.mulf(x[0], y[0])
        for each in zip(x[1:], y[1:], strict=True):
            found = math.fma(*each, found)
        return found

    def sum(self, sums: list[Any]) -> Any:
        """Adds up the sums of all lanes of a value dim. Returns that of the value dim `own_value`."""
        distance = self.lanes // 2
        while len(sums) > 1:
            half, is_upper = len(sums) // 2, self.has_bit(distance)
            lower, upper = sums[:half], sums[half:]
            both = [
                (code.either(is_upper, y, x), code.either(is_upper, x, y)) for x, y in zip(lower, upper, strict=True)
            ]
            sums = [arith.addf(kept, pm.from_partner(given, distance)) for kept, given in both]
            distance //= 2
        while distance:
            sums = [arith.addf(sums[0], pm.from_partner(sums[0], distance))]
            distance //= 2
        return sums[0]

    def has_bit(self, bit: int) -> Any:
        """Returns whether the lane's number has a bit."""
        return code.differs(arith.andi(self.lane, pm.constant(bit)), 0)

    def own_load(self) -> Any:
        """Returns the load whose sum the lane has in the end: see `sum`."""
        own, distance, half = pm.constant(0), self.lanes // 2, self.loads // 2
        while half:
            own = code.total(own, code.either(self.has_bit(distance), pm.constant(half), pm.constant(0)))
            distance, half = distance // 2, half // 2
        return own

    def lane_of_load(self, load: int) -> int:
        """Returns a lane, of those of one value dim, that has the sum of a load."""
        lane, distance, half = 0, self.lanes // 2, self.loads // 2
        while half:
            lane += distance if load & half else 0
            distance, half = distance // 2, half // 2
        return lane

    def address(self, block: Any) -> Any:
        """Returns the address of the lane's first load from a block."""
        block = code.total(code.scaled(self.layer, self.blocks), block)
        row = code.total(code.scaled(code.total(code.scaled(block, self.heads), self.head), self.value_dim), self.value)
        return code.address_in_rows(self.pool, row, self.key_dim, self.key)

    def offset(self, load: int) -> int:
        """Returns the bytes from the lane's first load to another one."""
        return load * self.values_of_load * self.key_dim * pm.bytes_of(self.kind)

    def wide(self, words: Sequence[Any]) -> list[Any]:
        """Returns the float32 numbers of four words of a state."""
        if self.kind == ir.F32Type.get():
            return [arith.bitcast(ir.F32Type.get(), each) for each in words]
        return code.parts(code.wide(code.numbers(words, self.kind)))

    def narrow(self, numbers: Sequence[Any]) -> list[Any]:
        """Returns float32 numbers as four words of a state."""
        if self.kind == ir.F32Type.get():
            return [arith.bitcast(pm.integer(), each) for each in numbers]
        narrow = arith.truncf(code.vector_type(self.keys, self.kind), code.from_parts(numbers))
        return code.parts(code.words(narrow))

    def store_output(self, token: Any, x: Any) -> None:
        """Stores the output of the value dim `own_value`, by the first of the lanes that have it."""
        kind = ir.MemRefType(self.out.type).element_type
        x = x if kind == ir.F32Type.get() else arith.truncf(kind, x)
        others = pm.constant(self.lanes // self.loads - 1)
        with pm.only_if(arith.cmpi(arith.CmpIPredicate.eq, arith.andi(self.lane, others), pm.constant(0))):
            memref.store(x, self.out, [code.index(each) for each in (token, self.head, self.own_value)])


def gated_delta_rule_update(
    qkv: jax.Array,
    a: jax.Array,
    b: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    query_start_loc: jax.Array,
    read_block: jax.Array,
    write_blocks: jax.Array,
    *,
    scale: float,
    use_qk_l2norm: bool,
    layout: StateLayout,
    lower_bound: float | None,
    allow_neg_eigval: bool,
) -> tuple[jax.Array, jax.Array]:
    """Launches the kernel. See api.py."""
    value_heads, value_dim, key_dim = pool.shape[2:]
    loads = loads_of_lane(write_blocks.shape[1], key_dim, pool.dtype.itemsize)
    values = _WARPS * loads * (_LANES // _lanes_of_row(key_dim, pool.dtype.itemsize))
    updated = jax.new_ref(pool)
    out = pm.kernel(
        functools.partial(_kernel, loads=loads, gate=Gate(lower_bound, allow_neg_eigval, scale, use_qk_l2norm)),
        out_type=jax.ShapeDtypeStruct((qkv.shape[0], value_heads, value_dim), qkv.dtype),
        grid=(read_block.shape[0], value_heads, value_dim // values),
        grid_names=("row", "head", "part"),
        kernel_name="gated_delta_rule_update",
    )(layer.reshape(1), query_start_loc, read_block, write_blocks, qkv, a, b, A_log, dt_bias, updated)
    return out, jax.freeze(updated)
