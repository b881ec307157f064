"""Serves a hybrid model, a gated delta net and then attention, with a prefix cache over its states and its keys.

The gated delta net is the one of foreign_step.py. What attention adds: keys and values lie in pages, each slot has a row
of a page table, and a request starts from a cached prefix only where both its pages and its state are cached.
`HybridCache` gives a request its pages and its blocks, publishes both, and looks both up. The program answers three
requests from the cache, one of them with drafts, and checks that each answer is that of a server with an empty cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from foreign_step import DIM, HEADS, WIDTH, GatedDeltaNet

import mamba_align_jax as ma
import pallas_kernels as pk

VOCAB, HIDDEN, BLOCK, PAGE, K, CHUNK = 64, HEADS * DIM, 16, 8, 2, 32
NUM_BLOCKS, NUM_PAGES = 16, 40
SPEC = ma.AlignConfig(
    (ma.GroupSpec("gdn", 1, GatedDeltaNet.states("float32", "float32")),), BLOCK, K, max_num_seqs=2, max_model_len=128
)
KV = ma.KVSpec(num_layers=1, num_heads=HEADS, key_dim=DIM, value_dim=DIM, dtype="float32")


class Attention:
    """Causal attention over pages. It has no states; its pools are the pages of keys and of values."""

    kind = "attention"

    def __init__(self, weights):
        self.weights = weights

    @staticmethod
    def states(conv_dtype, state_dtype):
        """Returns (), because keys and values lie in pages instead of blocks."""
        return ()

    def __call__(self, x, at, *pools):
        """Runs a step's packed tokens [tokens, hidden]. Returns the outputs, and the pages with the tokens' keys."""
        # A model with rotations takes the tokens' positions from `pages.positions`.
        pages, split = at.token_pages, at.rows.decode.num_rows
        q, k, v = ((x @ self.weights[name]).reshape(-1, HEADS, DIM) for name in ("q", "k", "v"))
        keys, values = (pages.put(pool, at.layer, new) for pool, new in zip(pools, (k, v), strict=True))

        def attend(slots):
            return lambda rows, q: (pk.paged_attention(q, keys, values, rows, pages.page_tables, slots=slots),)

        (out,) = at.apply(attend(pages.slots[:split]), attend(pages.slots[split:]), (q,), ())
        return out, keys, values


@functools.partial(jax.jit, static_argnames="decode_rows", donate_argnames=("pool", "kv", "state", "tables"))
def step(weights, tokens, batch, updates, additions, page_tables, pool, kv, state, tables, decode_rows):
    """Runs a step of one row. Also returns the logits [tokens, vocabulary] and how many tokens the row accepted."""
    tables = ma.update_block_tables(tables, updates)
    state = ma.add_requests(state, additions)
    state, indices = ma.begin_step(SPEC, state, batch, tables)
    pool = ma.migrate(SPEC, pool, indices)
    inputs = ma.step_inputs(
        *(batch, indices),
        num_decode_rows=decode_rows,
        page_tables=page_tables,
        num_tokens=tokens.shape[0],
        page_size=PAGE,
        num_pages=NUM_PAGES,
    )
    x = weights["embed"][tokens]
    # Each layer is layer 0 of its kind.
    out, *states = GatedDeltaNet(weights)(x, inputs.layer(0), *pool.states[0])
    x = x + out.reshape(x.shape)
    out, keys, values = Attention(weights)(x, inputs.layer(0), kv.keys, kv.values)
    logits = (x + out.reshape(x.shape)) @ weights["embed"].T
    # A draft is accepted if the drafts before it are and the model would have chosen it. One token comes on top.
    places = jnp.arange(1, tokens.shape[0])
    is_right = (tokens[1:] == jnp.argmax(logits[:-1], axis=1)) & (places <= batch.num_drafts[0])
    accepted = 1 + jnp.sum(jnp.cumprod(is_right), dtype=jnp.int32)
    pool = pool.with_group(0, states)
    state, pool = ma.finish_step(SPEC, state, pool, batch, indices, accepted, tables)
    return logits, accepted, pool, ma.KVPages(keys=keys, values=values), state, tables


class Server:
    """Runs one request at a time, in slot 0."""

    def __init__(self, weights):
        self.weights, self.drafts_accepted = weights, 0
        self.pool, self.kv = ma.StatePool.create(SPEC, NUM_BLOCKS), ma.KVPages.create(KV, NUM_PAGES, PAGE)
        self.state, self.tables = ma.AlignState.create(SPEC), ma.BlockTables.create(SPEC)
        # The page table is a plain array, which this host sends whole.
        self.page_tables = np.zeros((SPEC.max_num_seqs, SPEC.max_model_len // PAGE), np.int32)
        self.cache = ma.HybridCache(ma.StateBlockManager(NUM_BLOCKS, BLOCK, K), ma.KVPageManager(NUM_PAGES, PAGE))

    def run(self, start, tokens, num_drafts, given, enters):
        """Runs `tokens` of the request, the first of which is at position `start`. `num_drafts` is -1 for a prompt chunk.

        `given` are the new entries of the request's rows in the two tables. Returns the logits [tokens, vocabulary] and
        how many of the row's tokens were accepted.
        """
        for number, page in given.pages:
            self.page_tables[0, number] = page
        padded = np.zeros(CHUNK if num_drafts < 0 else 1 + K, np.int32)
        padded[: len(tokens)] = tokens
        logits, accepted, self.pool, self.kv, self.state, self.tables = step(
            self.weights,
            jnp.asarray(padded),
            ma.StepBatch.from_host(SPEC, 1, [0], [0, len(tokens)], [num_drafts]),
            ma.TableUpdates.from_host(SPEC, SPEC.num_columns, [(0, 0, *entry) for entry in given.columns]),
            ma.Additions.from_host(SPEC, 1, [0] * enters, [start] * enters),
            jnp.array(self.page_tables),
            *(self.pool, self.kv, self.state, self.tables),
            decode_rows=int(num_drafts >= 0),
        )
        return np.asarray(logits)[: len(tokens)], int(accepted)


def generate(server, name, prompt, count, guess=()):
    """Continues `prompt` by `count` tokens, the most likely ones.

    `guess` are drafts for these tokens, which may be wrong. Returns the new tokens, the logits from which each was
    chosen, and the number of the prompt's tokens that were cached.
    """
    cache, tokens, chosen = server.cache, list(prompt), []
    hit = cache.lookup(tokens)
    keep = cache.checkpoints(len(prompt), junction=hit.junction)
    start = hit.length
    while len(chosen) < count:
        prefilling, drafts = start < len(prompt), []
        if prefilling:
            end = cache.chunk_end(start, CHUNK, CHUNK, len(prompt), keep.stops(start))
        else:
            end, drafts = len(tokens), list(guess[len(chosen) : len(chosen) + K])
        row = tokens[start:end] + drafts
        # In the request's first step `allocate` also returns the blocks and pages of the hit. It returns None if one
        # of the pools has too few; a server then waits, or preempts a request.
        given = cache.allocate(name, start, start, len(row), len(drafts), hit=hit, keep=keep)
        assert given is not None
        logits, accepted = server.run(start, row, -1 if prefilling else len(drafts), given, start == hit.length)
        # A prompt chunk is published now. What a verify row fills is known when its result was read: `commit`.
        cache.dispatched(name, tokens[:end] if prefilling else None)
        if end == len(tokens):
            new = logits[-1:] if prefilling else logits[:accepted]
            chosen += list(new)
            tokens += [int(each.argmax()) for each in new]
            server.drafts_accepted += accepted - 1
        start = end + accepted - 1
        cache.commit(name, tokens, start)
    cache.free(name)
    cache.forget(name)
    return tokens[len(prompt) :][:count], chosen[:count], hit.length


def make_weights(seed=0):
    """Draws the weights of both layers, and of the embedding, which is also the head."""
    rng, channels = np.random.default_rng(seed), 3 * HEADS * DIM
    shapes = dict(embed=(VOCAB, HIDDEN), qkv=(HIDDEN, channels), conv=(WIDTH, channels), a=(HIDDEN, HEADS))
    shapes |= dict(b=(HIDDEN, HEADS), q=(HIDDEN, HIDDEN), k=(HIDDEN, HIDDEN), v=(HIDDEN, HIDDEN))
    weights = {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    return weights | {"A_log": jnp.zeros(HEADS), "dt_bias": jnp.zeros(HEADS)}


def main():
    weights, rng = make_weights(), np.random.default_rng(1)
    prompt, suffix = rng.integers(0, VOCAB, 45).tolist(), rng.integers(0, VOCAB, 9).tolist()
    server = Server(weights)
    first, _, _ = generate(server, "first", prompt, 20)
    # Every third draft is wrong.
    guess = [token if n % 3 else (token + 1) % VOCAB for n, token in enumerate(first)]
    for name, tokens, drafts in (
        ("the prompt again, with drafts", prompt, guess),
        ("another end", prompt[:40] + suffix, ()),
        ("the next turn", prompt + first + suffix, ()),
    ):
        answer, logits, cached = generate(server, name, tokens, 20, drafts)
        wanted, cold, nothing = generate(Server(weights), name, tokens, 20)
        assert cached > 0
        assert nothing == 0
        assert answer == wanted
        np.testing.assert_allclose(logits, cold, atol=1e-4)
        error = np.abs(np.subtract(logits, cold)).max()
        print(f"{name}: {cached} of {len(tokens)} tokens were cached; the same 20 tokens, logits within {error:.0e}")
    server.cache.check()
    print(f"{server.drafts_accepted} drafts were accepted")


if __name__ == "__main__":
    main()
