"""A model whose next token is exactly known.

It adds up its recurrent state, its convolution window and its keys in whole numbers, so that a token is right only if all
three were read from the right places. With `adds` its state is a sum, so that policy "deferred" can serve it: an entry is
what a token adds.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax import ConvState, DeltaRuleRing, GroupSpec, RecurrentState
from mamba_align_jax.kv import KVPages, KVSpec
from pallas_kernels import NULL_BLOCK, causal_conv1d_prefill, causal_conv1d_update
from pallas_kernels.blocks import read_blocks, write_blocks
from pallas_kernels.rows import token_rows

VOCAB, PRIME = 61, 8191
TAPS = (1, 5, 25, 125)


def entry(x, position):
    """What the token `x` - 1 adds to a state that is a sum.

    Part of it depends on the position alone. Otherwise every third token, once repeated, would be repeated to the end.
    """
    return (x + position % 5) * (1 + position % 11)


def next_tokens(tokens, stutter=0, adds=False):
    """The token that the model chooses after each of `tokens`.

    Its state and its keys depend on all tokens up to there, its window on the last four. `stutter` and `adds` are as for
    `Speller`.
    """
    state = keys = 0
    said = []
    for position, token in enumerate(tokens):
        state = state + entry(token + 1, position) if adds else (31 * state + token + 1) % PRIME
        keys += (token + 1) * (1 + position % 7)
        last = tokens[max(position - len(TAPS) + 1, 0) : position + 1][::-1]
        total = state + keys + sum(tap * (token + 1) for tap, token in zip(TAPS[::-1], last, strict=False))
        said.append(token if total % 3 < stutter else total % VOCAB)
    return said


def next_token(tokens, stutter=0, adds=False):
    """The token that the model chooses after `tokens`."""
    return next_tokens(tokens, stutter, adds)[-1]


class Config(NamedTuple):
    vocab_size: int = VOCAB
    max_position_embeddings: int = 1024
    eos_token_id: int | None = None


class Speller(nnx.Module):
    """The model. With `stutter` 1 or 2, so many thirds of its tokens repeat the last one, which prompt lookup guesses.

    With `adds` its state is the sum of what `entry` returns for its tokens.
    """

    dtype = "float32"

    def __init__(self, stutter=0, adds=False):
        self.config = Config()
        self.stutter, self.adds = stutter, adds

    def kv_spec(self):
        return KVSpec(1, 1, 1, 0, self.dtype)

    def state_groups(self, state_dtype="float32"):
        states = ConvState(len(TAPS), 1, self.dtype), RecurrentState((1, 1, 1), state_dtype)
        return (GroupSpec("speller", 1, states, DeltaRuleRing(1, 1, 1, 1, self.dtype) if self.adds else None),)

    def without_interior(self):
        return []

    def __call__(self, tokens, step, pool, kv):
        x = tokens.astype(jnp.float32) + 1
        keys = kv.keys.at[0, step.pages.kv_page, step.pages.kv_offset].set(x[:, None, None], mode="drop")
        num_decode_rows = step.rows.decode.num_rows
        taps = jnp.asarray(np.array(TAPS, np.float32)[:, None])
        layer = jnp.int32(0)

        def attend(rows, at, pages):
            """The sum of the keys up to each token, weighted by position."""
            place = jnp.arange(pages.shape[1] * keys.shape[2])
            seen = place <= (rows.num_computed_tokens[at.row] + at.offset)[:, None]
            held = keys[0, pages[at.row]].reshape(at.row.shape[0], -1)
            return jnp.sum(jnp.where(seen, held * (1.0 + (place % 7).astype(jnp.float32)), 0), axis=1)

        def added(rows, at, x):
            """What each token adds to the state."""
            if not self.adds:
                return x
            return entry(x, (rows.num_computed_tokens[at.row] + at.offset).astype(jnp.float32))

        def recur(rows, at, x, states, pool, write):
            """Updates the state token by token. `write` is the block that each token writes, NULL_BLOCK for none."""
            x = added(rows, at, x)

            def run(i, carry):
                states, pool, out = carry
                old = states[at.row[i]]
                new = old + x[i] if self.adds else (31 * old + x[i]) % PRIME
                new = jnp.where(at.valid[i], new, old)
                pool = write_blocks(pool, layer, write[i][None], new[None])
                return states.at[at.row[i]].set(new), pool, out.at[i].set(new[0, 0, 0])

            return jax.lax.fori_loop(0, x.shape[0], run, (states, pool, jnp.zeros(x.shape[0])))[1:]

        def fold(rows, at, x, states, pool, ring):
            """Returns the state before each row's first token, the pool with complete fold groups, and the ring."""
            keys, corrections, decays = ring
            slot, base, places = rows.fold.slot, rows.fold.base, corrections.shape[3]
            position = base[:, None] + jnp.arange(places)
            entry = corrections[0, slot[:, None], 0, position % places, 0]
            until = lambda end: jnp.sum(jnp.where(position < end[:, None], entry, 0), axis=1)[:, None, None, None]
            group_end = (base // (places // 2) + 1) * (places // 2)
            pool = write_blocks(pool, layer, rows.fold.block, states + until(group_end))
            states = states + until(rows.num_computed_tokens)
            new = jnp.where(at.valid, slot[at.row], corrections.shape[1])
            place = (rows.num_computed_tokens[at.row] + at.offset) % places
            put = lambda array, values: array.at[0, new, 0, place].set(values, mode="drop")
            x = added(rows, at, x)
            ring = put(keys, jnp.ones((*x.shape, 1))), put(corrections, x[:, None]), put(decays, jnp.zeros(x.shape))
            return states, pool, ring

        def rows_of(conv_op, pages, is_decode):
            def run(rows, x, conv, recurrent, *ring):
                loc, at = rows.query_start_loc, token_rows(rows.query_start_loc, x.shape[0])
                rows = rows.of_group(0, layer)
                window, conv = conv_op(x[:, None], conv, taps, None, rows, activation=None)
                last = at.offset == jnp.diff(loc)[at.row] - 1
                write = rows.write[at.row, at.offset] if is_decode else rows.write[at.row, 0]
                write = jnp.where(at.valid & (last | is_decode), write, NULL_BLOCK)
                if rows.checkpoints is not None:
                    here = rows.checkpoints.offset[at.row] == at.offset[:, None] + 1
                    inside = jnp.sum(jnp.where(here, rows.checkpoints.block[at.row], NULL_BLOCK), axis=1)
                    write = jnp.where(at.valid & ~last, inside, write)
                states = read_blocks(recurrent, layer, rows.read)
                if is_decode and rows.fold is not None:
                    states, recurrent, ring = fold(rows, at, x, states, recurrent, ring)
                    write = jnp.full_like(write, NULL_BLOCK)
                recurrent, states = recur(rows, at, x, states, recurrent, write)
                out = window[:, 0] + states + attend(rows, at, pages)
                out = jnp.where(out % 3 < self.stutter, x - 1, out)
                return jnp.where(at.valid, out, 0), conv, recurrent, *ring

            return run

        out, *states = step.rows.apply(
            rows_of(causal_conv1d_update, step.pages.page_table[:num_decode_rows], True),
            rows_of(causal_conv1d_prefill, step.pages.page_table[num_decode_rows:], False),
            (x,),
            (*pool.states[0], *pool.ring(0)),
        )
        return out[:, None], pool.with_group(0, states), KVPages(keys=keys, values=kv.values)

    def logits(self, hidden):
        return -((jnp.arange(VOCAB, dtype=jnp.float32) - hidden % VOCAB) ** 2)

    def most_likely(self, hidden):
        return jnp.argmax(self.logits(hidden), axis=1).astype(jnp.int32)
