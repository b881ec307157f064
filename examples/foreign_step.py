"""Calls this library in the jitted step of another server, which has its own loop, slots, block ids and layer.

Request A is prefilled in chunks and then decoded by verify steps, each of which accepts some of its tokens. Request B
shares A's first 32 tokens and starts from the state after them, which is in one of A's blocks. The program checks that
both give the outputs of an uncached run over all of their tokens.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mamba_align_jax as ma
import pallas_kernels as pk

HEADS, DIM, WIDTH, BLOCK, K = 2, 16, 4, 16, 2


class GatedDeltaNet:
    """The server's own layer. It follows the protocol `mamba_align_jax.Mixer`."""

    kind = "gdn"

    def __init__(self, weights):
        self.weights = weights

    @staticmethod
    def states(conv_dtype, state_dtype):
        """Describes the window and the recurrent state of one block."""
        return ma.ConvState(WIDTH, 3 * HEADS * DIM, conv_dtype), ma.RecurrentState((HEADS, DIM, DIM), state_dtype)

    def __call__(self, x, at, *pools):
        """Runs a step's packed tokens [tokens, hidden]. `at` says where this layer is in this step."""
        w = self.weights

        def decode(rows, qkv, a, b, conv, recurrent):
            """Runs decode and verify rows token by token, and keeps a state after each token."""
            qkv, conv = pk.causal_conv1d_update(qkv, conv, w["conv"], None, rows)
            out, recurrent = pk.gated_delta_rule_update(qkv, a, b, w["A_log"], w["dt_bias"], recurrent, rows)
            return out, conv, recurrent

        def prefill(rows, qkv, a, b, conv, recurrent):
            """Runs prefill rows chunk by chunk, and keeps one state, after the last token of each row."""
            qkv, conv = pk.causal_conv1d_prefill(qkv, conv, w["conv"], None, rows)
            q, k, v = jnp.split(qkv.reshape(-1, 3 * HEADS, DIM), 3, axis=1)
            g, beta = pk.gated_delta_rule_gates(a, b, w["A_log"], w["dt_bias"])
            out, recurrent = pk.gated_delta_rule_prefill(q, k, v, g, beta, recurrent, rows)
            return out, conv, recurrent

        return at.apply(decode, prefill, (x @ w["qkv"], x @ w["a"], x @ w["b"]), pools)


STATES = GatedDeltaNet.states("float32", "float32")
SPEC = ma.AlignConfig((ma.GroupSpec(GatedDeltaNet.kind, 1, STATES),), BLOCK, K, max_num_seqs=3, max_model_len=96)


@functools.partial(jax.jit, static_argnames="decode_rows", donate_argnames=("pool", "state", "tables"))
def step(weights, tokens, batch, updates, additions, accepted, pool, state, tables, decode_rows):
    """Runs a whole step as one program. It copies no state and never waits for the host."""
    tables = ma.update_block_tables(tables, updates)
    state = ma.add_requests(state, additions)
    state, indices = ma.begin_step(SPEC, state, batch, tables)
    pool = ma.migrate(SPEC, pool, indices)
    at = ma.LayerStep.create(batch, indices, num_decode_rows=decode_rows, num_tokens=tokens.shape[0])
    out, *arrays = GatedDeltaNet(weights)(weights["embed"][tokens], at, *pool.states[0])
    state, pool = ma.finish_step(SPEC, state, pool.with_group(0, arrays), batch, indices, accepted, tables)
    return out, pool, state, tables


class Server:
    """The server's loop, with one row per step. A slot owns a block per column, and may use blocks of another slot."""

    def __init__(self, weights):
        self.weights = weights
        self.pool = ma.StatePool.create(SPEC, 1 + SPEC.max_num_seqs * SPEC.num_columns)
        self.state, self.tables = ma.AlignState.create(SPEC), ma.BlockTables.create(SPEC)

    def block(self, slot, column):
        return 1 + slot * SPEC.num_columns + column

    def run(self, slot, start, tokens, accepted=None, enters=False, borrowed=None):
        """Runs `tokens`, the first of which is at position `start`.

        They are a prompt chunk, or with `accepted` a verify row, of which that many tokens are accepted. `enters` is
        true in the request's first step. `borrowed` has blocks of another slot by column. Returns the outputs that
        count.
        """
        verify, columns = accepted is not None, range(SPEC.num_columns) if enters else ()
        row = {column: self.block(slot, column) for column in columns} | (borrowed or {})
        updates = [(0, slot, column, block) for column, block in row.items()]
        entering = ([slot], [start]) if enters else ([], [])
        drafts = len(tokens) - 1 if verify else -1
        out, self.pool, self.state, self.tables = step(
            self.weights,
            jax.device_put(tokens),
            ma.StepBatch.from_host(SPEC, 1, [slot], [0, len(tokens)], [drafts]),
            ma.TableUpdates.from_host(SPEC, SPEC.num_columns, updates),
            ma.Additions.from_host(SPEC, 1, *entering),
            jax.device_put(np.int32(accepted or 0)),
            *(self.pool, self.state, self.tables),
            decode_rows=int(verify),
        )
        return np.asarray(out)[: accepted or len(tokens)]


def main():
    rng, channels = np.random.default_rng(0), 3 * HEADS * DIM
    shapes = dict(embed=(50, 32), qkv=(32, channels), conv=(WIDTH, channels), a=(32, HEADS), b=(32, HEADS))
    weights = {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    weights |= {"A_log": jnp.zeros(HEADS), "dt_bias": jnp.zeros(HEADS)}
    a, suffix = rng.integers(0, 50, 46, dtype=np.int32), rng.integers(0, 50, 9, dtype=np.int32)
    b, junk = np.concatenate([a[:32], suffix]), np.zeros(2, np.int32)

    server = Server(weights)
    outs = [server.run(0, 0, a[:16], enters=True), server.run(0, 16, a[16:32]), server.run(0, 32, a[32:40])]
    # Three verify rows of three tokens: two are accepted, then three, then one. The rejected tokens are junk.
    outs += [server.run(0, 40, np.append(a[40:42], junk[:1]), accepted=2), server.run(0, 42, a[42:45], accepted=3)]
    outs += [server.run(0, 45, np.append(a[45:46], junk), accepted=1)]
    # B starts after 32 tokens. The state after them is in A's second column.
    resumed = server.run(1, 32, suffix, enters=True, borrowed={1: server.block(0, 1)})

    for name, got, tokens in (("A", np.concatenate(outs), a), ("B", resumed, b)):
        whole = Server(weights).run(2, 0, tokens, enters=True)[-len(got) :]
        np.testing.assert_allclose(got, whole, atol=2e-6)
        print(f"request {name}: {len(got)} tokens right, largest difference {np.abs(got - whole).max():.1e}")


if __name__ == "__main__":
    main()
