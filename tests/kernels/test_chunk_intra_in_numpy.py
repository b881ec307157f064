"""The Mosaic GPU kernels that make products of keys for the delta rule's prefill, run in NumPy, beside Triton's kernels."""

from types import SimpleNamespace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import hopper_in_numpy
from kernels.hopper_in_numpy import Ref, memory

from pallas_kernels.chunks import Chunks, chunk_rows
from pallas_kernels.gated_delta_rule._arguments import Options, Tokens
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill import chunk_intra_per_channel_sm90 as per_channel
from pallas_kernels.gated_delta_rule.prefill import chunk_intra_sm90 as per_head
from pallas_kernels.gated_delta_rule.prefill.chunk_intra import decay_spans
from pallas_kernels.gated_delta_rule.prefill.cumsum_sm90 import Factors
from pallas_kernels.gated_delta_rule.prefill.launch import invert, multiply

LENGTHS, COMPUTED = (130, 0, 65), (7, 0, 0)  # the first row's chunks have 57, 64 and 9 tokens
EXTRA = 9  # tokens after the last row, which hold NaN
SIZE = per_head.SIZE
SQUARE = SIZE, SIZE
BFLOAT16, FLOAT32 = jnp.bfloat16, np.float32


class Call(NamedTuple):
    """The inputs of a call, and what Triton's kernels make of them, interpreted."""

    q: jnp.ndarray
    k: jnp.ndarray
    g: jnp.ndarray
    beta: jnp.ndarray
    chunks: Chunks
    options: Options
    terms: int
    wanted: dict


def draw(rng, key_heads, value_heads, key_dim, use_qk_l2norm, *, kda=False):
    """Draws the inputs of a ragged batch."""
    tokens = sum(LENGTHS)
    normal = lambda *shape: np.concatenate([rng.normal(size=(tokens, *shape)), np.full((EXTRA, *shape), np.nan)])
    q, k = (jnp.asarray(normal(key_heads, key_dim) * key_dim**-0.5, BFLOAT16) for _ in range(2))
    g = jnp.asarray(-0.3 * np.abs(normal(value_heads, *[key_dim] * kda)), FLOAT32)
    beta = jnp.asarray(1 / (1 + np.exp(-normal(value_heads))), FLOAT32)
    loc = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32)
    chunks = chunk_rows(loc, jnp.asarray(COMPUTED, jnp.int32), tokens + EXTRA)
    config = default_prefill_config(value_heads * key_dim, key_dim, 2, per_channel=kda)
    options = Options(0.3, use_qk_l2norm)
    wanted = multiply(Tokens(q, k, None, g, beta), chunks, options=options, config=config, interpret=True)
    system = wanted.pop("system")
    wanted["solve"] = invert(system, beta, chunks, dtype=BFLOAT16, terms=config.pieces, interpret=True)
    return Call(q, k, g, beta, chunks, options, config.pieces, wanted)


def run(monkeypatch, module, call, programs, given, outputs, one):
    """Runs one(refs, chunk, program) for all programs and chunks, and returns the outputs."""
    given = {name: Ref(np.array(x)) for name, x in given.items()}
    refs = dict(cu_chunk_seqlens=call.chunks.cu_chunk_seqlens) | given | outputs
    program = hopper_in_numpy.patch(monkeypatch, module)
    for chunk in range(call.chunks.seq_idx.shape[0]):
        for number in range(programs):
            program |= dict(chunk=chunk, pair=number)
            one(refs, jnp.int32(chunk), jnp.int32(number))
    return {name: np.asarray(x.array, FLOAT32) for name, x in outputs.items()}


def assert_alike(found, call, tolerances):
    """Compares what belongs to chunks that are not empty. `tolerances` are relative ones, of single values and of all."""
    is_full = np.asarray(call.chunks.cu_chunk_seqlens[1:] > call.chunks.cu_chunk_seqlens[:-1])
    for name, values in found.items():
        of_full = lambda x, name=name: np.compress(is_full, np.asarray(x, FLOAT32), axis=1 if name == "decay" else 2)
        actual, expected = of_full(values), of_full(call.wanted[name])
        rtol, atol = tolerances[name]
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("use_qk_l2norm", [True, False])
@pytest.mark.parametrize(("key_heads", "value_heads", "key_dim"), [(2, 4, 64), (1, 3, 128)])
def test_products_are_those_of_the_triton_kernels(rng, monkeypatch, key_heads, value_heads, key_dim, use_qk_l2norm):
    """A program takes two value heads of a key head at a time, of which the last may be alone."""
    call = draw(rng, key_heads, value_heads, key_dim, use_qk_l2norm)
    outputs = {name: memory(BFLOAT16, *call.wanted[name].shape) for name in ("solve", "attention")}
    outputs |= dict(scales=memory(FLOAT32, value_heads, call.chunks.seq_idx.shape[0], 4, SIZE))
    tokens = [memory(BFLOAT16, key_dim // SIZE, *SQUARE) for _ in range(2)]
    own = SimpleNamespace(
        token_rows=tokens,
        token_tiles=tokens,
        system=memory(FLOAT32, 2, *SQUARE),
        solution=memory(BFLOAT16, 2, call.terms, *SQUARE),
        attention_tile=memory(BFLOAT16, 2, *SQUARE),
        per_row=memory(FLOAT32, 2, len(Factors()), SIZE),
        per_column=memory(FLOAT32, 2, 2, SIZE),
        norms=memory(FLOAT32, 2, SIZE),
        sums=memory(FLOAT32, 3, 4),
        kinds=memory(FLOAT32, 2, 4, SIZE),
        full=None,
    )

    def one(refs, chunk, key_head):
        bounds = refs["cu_chunk_seqlens"][chunk], refs["cu_chunk_seqlens"][chunk + 1]
        if bounds[0] == bounds[1]:
            return
        refs = SimpleNamespace(**refs)
        gates = per_head.load_pair(refs, key_head, 0, bounds)
        per_head.make_products(refs, own, chunk, key_head, bounds, gates, call.options)

    given = dict(q=call.q, k=call.k, g=call.g, beta=call.beta)
    found = run(monkeypatch, per_head, call, key_heads, given, outputs, one)
    total = lambda x: np.asarray(x, FLOAT32).sum(axis=0, keepdims=True)
    scales, found["solve"] = np.moveaxis(found["scales"], 2, 0), total(found["solve"]).swapaxes(-1, -2)
    found |= dict(decay=scales[3, :, :, -1], scales=scales[:3] * np.array([-1, 1, 1], FLOAT32)[:, None, None, None])
    call.wanted["solve"] = total(call.wanted["solve"])
    # Products of queries are rounded to bfloat16, and the two terms of a solution have a relative error of 2^-16.
    tolerances = dict.fromkeys(found, (2**-15, 2e-5)) | dict(attention=(2**-7, 2e-5))
    assert_alike(found, call, tolerances)


@pytest.mark.parametrize("use_qk_l2norm", [True, False])
@pytest.mark.parametrize("key_dim", [64, 128])
def test_products_per_channel_are_those_of_the_triton_kernels(rng, monkeypatch, key_dim, use_qk_l2norm):
    """A program takes two value heads, of which the last may be alone."""
    heads, tile, decays = 3, (SIZE, per_channel.KEYS), (SIZE, per_channel.DECAYS)
    of_head = lambda tile: (key_dim // tile[1], *tile)
    call = draw(rng, heads, heads, key_dim, use_qk_l2norm, kda=True)
    outputs = {name: memory(x.dtype, *x.shape) for name, x in call.wanted.items()}
    tokens = {name: memory(BFLOAT16, *of_head(tile)) for name in "kq"}
    log_decays, cut = memory(FLOAT32, *of_head(decays)), memory(BFLOAT16, 2, SIZE, key_dim)
    systems = memory(BFLOAT16, 2, 2, *tile), memory(FLOAT32, 2, *SQUARE), memory(BFLOAT16, 2, 1, *SQUARE)
    scratch = dict(tokens=(tokens, tokens), log_decays=(log_decays, log_decays, cut), systems=systems)
    scratch |= dict(square=memory(BFLOAT16, *SQUARE), betas=memory(FLOAT32, 2, SIZE))
    scratch |= dict(
        norms=memory(FLOAT32, SIZE),
        token=memory(FLOAT32, SIZE),
        total=memory(FLOAT32, 2, key_dim),
        full=None,
        span_full=None,
    )
    given = dict(q=call.q, k=call.k, g=call.g, beta=per_channel.of_chunks(call.beta, call.chunks))
    given |= dict(spans=decay_spans(SIZE, per_channel.BLOCK))

    def one(refs, chunk, pair):
        per_channel.kernel(SimpleNamespace(**refs, **scratch), options=call.options)

    found = run(monkeypatch, per_channel, call, (heads + 1) // 2, given, outputs, one)
    found["solve"] = found["solve"].swapaxes(-1, -2)
    # Both round the same numbers, of which sums in another order may have another last bit, to bfloat16.
    assert_alike(found, call, dict.fromkeys(found, (2**-7, 1e-5)))
