"""A causal convolution at the end of a chain.

In one launch, the warp (one token) or the thread (several tokens, two results) that has a token's result convolves it. It
loads the windows from GMEM while the weights are copied to SMEM, so it need not wait for them afterwards. No other thread of
the launch loads or stores these channels of the token's blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import check_layer, require
from pallas_kernels._lazy_hopper import hp
from pallas_kernels.blocks import NULL_BLOCK, WindowLayout
from pallas_kernels.causal_conv1d import causal_conv1d_update
from pallas_kernels.causal_conv1d.api import check as check_convolution
from pallas_kernels.product_chain import fragments
from pallas_kernels.product_chain.schedule import MOST_TOKENS, Launch
from pallas_kernels.product_chain.step import Place, Separate, Step, Taken, weights_of
from pallas_kernels.product_chain.steps.product import emit_parts
from pallas_kernels.rows import Rows

_NONE = -1  # the row index of a window that does not exist


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Convolution(Step):
    """Convolve the first results of a product causally, and keep their windows, of rows with at most one token.

    It is `causal_conv1d_update` without a bias. The other results of the product stay as they are. Results of tokens after
    the last row are unspecified.

    Attributes:
        pool: Windows of all layers and blocks, or as `layout` says. It is updated in place if the enclosing jit donates it,
            and copied otherwise.
        layer: The layer whose blocks are read and written.
        weight: The taps.
        query_start_loc: Index of each row's token; the last entry is the end of the last row. A row without a token has the
            index of the next token.
        read_block: The block that holds each row's window; NULL_BLOCK reads as zeros.
        window_row: The first window row that each row reads.
        write_block: The block that receives each row's new window; NULL_BLOCK skips the write. It may be the row's own read
            block.
        activation: "silu" or None.
        layout: The layout of the windows: see `causal_conv1d_update`.
    """

    pool: Float[Array, "layers blocks window channels"]
    layer: int | Int32[Array, ""]
    weight: Float[Array, "width channels"]
    query_start_loc: Int32[Array, " rows_plus_1"]
    read_block: Int32[Array, " rows"]
    window_row: Int32[Array, " rows"]
    write_block: Int32[Array, " rows"]
    activation: Literal["silu"] | None = field(default="silu", metadata=dict(static=True))
    layout: WindowLayout = field(default="SD", metadata=dict(static=True))

    takes: ClassVar[Taken] = "parts"
    is_counted: ClassVar[bool] = False
    roles: ClassVar[dict[str, tuple[str, ...]]] = dict(
        convolution=("layer", "pool", "query_start_loc", "read_block", "weight", "window_row", "write_block")
    )

    @property
    def width(self) -> int:
        """The number of taps."""
        return self.weight.shape[0]

    @property
    def channels(self) -> int:
        """The number of results that are convolved."""
        return self.weight.shape[1]

    @property
    def gives(self) -> tuple[Taken, ...]:
        """See `Step`."""
        return ("parts",)

    def check(self, name: str, place: Place, x: jax.Array, residual: jax.Array | None) -> None:
        """See `Step`."""
        is_cut = place.before is not None and "parts" in place.before.gives
        require(is_cut, f"{name}: a convolution must follow a product that is not gated, got {place.names}")
        require(place.after is None, f"{name}: a convolution must be the last step, got {place.names}")
        parts = place.parts
        convolved = None if parts is None else parts[0]
        require(convolved == self.channels, f"{name}: parts must begin with {self.channels} channels, got {parts}")
        inputs = jax.ShapeDtypeStruct((x.shape[-2], self.channels), weights_of(place.steps)[-1].dtype)
        check_convolution(name, inputs, self.pool, self.weight, self.activation, self.layout)
        check_layer(name, self.layer, self.pool.shape[0])
        rows = len(self.query_start_loc) - 1
        for field_name in ("read_block", "window_row", "write_block"):
            shape = getattr(self, field_name).shape
            require(shape == (rows,), f"{name}: {field_name} must be [{rows}], got {list(shape)}")

    def run_alone(self, value: Any, place: Place, chain: Separate) -> Any:
        """Run `causal_conv1d_update`. Return all results, and the pool of windows."""
        first, *others = value
        rows = Rows(
            query_start_loc=self.query_start_loc,
            layer=self.layer,
            window_read=self.read_block,
            window_row=self.window_row,
            write=self.write_block[:, None],
        )
        options: dict[str, Any] = dict(activation=self.activation, layout=self.layout, run=chain.run)
        first, pool = causal_conv1d_update(first, self.pool, self.weight, None, rows, **options)
        return first, *others, pool

    def unsupported(self, place: Place, launch: Launch, x: jax.Array, capacity: int | None) -> str | None:
        """See `Step`."""
        if self.layout != "SD":
            return f"the windows of a convolution must have the layout SD, got {self.layout}"
        dtype, dtypes = weights_of(place.steps)[-1].dtype, {jnp.dtype(each.dtype) for each in (self.pool, self.weight)}
        if dtypes != {jnp.dtype(dtype)}:
            return f"windows and taps must have the dtype {dtype}, got {sorted(map(str, dtypes))}"
        rows = self.read_block.shape[0]
        return None if 0 < rows <= MOST_TOKENS else f"a convolution must have 1 to {MOST_TOKENS} rows, got {rows}"

    def prepared(self) -> Self:
        """See `Step`. The pool is a mutable reference."""
        return replace(self, pool=jax.new_ref(self.pool), layer=jnp.int32(self.layer).reshape(1))

    def updated(self) -> tuple[jax.Array, ...]:
        """See `Step`."""
        pool: Any = self.pool
        return (jax.freeze(pool),)

    # One token

    def rows_of_one_token(self) -> tuple[jax.Array, jax.Array]:
        """Return the indices of the first window row that the token reads, and of the first that it writes.

        Window rows are counted over all layers and blocks. One that does not exist is `_NONE`.
        """
        (_, blocks, window, _), rows = self.pool.shape, self.read_block.shape[0]
        layer: Any = self.layer
        before = sum(
            (self.query_start_loc[n + 1] <= 0).astype(jnp.int32) for n in range(rows)
        )  # rows before the token's
        row = jnp.minimum(before, rows - 1)

        def index_of(block: jax.Array, inside: Any) -> jax.Array:
            exists = (before < rows) & (block != NULL_BLOCK)
            return jnp.where(exists, (layer[0] * blocks + block) * window + inside, _NONE)

        return index_of(self.read_block[row], self.window_row[row]), index_of(self.write_block[row], 0)

    def load_one_token(self, cta: Any, first: jax.Array) -> jax.Array:
        """Load each warp's window, the oldest input first, and taps from GMEM to registers. One warp convolves one channel.

        `first` is the channel of the first warp. Channels that are not convolved are not loaded.
        """

        def body(pool: Any, weight: Any, row: Any, first: Any) -> Any:
            _lane, warp = hp.lane_and_warp(hp.thread_index())
            is_convolved = first < self.channels
            return (hp.strided(self._load(pool, weight, row, first + warp, is_convolved, 16)),)

        operands = (self.pool, ()), (self.weight, ()), cta.sink_rows[0], first
        return hp.inline(body, *operands, results=[self._held_words])[0]

    def store_one_token(self, cta: Any, out: Any, value: jax.Array, held: jax.Array, first: jax.Array) -> None:
        """Convolve a result of each warp, float32 [4], and store it and its new window to GMEM. See `load_one_token`."""

        def body(value: Any, held: Any, out: Any, pool: Any, row: Any, first: Any) -> None:
            lane, warp = hp.lane_and_warp(hp.thread_index())
            channel, result = first + warp, hp.unpack(value[0])[0]
            inputs, (convolved, _) = self._convolve(hp.elements(held), [result, result])
            is_first = lane < 1
            with hp.predicated(is_first):
                out[channel] = convolved.astype(self.pool.dtype)
            self._store(pool, row, channel, inputs, is_first, 16)

        hp.inline(body, value, held, (out, ()), (self.pool, ()), cta.sink_rows[1], first)

    # Several tokens

    def rows_of_few_tokens(self, cta: Any) -> jax.Array:
        """Load the indices of each thread's first window row to read, and first window row to write, int32 [2 * 128].

        The indices are the same as in `rows_of_one_token`. A thread without a row gets `_NONE`.
        """
        (_, blocks, window, _), rows, tokens = self.pool.shape, self.read_block.shape[0], cta.tokens

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

        refs = self.layer, self.query_start_loc, self.read_block, self.window_row, self.write_block
        return hp.inline(body, *((ref, ()) for ref in refs), results=[(2 * 128, jnp.int32)])[0]

    def load_few_tokens(self, cta: Any, first: Any) -> list[Any]:
        """Load each thread's windows and taps from GMEM to registers. Return operands of `emit`.

        A thread convolves two channels, one word of 32 bits. `first` is the block's first channel. Channels that are not
        convolved are not loaded.
        """

        def body(pool: Any, weight: Any, rows: Any, first: Any) -> Any:
            thread = hp.thread_of_cta()
            channel = first + (thread & 3) * 2
            row, _write = hp.elements(rows)
            is_convolved = first < self.channels
            is_convolved = is_convolved & (thread < cta.tokens * fragments.PAIRS)
            return (hp.strided(self._load(pool, weight, row, channel, is_convolved, 32)),)

        operands = (self.pool, ()), (self.weight, ()), cta.sink_rows, first
        (held,) = hp.inline(body, *operands, results=[self._held_words])
        return [cta.sink_rows, held, (self.pool, ())]

    def emit(self, cta: Any, token: Any, pair: Any, values: Sequence[Any], *operands: Any) -> None:
        """Store two results of the chain like `emit_parts`, but convolve results of the first part before."""
        *refs, _split, row, rows, held, pool = operands
        with hp.predicated(row < self.channels):
            inputs, convolved = self._convolve(hp.elements(held), values)
            offset = hp.index(fragments.offset_of_pair(token, pair, row, self.channels))
            hp.store_vector(hp.rounded_pair(convolved, cta.dtype), refs[0], offset)
            _read, write = hp.elements(rows)
            self._store(pool, write, row + pair * 2, inputs, row < self.channels, 32)
        row = row - self.channels
        emit_parts(cta.parts[1:], cta.dtype, token, pair, values, refs[1:], row)

    # Of one channel in words of 16 bits, or two channels in words of 32 bits. The methods are for `inline`.

    @property
    def _held_words(self) -> tuple[int, Any]:
        """The array of the words of a window and of the taps of all threads."""
        return 128 * (2 * self.width - 1), jnp.int32

    def _load(self, pool: Any, weight: Any, row: Any, channel: Any, is_convolved: Any, bits: int) -> list[Any]:
        """Load the words of a window and of the taps. A window that does not exist reads as zeros."""

        def words(ref: Any, row: Any, count: int, condition: Any) -> list[Any]:
            rows = [row + n for n in range(count)]
            return [hp.load_if(condition, hp.long_row_address(ref, n, self.channels, channel), bits) for n in rows]

        has_window = is_convolved & (row != _NONE)
        return words(pool, row, self.width - 1, has_window) + words(weight, hp.i32(0), self.width, is_convolved)

    def _convolve(self, held: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Convolve the two channels of a word, whose current inputs are float32 `values`. `held` has the words of `_load`.

        Returns the words of all inputs, and the outputs in float32.
        """
        kind, before = self.pool.dtype, self.width - 1
        inputs, taps = [*held[:before], hp.word(hp.rounded_pair(values, kind))], held[before:]
        wide = lambda word: hp.from_words([word], kind).astype(jnp.float32)
        total = hp.add(*[wide(tap) * wide(each) for tap, each in zip(taps, inputs, strict=True)])
        return inputs, [hp.silu(each) if self.activation == "silu" else each for each in hp.unpack(total)]

    def _store(self, pool: Any, row: Any, channel: Any, inputs: Sequence[Any], condition: Any, bits: int) -> None:
        """Store the last inputs as the new window if its row exists, predicated by `condition`."""
        is_kept = condition & (row != _NONE)
        for n, word in enumerate(inputs[1:]):
            address = hp.long_row_address(pool, row + n, self.channels, channel)
            hp.store_if(is_kept, address, word, bits)
