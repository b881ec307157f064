"""The shared body of the kernels by Mosaic GPU that advance states token by token.

A program has four warps. A warp has some rows of the state of one head of one row of the batch, in registers. A lane has 16
bytes of columns of every state row, or of every second or fourth one, so that lanes that are neighbours load and store what
is next to each other. What is summed over a state row's columns is first summed in each lane. Then the lanes exchange half
of their sums with each partner, so at the end every lane has the whole sum of one state row, its own.

The order of a sum depends on the pool's dtype and the number of columns only. So a state has the same bits after a decode
row and after a verify row, however many state rows a warp has.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import jax

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, ir, math, memref, vector
from pallas_kernels.blocks import NULL_BLOCK

_WARPS = 4
_LOAD_BYTES = 16  # that a lane loads at once
_MAX_ROWS = 16  # state rows of a warp
_MAX_NUMBERS = 64  # of a state in a lane
_PROGRAMS = 256  # that fill a GPU
_MANY_ROWS = 600_000  # state rows that a large batch advances, each counted once per token

State = list[list[Any]]  # a lane's part: for each of its loads, the float32 numbers of some neighbouring columns


def state_rows_of_warp(batch_rows: int, window: int, head: Sequence[int], itemsize: int) -> int:
    """Returns how many state rows a warp has. It changes no bit.

    Of 4, 8 and 16, it is the fastest number, or within 2 % of it, for heads of 128 x 128 and of 64 x 128, with JAX 0.11.2 on
    an H100, and on an H200 as far as they were compared there.

    Args:
        batch_rows: The number of rows of the batch.
        window: The largest number of their tokens.
        head: The number of heads, of their state rows, and of the columns.
        itemsize: The bytes of a number of the pool.
    """
    heads, rows_of_head, columns = head
    most = min(_MAX_ROWS, _MAX_NUMBERS * code.LANES // columns)
    if window > 1:
        is_large = batch_rows * window * heads * rows_of_head > _MANY_ROWS
        return min(most, 4 if is_large else 8) if itemsize == 4 else most
    is_small = batch_rows * heads * rows_of_head < _PROGRAMS * _WARPS * most
    if is_small:
        return min(most, 4 * code.LANES // (columns * itemsize // _LOAD_BYTES))
    # With numbers of 16 bits, one program for all 64 state rows of a head takes longer than two.
    return min(most, rows_of_head // (2 * _WARPS)) if itemsize == 2 else most


def _passes_cache(window: int, rows_of_head: int, itemsize: int) -> bool:
    """Returns whether a state passes the caches: `load_words_if` and `store_words` say what that means.

    On an H200 with JAX 0.11.2, it is faster where this function says so, and slower or as fast elsewhere.
    """
    # In the models that were timed, a head of the delta rule has 128 state rows, and one of Mamba-2 has 64.
    return window > 1 or (itemsize == 2 and rows_of_head >= 128)


def unsupported(pool: jax.Array, *inputs: jax.Array) -> str | None:
    """Returns the reason why no kernel can advance the states of a pool, or None if one can."""
    state_rows, columns = pool.shape[3:]
    itemsize = pool.dtype.itemsize
    if {x.dtype.itemsize for x in (pool, *inputs)} - {2, 4}:
        return f"arrays must have 16 or 32 bits, got {', '.join(str(x.dtype) for x in (pool, *inputs))}"
    if columns * itemsize not in (128, 256, 512):
        return f"a state row must have 128, 256 or 512 bytes, got {columns} columns in {pool.dtype}"
    if state_rows % (_WARPS * _MAX_ROWS):
        return f"the number of state rows must be a multiple of {_WARPS * _MAX_ROWS}, got {state_rows}"
    return None


class Recurrence(Protocol):
    """The recurrence of one head, restricted to what a lane has, in `pm.inline`."""

    def take(self, token: Any) -> list[Any]:
        """Loads the inputs of one token, given its index."""
        ...

    def advance(self, inputs: Sequence[Any], state: State, keep: Callable[[list[Any]], None]) -> Any:
        """Advances the state by one token, and returns the output of the lane's own state row.

        It calls `keep` once for each part of the new state, in the order of `state`, as soon as the part is computed.
        """
        ...


class Place(NamedTuple):
    """Which part of a step a program has: numbers of the kernel.

    Attributes:
        row: The row of the batch.
        head: The head.
        part: The program's place among those of the same row and head.
        start: The row's first token.
        end: The token after the row's last one.
        total: The token after the last row of the batch.
        layer: The layer.
        read: The block that holds the row's initial state.
    """

    row: Any
    head: Any
    part: Any
    start: Any
    end: Any
    total: Any
    layer: Any
    read: Any


class Warp:
    """What a recurrence may use, and the code that runs it.

    Attributes:
        place: The program's part of the step.
        column: The lane's first column.
        columns: The number of its columns.
        own_row: The state row of which the lane gets sums.
    """

    def __init__(self, pool: Any, out: Any, write_blocks: Any, place: Place, state_rows: int) -> None:
        self.pool, self.out, self.write_blocks, self.place = pool, out, write_blocks, place
        _, self._blocks, self._heads, self._rows_of_head, self._row_length = ir.MemRefType(pool.type).shape
        self.kind = ir.MemRefType(pool.type).element_type
        self._batch_rows, self._window = ir.MemRefType(write_blocks.type).shape
        self.columns = _LOAD_BYTES // pm.bytes_of(self.kind)
        self._lanes = self._row_length // self.columns  # of a state row
        self._rows_of_load = code.LANES // self._lanes
        self._loads = state_rows // self._rows_of_load
        self._passes_cache = _passes_cache(self._window, self._rows_of_head, pm.bytes_of(self.kind))
        self._lane, warp = code.lane_and_warp(pm.thread_index())
        self.column = code.scaled(arith.andi(self._lane, pm.constant(self._lanes - 1)), self.columns)
        first = code.total(code.scaled(place.part, _WARPS * state_rows), code.scaled(warp, state_rows))
        self._first_row = code.total(first, arith.divui(self._lane, pm.constant(self._lanes)))  # of the first load
        self.own_row = code.total(self._first_row, code.scaled(self._own_load(), self._rows_of_load))

    def run(self, recurrence: Recurrence) -> None:
        """Runs the row's tokens, and clears this row's share of the outputs of tokens after the last row."""
        start, end, read = self.place.start, self.place.end, self.place.read
        is_live = arith.cmpi(arith.CmpIPredicate.slt, start, end)
        if self._window > 1:
            # Neither number is negative, so these conditions always hold. They make the compiler load both numbers before
            # the branch. Otherwise it loads them after it, which takes longer.
            for number in (read, self.place.layer):
                is_live = arith.andi(is_live, arith.cmpi(arith.CmpIPredicate.sge, number, pm.constant(0)))
        with pm.only_if(is_live):
            at, exists = self._address(read), code.differs(read, NULL_BLOCK)
            state = [
                code.load_words_if(exists, at, self._offset(n), passes_cache=self._passes_cache)
                for n in range(self._loads)
            ]
            inputs = [*recurrence.take(start), self._write_block(start)]
            values = [*(x for words in state for x in self._wide(words)), *inputs]
            count = len(inputs)

            def step(token: Any, values: Sequence[Any]) -> list[Any]:
                numbers, inputs, write = values[:-count], values[-count:-1], values[-1]
                state = [list(numbers[n : n + self.columns]) for n in range(0, len(numbers), self.columns)]
                at, is_kept = self._address(write), code.differs(write, NULL_BLOCK)
                after: State = []

                def keep(part: list[Any]) -> None:
                    # In a branch, so that the compiler stores the part before it goes on to the next one.
                    with pm.only_if(is_kept):
                        words, first = self._narrow(part), self._offset(len(after))
                        code.store_words(at, words, first, passes_cache=self._passes_cache)
                    after.append(part)

                self._store_output(token, recurrence.advance(inputs, state, keep))
                return [x for part in after for x in part]

            def step_in_loop(number: Any, values: list[Any]) -> list[Any]:
                # The next token's inputs are loaded while this one's are used.
                token = arith.index_cast(pm.integer(), number)
                following = arith.minsi(code.total(token, pm.constant(1)), arith.subi(end, pm.constant(1)))
                upcoming = [*recurrence.take(following), self._write_block(following)]
                return [*step(token, values), *upcoming]

            if self._window == 1:
                step(start, values)
            else:
                pm.repeated(code.index(start), code.index(end), step_in_loop, values)
        self._clear()

    def load_columns(self, ref: Any, *at: Any) -> Any:
        """Loads the numbers of the lane's columns as a vector. `at` is the place of the first one."""
        kind = ir.MemRefType(ref.type).element_type
        alignment = min(16, self.columns * pm.bytes_of(kind))
        return vector.load(code.vector_type(self.columns, kind), ref, [code.index(x) for x in at], alignment=alignment)

    def product(self, x: Sequence[Any], y: Sequence[Any]) -> Any:
        """Returns the product of a lane's parts of two vectors."""
        found = arith.mulf(x[0], y[0])
        for each in zip(x[1:], y[1:], strict=True):
            found = math.fma(*each, found)
        return found

    def whole_product(self, x: Sequence[Any], y: Sequence[Any]) -> Any:
        """Returns the product of two vectors, of which each lane has its columns."""
        return pm.sum_over(self.product(x, y), [1 << n for n in range(self._lanes.bit_length() - 1)])

    def times(self, state: State, x: Sequence[Any]) -> Any:
        """Returns the product of the state with a vector, of which each lane has its columns, for the lane's own row."""
        return self.whole_sum([self.product(part, x) for part in state])

    def whole_sum(self, sums: Sequence[Any]) -> Any:
        """Adds up the sums of all lanes that have a part of the same state row, and returns that of the lane's own row.

        `sums` are those of this lane, one for each load.
        """
        distance = self._lanes // 2
        while len(sums) > 1:
            half, is_upper = len(sums) // 2, self._has_bit(distance)
            pairs = zip(sums[:half], sums[half:], strict=True)
            both = [(code.either(is_upper, y, x), code.either(is_upper, x, y)) for x, y in pairs]
            sums = [arith.addf(kept, pm.from_partner(given, distance)) for kept, given in both]
            distance //= 2
        (total,) = sums
        while distance:
            total = arith.addf(total, pm.from_partner(total, distance))
            distance //= 2
        return total

    def of_each_load(self, x: Any) -> list[Any]:
        """Returns for each load the number that the lane has whose own state row is the load's."""
        return [pm.from_lane(x, self._owner(load), of=self._lanes) for load in range(self._loads)]

    def _write_block(self, token: Any) -> Any:
        at = self.place.row, arith.subi(token, self.place.start)
        return memref.load(self.write_blocks, [code.index(each) for each in at])

    def _clear(self) -> None:
        """Writes zeros to outputs of tokens after the last row. The rows of the batch take turns."""
        first, rows = code.total(self.place.total, self.place.row), pm.constant(self._batch_rows)
        tokens = ir.MemRefType(self.out.type).shape[0]
        left = arith.maxsi(arith.subi(pm.constant(tokens + self._batch_rows - 1), first), pm.constant(0))

        def clear(number: Any, values: list[Any]) -> list[Any]:
            turn = arith.index_cast(pm.integer(), number)
            self._store_output(code.total(first, arith.muli(turn, rows)), code.number(0.0))
            return values

        pm.repeated(code.index(pm.constant(0)), code.index(arith.divui(left, rows)), clear, [])

    def _has_bit(self, bit: int) -> Any:
        """Returns whether the lane's number has a bit."""
        return code.differs(arith.andi(self._lane, pm.constant(bit)), 0)

    def _halves(self) -> list[tuple[int, int]]:
        """Returns for each exchange of `times` the partners' distance, and by how many loads they then differ."""
        return [(self._lanes >> n, self._loads >> n) for n in range(1, self._loads.bit_length())]

    def _own_load(self) -> Any:
        """Returns the load of the lane's own state row."""
        own = pm.constant(0)
        for distance, half in self._halves():
            own = code.total(own, code.either(self._has_bit(distance), pm.constant(half), pm.constant(0)))
        return own

    def _owner(self, load: int) -> int:
        """Returns the first lane, of those of one state row, whose own state row is that of a load."""
        return sum(distance for distance, half in self._halves() if load & half)

    def _address(self, block: Any) -> Any:
        """Returns the address of the lane's first load from a block."""
        block = code.total(code.scaled(self.place.layer, self._blocks), block)
        head = code.total(code.scaled(block, self._heads), self.place.head)
        row = code.total(code.scaled(head, self._rows_of_head), self._first_row)
        return code.address_in_rows(self.pool, row, self._row_length, self.column)

    def _offset(self, load: int) -> int:
        """Returns the bytes from the lane's first load to another one."""
        return load * self._rows_of_load * self._row_length * pm.bytes_of(self.kind)

    def _wide(self, words: Sequence[Any]) -> list[Any]:
        """Returns the float32 numbers of four words of a state."""
        if self.kind == ir.F32Type.get():
            return [arith.bitcast(ir.F32Type.get(), each) for each in words]
        return code.parts(code.wide(code.numbers(words, self.kind)))

    def _narrow(self, numbers: Sequence[Any]) -> list[Any]:
        """Returns float32 numbers as four words of a state."""
        if self.kind == ir.F32Type.get():
            return [arith.bitcast(pm.integer(), each) for each in numbers]
        narrow = arith.truncf(code.vector_type(self.columns, self.kind), code.from_parts(numbers))
        return code.parts(code.words(narrow))

    def _store_output(self, token: Any, x: Any) -> None:
        """Stores the output of the lane's own state row. Of the lanes that have it, the first one does."""
        kind = ir.MemRefType(self.out.type).element_type
        x = x if kind == ir.F32Type.get() else arith.truncf(kind, x)
        others = arith.andi(self._lane, pm.constant(self._lanes // self._loads - 1))
        with pm.only_if(code.is_equal(others, 0)):
            memref.store(x, self.out, [code.index(each) for each in (token, self.place.head, self.own_row)])


def kernel(
    layer_of: Any,
    query_start_loc: Any,
    read_block: Any,
    write_blocks: Any,
    pool: Any,
    *refs: Any,
    names: Sequence[str],
    state_rows: int,
    recurrence: Callable[[Any, Warp], Recurrence],
) -> None:
    """Handles some state rows of one head of one row of the batch.

    The arguments up to `pool` are arrays. `refs` are the inputs by their `names`, and the outputs.
    """
    row, head, part = (pm.axis_index(axis) for axis in ("row", "head", "part"))
    # All numbers are loaded at once. The compiler would load some of them only when it knows others.
    numbers = pm.computed(
        (
            query_start_loc[row],
            query_start_loc[row + 1],
            query_start_loc[read_block.shape[0]],
            layer_of[0],
            read_block[row],
        )
    )

    def body(_: Any, *given: Any) -> None:
        (write_blocks, pool, *inputs, out), place = given[: len(refs) + 2], Place(*given[len(refs) + 2 :])
        warp = Warp(pool, out, write_blocks, place, state_rows)
        warp.run(recurrence(SimpleNamespace(**dict(zip(names, inputs, strict=True))), warp))

    pm.inline(body, *((ref, ()) for ref in (write_blocks, pool, *refs)), row, head, part, *numbers)


def advance_states(
    name: str,
    recurrence: Callable[[Any, Warp], Recurrence],
    inputs: dict[str, jax.Array],
    out: jax.ShapeDtypeStruct,
    pool: jax.Array,
    layer: jax.Array,
    rows: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Launches a kernel. Returns its outputs and the updated pool.

    Args:
        name: The kernel's name.
        recurrence: Makes a recurrence, in `pm.inline`, given the inputs by name and the warp.
        inputs: The inputs by name.
        out: The outputs, [tokens, heads, state rows].
        pool: The states, [layers, blocks, heads, state rows, columns].
        layer: The layer.
        rows: query_start_loc, read_block and write_blocks.
    """
    write_blocks = rows[2]
    _, _, *head = pool.shape
    batch_rows, window = write_blocks.shape
    state_rows = state_rows_of_warp(batch_rows, window, head, pool.dtype.itemsize)
    updated = jax.new_ref(pool)

    def body(layer: Any, query_start_loc: Any, read_block: Any, write_blocks: Any, pool: Any, *refs: Any) -> None:
        options = dict(names=list(inputs), state_rows=state_rows, recurrence=recurrence)
        kernel(layer, query_start_loc, read_block, write_blocks, pool, *refs, **options)

    results = pm.kernel(
        body,
        out_type=out,
        grid=(batch_rows, head[0], head[1] // (_WARPS * state_rows)),
        grid_names=("row", "head", "part"),
        kernel_name=name,
    )(layer.reshape(1), *rows, updated, *inputs.values())
    return results, jax.freeze(updated)
