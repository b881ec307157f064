"""A server under policy "deferred" whose layers are real ops, stepped by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    DeltaRuleRing,
    GroupSpec,
    Mamba2Ring,
    RecurrentState,
    StatePool,
    StepBatch,
    add_requests,
    begin_step,
    finish_step,
    fold_slots,
    migrate,
    split_rows,
)
from mamba_align_jax.layers.delta_rule import convolved_delta_rule
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.metadata.layer_step import LayerStep

BLOCK, L, K, SLOTS, LENGTH = 16, 8, 3, 3, 96
KEY_HEADS, HEADS, DIM, WIDTH, LAYERS = 1, 2, 4, 4, 2
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM  # of the convolution, in every kind of layers
STATES = ConvState(WIDTH, CHANNELS, "float32"), RecurrentState((HEADS, DIM, DIM))
RING = DeltaRuleRing(KEY_HEADS, DIM, HEADS, DIM, "float32")
GROUP = GroupSpec("gdn", LAYERS, STATES, RING)
CHUNK = 40


def make_spec(**changes):
    fields = dict(groups=(GROUP,), block_size=BLOCK, num_speculative_tokens=K, max_num_seqs=SLOTS, max_model_len=LENGTH)
    return AlignConfig(**fields | dict(policy="deferred", fold_length=L) | changes)


SPEC = make_spec()
# The same for Mamba-2: two heads that share one B.
MAMBA2_GROUP = GroupSpec("mamba2", LAYERS, STATES, Mamba2Ring(HEADS, DIM, KEY_HEADS, DIM, "float32"))
SPECS = SPEC, make_spec(groups=(MAMBA2_GROUP,))
NUMBERS = np.random.default_rng(0)
TAPS = NUMBERS.normal(size=(WIDTH, CHANNELS)).astype(np.float32)
A_LOG, BIAS = (NUMBERS.normal(size=HEADS).astype(np.float32) for _ in range(2))
INPUTS = CHANNELS + HEADS + HEADS * DIM


def inputs_of(seed, length=LENGTH):
    """A layer's inputs for each position of a sequence, side by side. float32 [length, channels]

    For delta-rule layers they are qkv, b and a, and for Mamba-2 [x, B, C], dt and z.
    """
    return np.random.default_rng(seed).normal(size=(length, INPUTS)).astype(np.float32)


class NoProjections:
    """In place of Mamba-2's projections, whose sums a CPU may compute in another order for other rows of a matrix."""

    def __call__(self, x):
        xBC, dt, z = jnp.split(x, [CHANNELS, CHANNELS + HEADS], axis=1)
        return z, xBC, dt

    def sums(self, x):
        return x


@functools.cache
def mamba2():
    """The layer of Mamba-2. Making it compiles programs, so it is made when a server needs it, and not at import."""
    mixer = Mamba2Mixer(1, HEADS, DIM, DIM, KEY_HEADS, WIDTH, "float32", nnx.Rngs(0), norm=False)
    assert (mixer.states("float32", "float32"), mixer.ring("float32")) == (MAMBA2_GROUP.states, MAMBA2_GROUP.ring)
    mixer.in_proj = mixer.out_proj = NoProjections()
    return mixer


def run_layers(align, rows, chunks, x, pool):
    """Runs all layers on the same inputs."""
    qkv, b, a = x[:, :CHANNELS], x[:, CHANNELS : CHANNELS + HEADS], x[:, CHANNELS + HEADS :: DIM]
    arrays = *pool.states[0], *pool.ring(0)
    for layer in range(LAYERS):
        at = LayerStep(rows=rows, chunks=chunks, layer=jnp.int32(layer), implementation="xla")
        if align.groups == (MAMBA2_GROUP,):
            out, *arrays = mamba2()(x, at, *arrays)
            continue
        weights, layout = map(jnp.asarray, (TAPS, A_LOG, BIAS)), align.groups[0].states[0].layout
        out, *arrays = convolved_delta_rule(qkv, a, b, *weights, at, *arrays, window_layout=layout)
    return out, pool.with_group(0, arrays)


@functools.partial(jax.jit, static_argnames=("align", "decode_rows", "migrates"))
def run_step(align, state, pool, tables, additions, batch, x, num_sampled, decode_rows, migrates):
    state = add_requests(state, additions)
    state, indices = begin_step(align, state, batch, tables)
    pool = migrate(align, pool, indices) if migrates else pool
    rows = split_rows(batch, indices, decode_rows)
    out, pool = run_layers(align, rows, rows.chunks(x.shape[0]), x, pool)
    state, pool = finish_step(align, state, pool, batch, indices, num_sampled, tables)
    lost = indices.num_null_reads() + (0 if migrates else indices.folds.num_unsettled())
    return out, state, pool, lost


fold = jax.jit(fold_slots, static_argnames="align")


class Server:
    """Slots with a block in every column. Pool and rings start as NaN."""

    def __init__(self, seed=0, align=SPEC):
        self.rng, self.align = np.random.default_rng(seed), align
        if align.groups == (MAMBA2_GROUP,):
            mamba2()  # before a step is traced
        self.pool = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), StatePool.create(align, 64))
        self.state, columns = AlignState.create(align), align.num_columns
        self.blocks = 1 + np.arange(SLOTS * columns, dtype=np.int32).reshape(SLOTS, columns)
        self.sequences, self.entering, self.outputs = {}, {}, {}

    def enter(self, slot, sequence, computed=0, like=None):
        """Enters a sequence of inputs, on the boundary that slot `like` has left."""
        self.sequences[slot], self.entering[slot], self.outputs[slot] = sequence, computed, {}
        if computed:
            self.blocks[slot, computed // BLOCK - 1] = self.blocks[like, computed // BLOCK - 1]

    def step(self, rows, chunk=None, migrates=False):
        """Runs verify rows (slot, tokens, accepted) and a chunk (slot, tokens)."""
        computed = np.asarray(self.state.num_computed_tokens).copy()
        for slot, count in self.entering.items():
            computed[slot] = count
        slots, lengths, accepted = (list(x) for x in zip(*rows, strict=True)) if rows else ([], [], [])
        padding = SLOTS - len(rows)
        slots, lengths, accepted = slots + [-1] * padding, lengths + [0] * padding, accepted + [1] * padding
        drafts = [n - 1 if slot >= 0 else -1 for slot, n in zip(slots, lengths, strict=True)]
        x = np.full((SLOTS * (1 + K) + CHUNK, INPUTS), np.nan, np.float32)
        if chunk:
            slots, lengths, accepted, drafts = [*slots, chunk[0]], [*lengths, chunk[1]], [*accepted, 1], [*drafts, -1]
        starts = np.cumsum([0, *lengths]).tolist()
        for slot, begin, n, taken, kind in zip(slots, starts, lengths, accepted, drafts, strict=False):
            if n:
                x[begin : begin + n] = self.sequences[slot][computed[slot] :][:n]
                if kind >= 0:  # What follows the accepted tokens are wrong drafts.
                    x[begin + taken : begin + n] = self.rng.normal(size=(n - taken, x.shape[1]))
        batch = StepBatch.from_host(self.align, SLOTS + 1, slots, starts, drafts)
        additions = Additions.from_host(self.align, SLOTS, list(self.entering), list(self.entering.values()))
        self.entering = {}
        tables = BlockTables(blocks=jnp.asarray(self.blocks[None]))
        sampled = np.array([*accepted, *[1] * (SLOTS + 1 - len(accepted))], np.int32)
        out, self.state, self.pool, lost = run_step(
            self.align, self.state, self.pool, tables, additions, batch, x, sampled, SLOTS, migrates
        )
        for slot, begin, n, taken, kind in zip(slots, starts, lengths, accepted, drafts, strict=False):
            for t in range(taken if kind >= 0 else n):
                self.outputs[slot][int(computed[slot]) + t] = np.asarray(out[begin + t])
        return int(lost)

    def finish(self, slot, end, schedule):
        """Runs a slot to `end` by a schedule of (tokens, accepted), and returns its boundaries' blocks."""
        while (left := end - int(self.state.num_computed_tokens[slot])) > 0:
            tokens, accepted = schedule()
            tokens = min(tokens, left)
            assert self.step([(slot, tokens, min(accepted, tokens))]) == 0
        self.fold(slot)
        return {n: self.boundary(slot, n) for n in range(BLOCK, end + 1, BLOCK)}

    def fold(self, slot):
        tables = BlockTables(blocks=jnp.asarray(self.blocks[None]))
        self.state, self.pool = fold(self.align, self.state, self.pool, tables, jnp.array([slot, -1]))

    def boundary(self, slot, tokens):
        block = self.blocks[slot, tokens // BLOCK - 1]
        conv, recurrent = (np.asarray(x[:, block]) for x in self.pool.states[0])
        conv = conv if self.align.groups[0].states[0].layout == "SD" else conv.swapaxes(1, 2)
        return conv[:, : WIDTH - 1], recurrent
