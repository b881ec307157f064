"""The convolution at the end of a chain, on Hopper GPUs.

The warp (one token) or the thread (several tokens, two results) that has a token's result convolves it. It loads their
windows while their weights are copied, so it need not wait for them afterwards. No other thread of the launch loads or
stores these channels of the token's blocks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.product_chain import _fragments as fragments
from pallas_kernels.product_chain._schedule import MOST_TOKENS
from pallas_kernels.product_chain._steps import Convolution

_NONE = -1  # stands for a window that is not there


class Convolved(NamedTuple):
    """A convolution, as CTAs see it: references to the arrays of `Convolution`, and its activation."""

    pool: Any
    layer: Any
    weight: Any
    query_start_loc: Any
    read_block: Any
    window_row: Any
    write_block: Any
    activation: str | None

    @property
    def width(self) -> int:
        """The number of inputs that a result sees."""
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        """The number of results that are convolved."""
        return self.weight.shape[1]


def unsupported(step: Convolution, dtype: Any) -> str | None:
    """Returns why a launch cannot end with a convolution, or None. `dtype` is that of the product's results."""
    if step.layout != "SD":
        return f"the windows of a convolution must have the layout SD, got {step.layout}"
    dtypes = {jnp.dtype(array.dtype) for array in (step.pool, step.weight)}
    if dtypes != {jnp.dtype(dtype)}:
        return f"windows and taps must have the dtype {dtype}, got {sorted(map(str, dtypes))}"
    rows = step.read_block.shape[0]
    return None if 0 < rows <= MOST_TOKENS else f"a convolution must have 1 to {MOST_TOKENS} rows, got {rows}"


def arrays_of(step: Convolution | None) -> dict[str, Any] | None:
    """Returns the fields of `Convolved` that are arrays, as a kernel's arguments. The pool is a reference, to be frozen."""
    if step is None:
        return None
    given = {name: getattr(step, name) for name in Convolved._fields if name != "activation"}
    return given | dict(pool=jax.new_ref(step.pool), layer=jnp.int32(step.layer).reshape(1))


def seen_by_programs(step: Convolution | None, refs: dict[str, Any] | None) -> Convolved | None:
    """Returns a convolution, given the references to what `arrays_of` has returned."""
    return None if step is None or refs is None else Convolved(**refs, activation=step.activation)


# Of a single token


def rows_of_one(step: Convolved) -> tuple[jax.Array, jax.Array]:
    """Returns the first window row that the token reads, and the first that it writes: see `load_rows`."""
    (_, blocks, window, _), rows = step.pool.shape, step.read_block.shape[0]
    before = sum((step.query_start_loc[n + 1] <= 0).astype(jnp.int32) for n in range(rows))  # rows before the token's
    row = jnp.minimum(before, rows - 1)

    def place(block: jax.Array, inside: Any) -> jax.Array:
        is_there = (before < rows) & (block != NULL_BLOCK)
        return jnp.where(is_there, (step.layer[0] * blocks + block) * window + inside, _NONE)

    return place(step.read_block[row], step.window_row[row]), place(step.write_block[row], 0)


def load_by_warp(step: Convolved, row: jax.Array, first: jax.Array) -> jax.Array:
    """Loads what each warp needs to convolve a result: the window, the oldest input first, and the taps.

    Args:
        step: The convolution.
        row: The first window row, of `rows_of_one`.
        first: The channel of the first warp. Nothing is loaded for channels that are not convolved.
    """

    def body(pool: Any, weight: Any, row: Any, first: Any) -> Any:
        _lane, warp = hp.lane_and_warp(hp.thread_index())
        is_convolved = first < step.channels
        return (hp.strided(_load(step, pool, weight, row, first + warp, is_convolved, 16)),)

    results = [(128 * (2 * step.width - 1), jnp.int32)]
    return hp.inline(body, (step.pool, ()), (step.weight, ()), row, first, results=results)[0]


def store_by_warp(
    step: Convolved, out: Any, value: jax.Array, held: jax.Array, row: jax.Array, first: jax.Array
) -> None:
    """Convolves a result of each warp, float32 [4], and stores it and its window.

    Args:
        step: The convolution.
        out: The results that are convolved. [channels]
        value: The results.
        held: What `load_by_warp` has loaded.
        row: The first window row that is written, of `rows_of_one`.
        first: The channel of the first warp.
    """

    def body(value: Any, held: Any, out: Any, pool: Any, row: Any, first: Any) -> None:
        lane, warp = hp.lane_and_warp(hp.thread_index())
        channel, number = first + warp, hp.unpack(value[0])[0]
        inputs, (convolved, _) = _convolve(step, hp.elements(held), [number, number])
        is_first = lane < 1
        with hp.predicated(is_first):
            out[channel] = convolved.astype(step.pool.dtype)
        _store(step, pool, row, channel, inputs, is_first, 16)

    hp.inline(body, value, held, (out, ()), (step.pool, ()), row, first)


# Of several tokens


def load_rows(step: Convolved, tokens: int) -> jax.Array:
    """Loads the indices of each thread's window rows: the first one that it reads, and the first one that it writes.

    Window rows are counted over all layers and blocks. A thread without a row, or without a block, gets `_NONE`.
    """
    (_, blocks, window, _), rows = step.pool.shape, step.read_block.shape[0]

    def body(layer: Any, starts: Any, read: Any, window_row: Any, write: Any) -> Any:
        token = hp.thread_of_cta() >> 2
        ends = [starts[n + 1] for n in range(rows)]
        is_before = [token >= end for end in ends]
        before = hp.add(*(hp.select(each, 1, 0) for each in is_before))  # rows before the token's
        at = hp.index(hp.minimum(before, rows - 1))
        first = layer[0] * blocks
        exists = (token < tokens) & (before < rows)
        found = []
        for ref, inside in ((read, window_row[at]), (write, hp.i32(0))):
            block = ref[at]
            row = (first + block) * window + inside
            is_there = exists & (block != NULL_BLOCK)
            found.append(hp.select(is_there, row, _NONE))
        return (hp.strided(found),)

    refs = step.layer, step.query_start_loc, step.read_block, step.window_row, step.write_block
    return hp.inline(body, *((ref, ()) for ref in refs), results=[(2 * 128, jnp.int32)])[0]


def load_by_thread(step: Convolved, rows: jax.Array, first: Any, tokens: int) -> jax.Array:
    """Loads what each thread needs to convolve two results, which share words: the window, and the taps.

    Args:
        step: The convolution.
        rows: See `load_rows`.
        first: The first of the block's channels. Nothing is loaded for channels that are not convolved.
        tokens: The number of tokens.
    """

    def body(pool: Any, weight: Any, rows: Any, first: Any) -> Any:
        number = hp.thread_of_cta()
        channel = first + (number & 3) * 2
        row, _write = hp.elements(rows)
        is_convolved = first < step.channels
        is_convolved = is_convolved & (number < tokens * fragments.PAIRS)
        return (hp.strided(_load(step, pool, weight, row, channel, is_convolved, 32)),)

    results = [(128 * (2 * step.width - 1), jnp.int32)]
    return hp.inline(body, (step.pool, ()), (step.weight, ()), rows, first, results=results)[0]


def emit_convolved(
    step: Convolved, parts: Sequence[int], dtype: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any
) -> None:
    """Stores two results of the chain like `emit_parts`, in `finish`. Those of the first part are convolved before."""
    *refs, row, rows, held, pool = operands
    with hp.predicated(row < step.channels):
        inputs, convolved = _convolve(step, hp.elements(held), values)
        place = hp.index(fragments.place_of_pair(token, pair, row, step.channels))
        hp.store_vector(hp.rounded_pair(convolved, dtype), refs[0], place)
        _read, write = hp.elements(rows)
        _store(step, pool, write, row + pair * 2, inputs, row < step.channels, 32)
    row = row - step.channels
    fragments.emit_parts(parts[1:], dtype, token, pair, values, *refs[1:], row)


# Of one or two channels, in words of which one channel has the lower half. The functions are for `inline`.


def _load(step: Convolved, pool: Any, weight: Any, row: Any, channel: Any, is_convolved: Any, bits: int) -> list[Any]:
    """Loads the words of a window and of the taps. A window that is not there has zeros."""

    def words(ref: Any, row: Any, count: int, condition: Any) -> list[Any]:
        rows = [row + n for n in range(count)]
        return [hp.load_if(condition, hp.long_row_address(ref, n, step.channels, channel), bits) for n in rows]

    is_there = is_convolved & (row != _NONE)
    return words(pool, row, step.width - 1, is_there) + words(weight, hp.i32(0), step.width, is_convolved)


def _convolve(step: Convolved, held: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Convolves the two channels of a word, whose current inputs are float32 `values`. `held` is what `_load` returns.

    Returns the words of all inputs, and the outputs in float32.
    """
    kind = step.pool.dtype
    inputs, taps = (
        [*held[: step.width - 1], hp.word(hp.rounded_pair(values, step.pool.dtype))],
        held[step.width - 1 :],
    )
    wide = lambda word: hp.from_words([word], kind).astype(jnp.float32)
    total = hp.add(*[wide(tap) * wide(each) for tap, each in zip(taps, inputs, strict=True)])
    return inputs, [hp.silu(each) if step.activation == "silu" else each for each in hp.unpack(total)]


def _store(
    step: Convolved, pool: Any, row: Any, channel: Any, inputs: Sequence[Any], condition: Any, bits: int
) -> None:
    """Stores the window that the last inputs are, if it is to be kept and the condition is met."""
    is_kept = condition & (row != _NONE)
    for number, word in enumerate(inputs[1:]):
        place = hp.long_row_address(pool, row + number, step.channels, channel)
        hp.store_if(is_kept, place, word, bits)
