"""The shared body of the kernels for Hopper GPUs that advance states token by token.

A CTA has four warps. A warp has some rows of the state of one head of one row of the batch, in registers. A lane has 16
bytes of columns of every state row, or of every second or fourth one, so that neighbouring lanes load and store neighbouring
addresses. A sum over a state row's columns is first a partial sum in each lane. Then the lanes exchange half of their
partial sums by shuffles, so at the end every lane has the whole sum of one state row, its own.

The order of a sum depends on the pool's dtype and the number of columns only. So a state has the same bits after a decode
row and after a verify row, however many state rows a warp has.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._warpgroup import LANES
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.rows import Rows

_WARPS = 4
_LOAD_BYTES = 16  # bytes that a lane loads at once
_MAX_ROWS = 16  # state rows of a warp
_MAX_ELEMENTS = 64  # elements of a state in a lane
_CTAS = 256  # CTAs that fill a GPU
_MANY_ROWS = 600_000  # state rows that a large batch advances, each counted once per token

State = list[list[Any]]  # a lane's shard: for each of its loads, the float32 elements of some neighbouring columns


def state_rows_of_warp(batch_rows: int, window: int, head: Sequence[int], itemsize: int) -> int:
    """Return the number of state rows of a warp. It changes no bit of the results.

    Of 4, 8 and 16, it is the fastest, or within 2 % of it, for heads of 128 x 128 and of 64 x 128, with JAX 0.11.2 on
    an H100, and on an H200 as far as they were compared there. A row of the batch has at most `window` tokens, and `head` is
    the number of heads, of their state rows, and of the columns.
    """
    heads, rows_of_head, columns = head
    most = min(_MAX_ROWS, _MAX_ELEMENTS * LANES // columns)
    if window > 1:
        is_large = batch_rows * window * heads * rows_of_head > _MANY_ROWS
        return min(most, 4 if is_large else 8) if itemsize == 4 else most
    is_small = batch_rows * heads * rows_of_head < _CTAS * _WARPS * most
    if is_small:
        return min(most, 4 * LANES // (columns * itemsize // _LOAD_BYTES))
    # With 16-bit elements, one CTA for all 64 state rows of a head takes longer than two.
    return min(most, rows_of_head // (2 * _WARPS)) if itemsize == 2 else most


def _passes_cache(window: int, rows_of_head: int, itemsize: int) -> bool:
    """Return whether a state bypasses the caches: see `load_words_if` and `store_words`.

    On an H200 with JAX 0.11.2, it is faster where this function says so, and slower or as fast elsewhere.
    """
    # In the models that were timed, a head of the delta rule has 128 state rows, and one of Mamba-2 has 64.
    return window > 1 or (itemsize == 2 and rows_of_head >= 128)


def unsupported(pool: jax.Array, *inputs: jax.Array) -> str | None:
    """Return the reason why no kernel can advance the states of a pool, or None."""
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
    """The recurrence of one head, restricted to a lane's shard of the state, by single threads."""

    def take(self, token: Any) -> list[Any]:
        """Load the inputs of one token, given its index."""
        ...

    def advance(self, inputs: Sequence[Any], state: State, keep: Callable[[list[Any]], None]) -> Any:
        """Advance the state by one token, and return the output of the lane's own state row.

        It calls `keep` once for each load's elements of the new state, in the order of `state`, once they are computed.
        """
        ...


class Indices(NamedTuple):
    """The indices of a CTA's work in a step, int32.

    Attributes:
        row: The row of the batch.
        head: The head.
        tile: The CTA's tile of the head's state rows.
        start: The row's first token.
        end: The token after the row's last one.
        total: The token after the last row of the batch.
        layer: The layer.
        read: The block that holds the row's initial state.
    """

    row: Any
    head: Any
    tile: Any
    start: Any
    end: Any
    total: Any
    layer: Any
    read: Any


class Warp:
    """A lane's indices and helpers for a recurrence, and the code that runs it.

    Attributes:
        indices: The CTA's indices.
        column: The lane's first column.
        columns: The number of its columns.
        own_row: The state row of which the lane gets sums.
    """

    def __init__(self, pool: Any, out: Any, write_blocks: Any, indices: Indices, state_rows: int) -> None:
        self.pool, self.out, self.write_blocks, self.indices = pool, out, write_blocks, indices
        _, self._blocks, self._heads, self._rows_of_head, self._row_length = pool.shape
        self.kind = pool.dtype
        self._batch_rows, self._window = write_blocks.shape
        self.columns = _LOAD_BYTES // self.kind.itemsize
        self._lanes = self._row_length // self.columns  # lanes of a state row
        self._rows_of_load = LANES // self._lanes
        self._loads = state_rows // self._rows_of_load
        self._passes_cache = _passes_cache(self._window, self._rows_of_head, self.kind.itemsize)
        self._lane, warp = hp.lane_and_warp(hp.thread_index())
        self.column = (self._lane & (self._lanes - 1)) * self.columns
        first = indices.tile * (_WARPS * state_rows) + warp * state_rows
        self._first_row = first + self._lane // self._lanes  # the lane's row in its first load
        self.own_row = self._first_row + self._own_load() * self._rows_of_load

    def run(self, recurrence: Recurrence) -> None:
        """Run the row's tokens, and store zeros in outputs of padding tokens."""
        start, end, read = self.indices.start, self.indices.end, self.indices.read
        is_live = start < end
        if self._window > 1:
            # Neither index is negative, so these conditions always hold. They make the compiler load both indices before
            # the branch. Otherwise it loads them after it, which takes longer.
            for index in (read, self.indices.layer):
                is_live = is_live & (index >= 0)
        with hp.predicated(is_live):
            at, exists = self._address(read), read != NULL_BLOCK
            state = [
                hp.load_words_if(exists, at, self._offset(n), passes_cache=self._passes_cache)
                for n in range(self._loads)
            ]
            inputs = [*recurrence.take(start), self._write_block(start)]
            values = [*(x for words in state for x in self._wide(words)), *inputs]
            count = len(inputs)

            def step(token: Any, values: Sequence[Any]) -> list[Any]:
                elements, inputs, write = values[:-count], values[-count:-1], values[-1]
                state = [list(elements[n : n + self.columns]) for n in range(0, len(elements), self.columns)]
                at, is_kept = self._address(write), write != NULL_BLOCK
                after: State = []

                def keep(slice_: list[Any]) -> None:
                    # In a branch, so that the compiler stores the slice before it goes on to the next one.
                    with hp.predicated(is_kept):
                        words, first = self._narrow(slice_), self._offset(len(after))
                        hp.store_words(at, words, first, passes_cache=self._passes_cache)
                    after.append(slice_)

                self._store_output(token, recurrence.advance(inputs, state, keep))
                return [x for slice_ in after for x in slice_]

            def step_in_loop(token: Any, values: list[Any]) -> list[Any]:
                # The next token's inputs are loaded while this one's are used.
                following = hp.minimum(token + 1, end - 1)
                upcoming = [*recurrence.take(following), self._write_block(following)]
                return [*step(token, values), *upcoming]

            if self._window == 1:
                step(start, values)
            else:
                hp.for_range(start, end, step_in_loop, values)
        self._clear()

    def load_columns(self, ref: Any, *at: Any) -> Any:
        """Load the elements in the lane's columns as a vector. `at` is the index of the first one."""
        return hp.load_vector(ref, *at, count=self.columns)

    def product(self, x: Sequence[Any], y: Sequence[Any]) -> Any:
        """Return a lane's partial sum of the product of two vectors."""
        found = x[0] * y[0]
        for each in zip(x[1:], y[1:], strict=True):
            found = hp.fma(*each, found)
        return found

    def whole_product(self, x: Sequence[Any], y: Sequence[Any]) -> Any:
        """Return the product of two vectors, of which each lane has its columns."""
        return hp.sum_over_lanes(self.product(x, y), [1 << n for n in range(self._lanes.bit_length() - 1)])

    def times(self, state: State, x: Sequence[Any]) -> Any:
        """Return the product of the state with a vector, of which each lane has its columns, for the lane's own row."""
        return self.whole_sum([self.product(slice_, x) for slice_ in state])

    def whole_sum(self, sums: Sequence[Any]) -> Any:
        """Add up the partial sums of the lanes that share each state row, and return the whole sum of the lane's own row.

        `sums` are this lane's partial sums, one for each load.
        """
        distance = self._lanes // 2
        while len(sums) > 1:
            half, is_upper = len(sums) // 2, self._has_bit(distance)
            pairs = zip(sums[:half], sums[half:], strict=True)
            both = [(hp.select(is_upper, y, x), hp.select(is_upper, x, y)) for x, y in pairs]
            sums = [kept + hp.shfl_xor(given, distance) for kept, given in both]
            distance //= 2
        (total,) = sums
        while distance:
            total = total + hp.shfl_xor(total, distance)
            distance //= 2
        return total

    def of_each_load(self, x: Any) -> list[Any]:
        """Return for each load the value x of the lane whose own state row is the load's."""
        return [hp.shfl_idx(x, self._owner(load), width=self._lanes) for load in range(self._loads)]

    def _write_block(self, token: Any) -> Any:
        return self.write_blocks[self.indices.row, token - self.indices.start]

    def _clear(self) -> None:
        """Store zeros in outputs of padding tokens, of which each row of the batch has every n-th."""
        first, rows = self.indices.total + self.indices.row, hp.i32(self._batch_rows)
        tokens = self.out.shape[0]
        left = hp.maximum(hp.i32(tokens + self._batch_rows - 1) - first, 0)

        def clear(n: Any, values: list[Any]) -> list[Any]:
            self._store_output(first + n * rows, hp.f32(0.0))
            return values

        hp.for_range(hp.index(hp.i32(0)), hp.index(left // rows), clear, [])

    def _has_bit(self, bit: int) -> Any:
        """Return whether the lane's index has a bit."""
        return self._lane & bit != 0

    def _halves(self) -> list[tuple[int, int]]:
        """Return for each exchange of `times` the partners' distance, and by how many loads they then differ."""
        return [(self._lanes >> n, self._loads >> n) for n in range(1, self._loads.bit_length())]

    def _own_load(self) -> Any:
        """Return the load of the lane's own state row."""
        own = hp.i32(0)
        for distance, half in self._halves():
            own = own + hp.select(self._has_bit(distance), half, 0)
        return own

    def _owner(self, load: int) -> int:
        """Return the first of the lanes of a state row whose own state row is the one of a load."""
        return sum(distance for distance, half in self._halves() if load & half)

    def _address(self, block: Any) -> Any:
        """Return the address of the lane's first load from a block."""
        block = self.indices.layer * self._blocks + block
        head = block * self._heads + self.indices.head
        row = head * self._rows_of_head + self._first_row
        return hp.long_row_address(self.pool, row, self._row_length, self.column)

    def _offset(self, load: int) -> int:
        """Return the bytes from the lane's first load to another one."""
        return load * self._rows_of_load * self._row_length * self.kind.itemsize

    def _wide(self, words: Sequence[Any]) -> list[Any]:
        """Return four words of a state as float32 elements."""
        if self.kind == jnp.float32:
            return [hp.bitcast(each, jnp.float32) for each in words]
        return hp.unpack(hp.from_words(words, self.kind).astype(jnp.float32))

    def _narrow(self, elements: Sequence[Any]) -> list[Any]:
        """Return float32 elements as four words of a state."""
        if self.kind == jnp.float32:
            return [hp.bitcast(each, jnp.int32) for each in elements]
        narrow = hp.pack(elements).astype(self.kind)
        return hp.unpack(hp.words(narrow))

    def _store_output(self, token: Any, x: Any) -> None:
        """Store the output of the lane's own state row, by the first of the lanes that have it."""
        kind = self.out.dtype
        x = x if kind == jnp.float32 else x.astype(kind)
        others = self._lane & (self._lanes // self._loads - 1)
        with hp.predicated(others == 0):
            self.out[token, self.indices.head, self.own_row] = x


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
    """Handle some state rows of one head of one row of the batch.

    The arguments up to `pool` are arrays. `refs` are the inputs by their `names`, and the outputs.
    """
    row, head, tile = (hp.axis_index(axis) for axis in ("row", "head", "tile"))
    # All indices are loaded at once. The compiler would load some of them only when it knows others.
    loaded = hp.optimization_barrier(
        (
            query_start_loc[row],
            query_start_loc[row + 1],
            query_start_loc[read_block.shape[0]],
            layer_of[0],
            read_block[row],
        )
    )

    def body(*given: Any) -> None:
        (write_blocks, pool, *inputs, out), indices = given[: len(refs) + 2], Indices(*given[len(refs) + 2 :])
        warp = Warp(pool, out, write_blocks, indices, state_rows)
        warp.run(recurrence(SimpleNamespace(**dict(zip(names, inputs, strict=True))), warp))

    hp.inline(body, *((ref, ()) for ref in (write_blocks, pool, *refs)), row, head, tile, *loaded)


def advance_states(
    name: str,
    recurrence: Callable[[Any, Warp], Recurrence],
    inputs: dict[str, jax.Array],
    out: jax.ShapeDtypeStruct,
    pool: jax.Array,
    rows: Rows,
) -> tuple[jax.Array, jax.Array]:
    """Launch a kernel. Return its outputs and the updated pool.

    Args:
        name: The kernel's name.
        recurrence: Makes a recurrence, by single threads, given the inputs by name and the warp.
        inputs: The inputs by name.
        out: The outputs, [tokens, heads, state rows].
        pool: The states, [layers, blocks, heads, state rows, columns].
        rows: The rows, with `read` and `write`.
    """
    _, _, *head = pool.shape
    batch_rows, window = rows.write.shape
    state_rows = state_rows_of_warp(batch_rows, window, head, pool.dtype.itemsize)
    updated = jax.new_ref(pool)

    results = hp.kernel(
        functools.partial(kernel, names=list(inputs), state_rows=state_rows, recurrence=recurrence),
        out_type=out,
        grid=(batch_rows, head[0], head[1] // (_WARPS * state_rows)),
        grid_names=("row", "head", "tile"),
        kernel_name=name,
    )(jnp.reshape(rows.layer, 1), rows.query_start_loc, rows.read, rows.write, updated, *inputs.values())
    return results, jax.freeze(updated)
