"""The causal convolution at the end of a chain (SM90).

The warp (one token) or the thread (several tokens, two results) that has a token's result convolves it. It loads the
windows from GMEM while the weights are copied to SMEM, so it need not wait for them afterwards. No other thread of the
launch loads or stores these channels of the token's blocks.
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

_NONE = -1  # the row index of a window that does not exist


class Convolved(NamedTuple):
    """A convolution in a kernel: the references of the arrays of `Convolution`, and its activation."""

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
        """The number of taps."""
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        """The number of results that are convolved."""
        return self.weight.shape[1]


def unsupported(step: Convolution, dtype: Any) -> str | None:
    """Return why a launch cannot end with a convolution, or None. `dtype` is the dtype of the product's results."""
    if step.layout != "SD":
        return f"the windows of a convolution must have the layout SD, got {step.layout}"
    dtypes = {jnp.dtype(array.dtype) for array in (step.pool, step.weight)}
    if dtypes != {jnp.dtype(dtype)}:
        return f"windows and taps must have the dtype {dtype}, got {sorted(map(str, dtypes))}"
    rows = step.read_block.shape[0]
    return None if 0 < rows <= MOST_TOKENS else f"a convolution must have 1 to {MOST_TOKENS} rows, got {rows}"


def arrays_of(step: Convolution | None) -> dict[str, Any] | None:
    """Return the arrays of `Convolved` as a kernel's arguments. The pool is a mutable reference; the caller freezes it."""
    if step is None:
        return None
    given = {name: getattr(step, name) for name in Convolved._fields if name != "activation"}
    return given | dict(pool=jax.new_ref(step.pool), layer=jnp.int32(step.layer).reshape(1))


def with_references(step: Convolution | None, refs: dict[str, Any] | None) -> Convolved | None:
    """Return the convolution in a kernel, given the references of the arrays of `arrays_of`."""
    return None if step is None or refs is None else Convolved(**refs, activation=step.activation)


# Of a single token


def rows_of_one(step: Convolved) -> tuple[jax.Array, jax.Array]:
    """Return the indices of the first window row that the token reads, and of the first that it writes: see `load_rows`."""
    (_, blocks, window, _), rows = step.pool.shape, step.read_block.shape[0]
    before = sum((step.query_start_loc[n + 1] <= 0).astype(jnp.int32) for n in range(rows))  # rows before the token's
    row = jnp.minimum(before, rows - 1)

    def index_of(block: jax.Array, inside: Any) -> jax.Array:
        exists = (before < rows) & (block != NULL_BLOCK)
        return jnp.where(exists, (step.layer[0] * blocks + block) * window + inside, _NONE)

    return index_of(step.read_block[row], step.window_row[row]), index_of(step.write_block[row], 0)


def load_by_warp(step: Convolved, row: jax.Array, first: jax.Array) -> jax.Array:
    """Load each warp's window, the oldest input first, and taps from GMEM to registers. One warp convolves one channel.

    Args:
        step: The convolution.
        row: The index of the first window row, of `rows_of_one`.
        first: The channel of the first warp. Channels that are not convolved are not loaded.
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
    """Convolve a result of each warp, float32 [4], and store it and its new window to GMEM.

    Args:
        step: The convolution.
        out: Receives the convolved results. [channels]
        value: The results of the product.
        held: The registers of `load_by_warp`.
        row: The index of the first window row that is written, of `rows_of_one`.
        first: The channel of the first warp.
    """

    def body(value: Any, held: Any, out: Any, pool: Any, row: Any, first: Any) -> None:
        lane, warp = hp.lane_and_warp(hp.thread_index())
        channel, result = first + warp, hp.unpack(value[0])[0]
        inputs, (convolved, _) = _convolve(step, hp.elements(held), [result, result])
        is_first = lane < 1
        with hp.predicated(is_first):
            out[channel] = convolved.astype(step.pool.dtype)
        _store(step, pool, row, channel, inputs, is_first, 16)

    hp.inline(body, value, held, (out, ()), (step.pool, ()), row, first)


# Of several tokens


def load_rows(step: Convolved, tokens: int) -> jax.Array:
    """Load the indices of each thread's first window row to read, and first window row to write, int32 [2 * 128].

    Window rows are counted over all layers and blocks. A thread without a row, or whose block is NULL_BLOCK, gets `_NONE`.
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
            has_window = exists & (block != NULL_BLOCK)
            found.append(hp.select(has_window, row, _NONE))
        return (hp.strided(found),)

    refs = step.layer, step.query_start_loc, step.read_block, step.window_row, step.write_block
    return hp.inline(body, *((ref, ()) for ref in refs), results=[(2 * 128, jnp.int32)])[0]


def load_by_thread(step: Convolved, rows: jax.Array, first: Any, tokens: int) -> jax.Array:
    """Load each thread's windows and taps from GMEM to registers. A thread convolves two channels, one word of 32 bits.

    Args:
        step: The convolution.
        rows: See `load_rows`.
        first: The block's first channel. Channels that are not convolved are not loaded.
        tokens: The number of tokens.
    """

    def body(pool: Any, weight: Any, rows: Any, first: Any) -> Any:
        thread = hp.thread_of_cta()
        channel = first + (thread & 3) * 2
        row, _write = hp.elements(rows)
        is_convolved = first < step.channels
        is_convolved = is_convolved & (thread < tokens * fragments.PAIRS)
        return (hp.strided(_load(step, pool, weight, row, channel, is_convolved, 32)),)

    results = [(128 * (2 * step.width - 1), jnp.int32)]
    return hp.inline(body, (step.pool, ()), (step.weight, ()), rows, first, results=results)[0]


def emit_convolved(
    step: Convolved, parts: Sequence[int], dtype: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any
) -> None:
    """Store two results of the chain like `emit_parts`, in `finish`, but convolve results of the first part before."""
    *refs, row, rows, held, pool = operands
    with hp.predicated(row < step.channels):
        inputs, convolved = _convolve(step, hp.elements(held), values)
        offset = hp.index(fragments.offset_of_pair(token, pair, row, step.channels))
        hp.store_vector(hp.rounded_pair(convolved, dtype), refs[0], offset)
        _read, write = hp.elements(rows)
        _store(step, pool, write, row + pair * 2, inputs, row < step.channels, 32)
    row = row - step.channels
    fragments.emit_parts(parts[1:], dtype, token, pair, values, *refs[1:], row)


# Of one channel in words of 16 bits, or two channels in words of 32 bits. The functions are for `inline`.


def _load(step: Convolved, pool: Any, weight: Any, row: Any, channel: Any, is_convolved: Any, bits: int) -> list[Any]:
    """Load the words of a window and of the taps. A window that does not exist reads as zeros."""

    def words(ref: Any, row: Any, count: int, condition: Any) -> list[Any]:
        rows = [row + n for n in range(count)]
        return [hp.load_if(condition, hp.long_row_address(ref, n, step.channels, channel), bits) for n in rows]

    has_window = is_convolved & (row != _NONE)
    return words(pool, row, step.width - 1, has_window) + words(weight, hp.i32(0), step.width, is_convolved)


def _convolve(step: Convolved, held: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Convolve the two channels of a word, whose current inputs are float32 `values`. `held` has the words of `_load`.

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
    """Store the last inputs as the new window if its row exists, predicated by `condition`."""
    is_kept = condition & (row != _NONE)
    for n, word in enumerate(inputs[1:]):
        address = hp.long_row_address(pool, row + n, step.channels, channel)
        hp.store_if(is_kept, address, word, bits)
