"""Replaces a flax model's own recurrent cache with this library's pool. The model's weights stay as they are.

The model is a tiny Mamba-2, whose own cache has one state per sequence and takes one token per call. The model reads
and writes its states in one function only, `recur`, so another function in its place replaces the cache. Prompts then
run in chunks, and a prompt that begins like an earlier one starts from the state that was kept at a block boundary. The
program checks that both caches give the same answers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import mamba_align_jax as ma
import pallas_kernels as pk

VOCAB, HIDDEN, LAYERS, HEADS, DIM, STATES, WIDTH = 64, 32, 2, 4, 16, 8, 4
INNER, CHANNELS = HEADS * DIM, HEADS * DIM + 2 * STATES


class Block(nnx.Module):
    """The parameters of a Mamba-2 layer."""

    def __init__(self, rngs):
        self.into = nnx.Linear(HIDDEN, INNER + CHANNELS + HEADS, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(INNER, HIDDEN, use_bias=False, rngs=rngs)
        self.taps = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, CHANNELS)) / 2)
        self.A = nnx.Param(-jnp.arange(1.0, HEADS + 1))
        self.D, self.dt_bias = nnx.Param(jnp.ones(HEADS)), nnx.Param(jnp.full(HEADS, -2.0))


class Model(nnx.Module):
    """The model. It is called with `recur(number, block, xBC, dt)`, which runs the recurrence of layer `number`.

    `recur` takes xBC [tokens, CHANNELS] and dt [tokens, HEADS], and returns [tokens, INNER].
    """

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(HIDDEN, rngs=rngs) for _ in range(LAYERS)])
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens, recur):
        x = self.embed(tokens)
        for number, (norm, block) in enumerate(zip(self.norms, self.blocks, strict=True)):
            z, xBC, dt = jnp.split(block.into(norm(x)), [INNER, INNER + CHANNELS], axis=1)
            x = x + block.out(recur(number, block, xBC, dt) * jax.nn.silu(z))
        return self.embed.attend(x)


# Before: the model's own cache has one window and one state per sequence, and each call runs one token per sequence.


@nnx.jit
def own_step(model, tokens, windows, states):
    windows, states = list(windows), list(states)

    def recur(number, block, xBC, dt):
        inputs = jnp.concatenate([windows[number], xBC[:, None]], axis=1)
        windows[number] = inputs[:, 1:]
        x, B, C = jnp.split(jax.nn.silu((inputs * block.taps[...]).sum(1)), [INNER, INNER + STATES], axis=1)
        x, dt = x.reshape(-1, HEADS, DIM), jax.nn.softplus(dt + block.dt_bias[...])
        decay = jnp.exp(block.A[...] * dt)[..., None, None]
        states[number] = decay * states[number] + (dt[..., None] * x)[..., None] * B[:, None, None]
        y = (states[number] * C[:, None, None]).sum(-1) + block.D[...][:, None] * x
        return y.reshape(-1, INNER)

    logits = model(tokens, recur)
    return logits, windows, states


def own_generate(model, prompt, count):
    windows = [jnp.zeros((1, WIDTH - 1, CHANNELS))] * LAYERS
    states = [jnp.zeros((1, HEADS, DIM, STATES))] * LAYERS
    tokens, rows = list(prompt), []
    for at in range(len(prompt) + count - 1):
        logits, windows, states = own_step(model, jnp.asarray(tokens[at : at + 1]), windows, states)
        rows.append(np.asarray(logits)[0])
        if at + 1 == len(tokens):
            tokens.append(int(rows[-1].argmax()))
    return tokens, rows[len(prompt) - 1 :]


# After: states are blocks of a pool. The library decides which blocks, and its kernels compute the recurrence.

BLOCK, CHUNK = 16, 32


def parts(xBC):
    x, B, C = jnp.split(xBC, [INNER, INNER + STATES], axis=1)
    return x.reshape(-1, HEADS, DIM), B[:, None], C[:, None]


class Mixer:
    """The recurrence of one layer over pools. It follows the protocol `mamba_align_jax.Mixer`."""

    kind = "mamba2"

    def __init__(self, block):
        self.block = block

    @staticmethod
    def states(conv_dtype, state_dtype):
        """Describes the window and the recurrent state of one block."""
        return ma.ConvState(WIDTH, CHANNELS, conv_dtype), ma.RecurrentState((HEADS, DIM, STATES), state_dtype)

    def __call__(self, x, at, *pools):
        """Takes `x` [tokens, CHANNELS + HEADS] to [tokens, INNER]. Returns it, followed by the updated pools.

        `at` says where this layer is in this step.
        """
        taps, A = self.block.taps[...], self.block.A[...]
        weights = dict(D=self.block.D[...], dt_bias=self.block.dt_bias[...])

        def decode(rows, xBC, dt, conv, recurrent):
            xBC, conv = pk.causal_conv1d_update(xBC, conv, taps, None, rows)
            x, B, C = parts(xBC)
            y, recurrent = pk.selective_state_update(x, dt, A, B, C, recurrent, rows, **weights)
            return y, conv, recurrent

        def prefill(rows, xBC, dt, conv, recurrent):
            xBC, conv = pk.causal_conv1d_prefill(xBC, conv, taps, None, rows)
            x, B, C = parts(xBC)
            y, recurrent = pk.ssd(x, dt, A, B, C, recurrent, rows, **weights)
            return y, conv, recurrent

        y, *pools = at.apply(decode, prefill, tuple(jnp.split(x, [CHANNELS], axis=1)), pools)
        return y.reshape(-1, INNER), *pools


GROUP = ma.GroupSpec(Mixer.kind, LAYERS, Mixer.states("float32", "float32"))
SPEC = ma.AlignConfig((GROUP,), BLOCK, max_num_seqs=2, max_model_len=128)


@functools.partial(nnx.jit, static_argnames="decode_rows", donate_argnames=("pool", "state", "tables"))
def step(model, tokens, batch, updates, additions, pool, state, tables, decode_rows):
    tables = ma.update_block_tables(tables, updates)
    state = ma.add_requests(state, additions)
    state, indices = ma.begin_step(SPEC, state, batch, tables)
    pool = ma.migrate(SPEC, pool, indices)
    at = ma.LayerStep.create(batch, indices, num_decode_rows=decode_rows, num_tokens=tokens.shape[0])

    def recur(number, block, xBC, dt):
        nonlocal pool
        y, *states = Mixer(block)(jnp.concatenate([xBC, dt], axis=1), at.at(number), *pool.states[0])
        pool = pool.with_group(0, states)
        return y

    logits = model(tokens, recur)
    state, pool = ma.finish_step(SPEC, state, pool, batch, indices, jnp.ones(1, jnp.int32), tables)
    return logits, pool, state, tables


class Server:
    """Runs one request at a time, in slot 0."""

    def __init__(self, model, num_blocks=12):
        self.model, self.blocks = model, ma.StateBlockManager(num_blocks, BLOCK)
        self.pool = ma.StatePool.create(SPEC, num_blocks)
        self.state, self.tables = ma.AlignState.create(SPEC), ma.BlockTables.create(SPEC)

    def run(self, start, tokens, entries, enters, prefilling):
        padded = np.zeros(CHUNK if prefilling else 1, np.int32)
        padded[: len(tokens)] = tokens
        logits, self.pool, self.state, self.tables = step(
            self.model,
            jnp.asarray(padded),
            ma.StepBatch.from_host(SPEC, 1, [0], [0, len(tokens)], [-1 if prefilling else 0]),
            ma.TableUpdates.from_host(SPEC, SPEC.num_columns, [(0, 0, *entry) for entry in entries]),
            ma.Additions.from_host(SPEC, 1, [0] * enters, [start] * enters),
            *(self.pool, self.state, self.tables),
            decode_rows=int(not prefilling),
        )
        return np.asarray(logits)[len(tokens) - 1]

    def generate(self, name, prompt, count):
        """Continues `prompt` by `count` tokens.

        Returns all tokens, the logits from which each new token was chosen, and the number of prompt tokens that were
        cached.
        """
        tokens, rows = list(prompt), []
        hit = self.blocks.lookup(tokens)
        start = hit.length
        while len(rows) < count:
            prefilling = start < len(prompt)
            end = ma.next_chunk_end(start, start + CHUNK, len(prompt), BLOCK) if prefilling else len(tokens)
            # In the first step, `allocate` also returns the blocks of the hit.
            entries = self.blocks.allocate(name, start, start, end - start, hit=hit)
            logits = self.run(start, tokens[start:end], entries, start == hit.length, prefilling)
            self.blocks.release(name)
            self.blocks.commit(name, tokens[:end])
            start = end
            if end == len(tokens):
                rows.append(logits)
                tokens.append(int(logits.argmax()))
        self.blocks.free(name)
        return tokens, rows, hit.length


def main():
    model, rng = Model(nnx.Rngs(0)), np.random.default_rng(0)
    a, suffix = rng.integers(0, VOCAB, 45).tolist(), rng.integers(0, VOCAB, 7).tolist()
    server = Server(model)
    for name, prompt in (("a", a), ("b", a[:40] + suffix), ("a again", a)):
        tokens, logits, cached = server.generate(name, prompt, count=20)
        own_tokens, own_logits = own_generate(model, prompt, count=20)
        assert tokens == own_tokens
        np.testing.assert_allclose(logits, own_logits, atol=1e-4)
        error = np.abs(np.subtract(logits, own_logits)).max()
        print(f"{name}: {cached} of {len(prompt)} tokens were cached; the same 20 tokens, logits within {error:.0e}")


if __name__ == "__main__":
    main()
