"""ssd on Hopper GPUs. A CTA has 64 channels of one head of one row, and runs the row's chunks in order.

Its three warpgroups work on different chunks at the same time: one copies the tokens of later chunks to SMEM, one computes
the state after each chunk, and one computes the outputs. A launch before this one computes the decays (decays.py).
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels._dot import as_terms
from pallas_kernels._state_space import StateSpace
from pallas_kernels.blocks import NULL_BLOCK
from pallas_kernels.hopper.partial_tiles import keep_rows, store_rows
from pallas_kernels.hopper.prefill_rows import SHAPE, TILE, PrefillRow, prefill_inputs
from pallas_kernels.rows import Rows
from pallas_kernels.ssd.decays import Factors, decays

_STAGES = 2  # chunks whose tokens are in SMEM
_STATES = 2  # states in SMEM
_TERMS = 2  # bfloat16 terms, hi and lo, of a float32 value in products that states depend on
_AT = Factors()


def unsupported(inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool) -> str | None:
    """Return the reason why the kernel cannot run these arguments, or None if it can."""
    x, B, C, z, chunk_size = inputs.x, inputs.B, inputs.C, inputs.z, rows.chunks.chunk_size
    head_dim, state_dim = pool.shape[3:]
    if any(v.dtype != jnp.bfloat16 for v in (x, B, C)):
        return f"x, B and C must be bfloat16, got {x.dtype}, {B.dtype} and {C.dtype}"
    if z is not None and z.dtype != jnp.bfloat16:
        return f"z must be bfloat16, got {z.dtype}"
    if chunk_size != TILE:
        return f"chunk_size must be {TILE}, got {chunk_size}"
    if head_dim % TILE or state_dim not in (TILE, 2 * TILE):
        return f"head_dim must be a multiple of 64 and state_dim 64 or 128, got {head_dim} and {state_dim}"
    return None


class _Cta:
    """The work of a CTA: one row, head and tile of channels.

    "full" barriers complete when a stage of SMEM has been filled, "free" ones when it may be filled again, and "cleared"
    when a partial chunk's B has no tokens of the next row any more and its x has been read for the state.
    """

    def __init__(self, refs: Any) -> None:
        self.refs = refs
        self.head, row, channel_tile = (hp.axis_index(axis) for axis in ("head", "row", "channel_tile"))
        heads, state_dim = refs.x.shape[1], refs.pool.shape[4]
        (self.token_rows, self.token_tiles), (self.out_rows, self.out_tile) = refs.tokens, refs.outputs
        self.columns = range(state_dim // TILE)
        self.group = jax.lax.div(self.head, jnp.int32(heads // refs.B.shape[1]))
        self.dims = hp.ds(channel_tile * TILE, TILE)
        self.layer, self.read = refs.layer[0], refs.read_block[row]
        self.row = PrefillRow.of(refs, row)
        self.count = self.row.chunks_up_to(self.row.end - self.row.start)

    def fetch(self) -> None:
        """Copy the tokens of later chunks, and their factors, to SMEM."""
        hp.set_max_registers(40, action="decrease")
        jax.lax.fori_loop(0, self.count, self.fetch_chunk, None)
        hp.wait_for_last(self.count, _STAGES, self.refs.free)

    def fetch_chunk(self, chunk: Any, _: None) -> None:
        """Copy the tokens of a chunk, and their factors."""
        refs, at = self.refs, _stage(chunk)
        hp.when(chunk >= _STAGES)(lambda: hp.barrier_wait(refs.free.at[at]))
        token, _ = self.row.tokens_of(chunk)
        here, full = hp.ds(token, TILE), refs.full.at[at]
        for name in ("x", "z"):
            if getattr(refs, name) is not None:
                source = getattr(refs, name).at[here, self.head, self.dims]
                hp.copy_gmem_to_smem(source, self.token_rows[name].at[at], full)
        for name in ("B", "C"):
            for n in self.columns:
                source = getattr(refs, name).at[here, self.group, hp.ds(n * TILE, TILE)]
                hp.copy_gmem_to_smem(source, self.token_rows[name].at[at, n], full)
        factors = refs.factors.at[self.head, self.row.first_chunk + chunk]
        hp.copy_gmem_to_smem(factors.at[hp.ds(0, 4)], refs.per_row.at[at], full)
        hp.copy_gmem_to_smem(factors.at[hp.ds(2, 4)], refs.per_column.at[at], full)

    def carry_state(self) -> None:
        """Compute the state after each chunk, and store the one before it for the outputs."""
        hp.set_max_registers(232, action="increase")
        advance_to = lambda chunk, stop, state: jax.lax.fori_loop(chunk, stop, self.advance, state)
        state = self.row.run(self.refs, [self.initial(n) for n in self.columns], advance_to, self.store)
        self.row.store_last(self.refs.write_block[self.row.index], state, self.store)
        hp.wait_for_last(self.count, _STATES, self.refs.state_free)

    def tile_of(self, block: Any, n: int) -> Any:
        """Return the n-th tile of a block's state."""
        return self.refs.pool.at[self.layer, block, self.head, self.dims, hp.ds(n * TILE, TILE)]

    def initial(self, n: int) -> jax.Array:
        """Return the n-th tile of the row's initial state."""
        load = lambda: hp.load_gmem_tile(self.tile_of(self.read, n)).astype(jnp.float32)
        return jax.lax.cond(self.read != NULL_BLOCK, load, lambda: hp.zeros(SHAPE, jnp.float32))

    def store(self, block: Any, state: list[jax.Array]) -> None:
        """Store the tiles of a state in a block."""
        for n in self.columns:
            hp.store_gmem(self.tile_of(block, n), state[n].astype(self.refs.pool.dtype))

    def advance(self, chunk: Any, state: list[jax.Array]) -> list[jax.Array]:
        """Run one chunk. Take and return the state's tiles."""
        refs, at, out = self.refs, _stage(chunk), jax.lax.rem(chunk, jnp.int32(_STATES))
        hp.when(chunk >= _STATES)(lambda: hp.barrier_wait(refs.state_free.at[out]))
        for n in self.columns:
            for index, term in enumerate(as_terms(state[n], _TERMS)):
                refs.states[out, index, n] = term
        hp.commit_smem()
        hp.barrier_arrive(refs.state_full.at[out])
        hp.barrier_wait(refs.full.at[at])
        _, live = self.row.tokens_of(chunk)
        B = self.token_tiles["B"].at[at]

        @hp.when(live < TILE)
        def _():
            for n in self.columns:
                keep_rows(B.at[n], live)

        x = hp.load_tile(self.token_tiles["x"].at[at]).astype(jnp.float32)
        to_end = hp.along_rows(hp.load_per_row(refs.per_row.at[at, _AT.to_end]), TILE)
        decayed = jnp.where(hp.rows(SHAPE) < live, to_end * x, hp.zeros(SHAPE, jnp.float32))
        for index, term in enumerate(as_terms(decayed, _TERMS)):
            refs.decayed[index] = term
        hp.commit_smem()
        hp.when(live < TILE)(lambda: hp.barrier_arrive(refs.cleared))
        decay = refs.per_column[at, _AT.end - _AT.whole, 0]
        left = [refs.decayed.at[index].T for index in reversed(range(_TERMS))]
        added = hp.multiply_all(SHAPE, [[(a, B.at[n]) for a in left] for n in self.columns])
        hp.barrier_arrive(refs.free.at[at])
        return [decay * s + a for s, a in zip(state, added, strict=True)]

    def write_outputs(self) -> None:
        """Compute the outputs of each chunk from the state before it and from its own tokens."""
        refs = self.refs
        hp.set_max_registers(232, action="increase")
        if refs.skip is not None:
            hp.copy_gmem_to_smem(refs.skip.at[self.head, self.dims], refs.skip_tile, refs.skip_full)
            hp.barrier_wait(refs.skip_full)
        jax.lax.fori_loop(0, self.count, self.write_chunk, None)
        hp.wait_smem_to_gmem(0, wait_read_only=True)
        self.row.clear(refs.x.shape[0], self.outputs_from)

    def outputs_from(self, token: Any) -> Any:
        """Return the tile of outputs from a token on."""
        return self.refs.out.at[hp.ds(token, TILE), self.head, self.dims]

    def write_chunk(self, chunk: Any, _: None) -> None:
        """Compute the outputs of one chunk."""
        refs, columns = self.refs, self.columns
        at, state = _stage(chunk), jax.lax.rem(chunk, jnp.int32(_STATES))
        token, live = self.row.tokens_of(chunk)
        hp.barrier_wait(refs.full.at[at])
        x, B, C = (self.token_tiles[name].at[at] for name in ("x", "B", "C"))

        @hp.when(live < TILE)
        def _():
            hp.barrier_wait(refs.cleared)
            keep_rows(x, live)
            hp.commit_smem()

        (products,) = hp.multiply_all(SHAPE, [[(C.at[n], B.at[n].T) for n in columns]])
        per_row = lambda n: hp.along_rows(hp.load_per_row(refs.per_row.at[at, n]), TILE)
        per_column = lambda n: hp.along_columns(hp.load_per_column(refs.per_column.at[at, n - _AT.whole]), TILE)
        between = (per_row(_AT.whole) - per_column(_AT.whole)) + (per_row(_AT.rest) - per_column(_AT.rest))
        causal = hp.rows(SHAPE) >= hp.columns(SHAPE)
        nothing = hp.zeros(SHAPE, jnp.float32)
        within = jnp.where(causal, jnp.exp2(between) * per_column(_AT.dt) * products, nothing).astype(jnp.bfloat16)
        hp.barrier_wait(refs.state_full.at[state])
        of_state = [(C.at[n], refs.states.at[state, t, n].T) for t in reversed(range(_TERMS)) for n in columns]
        (y,) = hp.multiply_all(SHAPE, [of_state])
        hp.barrier_arrive(refs.state_free.at[state])
        y = per_row(_AT.from_state) * y + hp.multiply(SHAPE, [lambda: ([within], x)])
        if refs.skip is not None:
            skip = hp.along_columns(hp.load_per_column(refs.skip_tile), TILE)
            y = y + skip * hp.load_tile(x).astype(jnp.float32)
        if refs.z is not None:
            z = hp.load_tile(self.token_tiles["z"].at[at]).astype(jnp.float32)
            y = y * z / (1.0 + jnp.exp(-z))
        hp.barrier_arrive(refs.free.at[at])
        hp.wait_smem_to_gmem(0, wait_read_only=True)
        self.out_tile[...] = y.astype(jnp.bfloat16)
        hp.commit_smem()
        store_rows(self.out_rows, live, self.outputs_from(token))


def _stage(chunk: Any) -> Any:
    """Return the stage of SMEM that a chunk's tokens are in."""
    return jax.lax.rem(chunk, jnp.int32(_STAGES))


def _kernel(refs: Any) -> None:
    """Run one row, head and tile of channels, by three warpgroups."""
    cta = _Cta(refs)
    hp.run_by_warpgroup([cta.fetch, cta.carry_state, cta.write_outputs], refs.done)


def ssd(inputs: StateSpace, pool: jax.Array, rows: Rows, *, dt_softplus: bool) -> tuple[jax.Array, jax.Array]:
    """Launch both kernels. See api.py."""
    x, _, _, B, C, D, z, _ = inputs
    heads, head_dim, state_dim = pool.shape[2:]
    tiles = state_dim // TILE
    skip = None
    if D is not None:
        skip = jnp.broadcast_to(D.astype(jnp.float32).reshape(heads, -1), (heads, head_dim))
    given = prefill_inputs(rows) | dict(x=x, B=B, C=C, z=z, skip=skip)
    given |= dict(factors=decays(inputs, rows.chunks, dt_softplus=dt_softplus))
    of_stage = dict(x=(_STAGES,), B=(_STAGES, tiles), C=(_STAGES, tiles))
    copies = 1 + 2 * tiles + 2
    if z is not None:
        of_stage["z"], copies = (_STAGES,), copies + 1
    scratch = dict(
        tokens=hp.token_tiles({name: (*shape, *SHAPE) for name, shape in of_stage.items()}, x.dtype),
        per_row=hp.SMEM((_STAGES, 4, TILE), jnp.float32),
        per_column=hp.SMEM((_STAGES, 4, TILE), jnp.float32),
        states=hp.tiled(_STATES, _TERMS, tiles, *SHAPE, dtype=jnp.bfloat16),
        decayed=hp.tiled(_TERMS, *SHAPE, dtype=jnp.bfloat16),
        outputs=hp.token_tiles(SHAPE, x.dtype),
        full=hp.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        free=hp.Barrier(num_arrivals=2, num_barriers=_STAGES),
        state_full=hp.Barrier(num_barriers=_STATES),
        state_free=hp.Barrier(num_barriers=_STATES),
        cleared=hp.Barrier(),
        done=hp.Barrier(num_arrivals=3),
    )
    if skip is not None:
        scratch |= dict(skip_tile=hp.SMEM((TILE,), jnp.float32), skip_full=hp.Barrier())
    results = hp.launch(
        _kernel,
        name="ssd",
        grid=dict(row=rows.num_rows, channel_tile=head_dim // TILE, head=heads),
        inputs=given,
        outputs=dict(out=jax.ShapeDtypeStruct(x.shape, x.dtype)),
        updates=dict(pool=pool),
        scratch=scratch,
        warpgroups=3,
    )
    return results["out"], results["pool"]
