"""The Mosaic GPU kernel for the products of the delta rule with decays per head, run in NumPy, beside Triton's kernels."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import mosaic_in_numpy
from kernels.mosaic_in_numpy import Ref, memory

from pallas_kernels.chunks import chunk_rows
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill import products_mosaic as module
from pallas_kernels.gated_delta_rule.prefill.decays import Factors, decays
from pallas_kernels.gated_delta_rule.prefill.launch import invert, multiply

LENGTHS, COMPUTED = (130, 0, 65), (7, 0, 0)  # the first row's chunks have 57, 64 and 9 tokens
EXTRA = 9  # tokens after the last row, which hold NaN


@pytest.mark.parametrize("use_qk_l2norm", [True, False])
@pytest.mark.parametrize(("key_heads", "value_heads", "key_dim"), [(2, 4, 64), (1, 3, 128)])
def test_products_are_those_of_the_triton_kernels(rng, monkeypatch, key_heads, value_heads, key_dim, use_qk_l2norm):
    """A program takes two value heads at a time, of which the last may be alone."""
    tokens = sum(LENGTHS)
    draw = lambda *shape: np.concatenate([rng.normal(size=(tokens, *shape)), np.full((EXTRA, *shape), np.nan)])
    q, k = (jnp.asarray(draw(key_heads, key_dim) * key_dim**-0.5, jnp.bfloat16) for _ in range(2))
    g, beta = (
        jnp.asarray(x, jnp.float32) for x in (-0.3 * np.abs(draw(value_heads)), 2 / (1 + np.exp(-draw(value_heads))))
    )
    loc = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32)
    chunks = chunk_rows(loc, jnp.asarray(COMPUTED, jnp.int32), tokens + EXTRA)
    config = default_prefill_config(value_heads * key_dim, key_dim, 2, per_channel=False)
    options = dict(scale=0.3, use_qk_l2norm=use_qk_l2norm)
    wanted = multiply(q, k, g, beta, chunks, **options, config=config, interpret=True)
    system = wanted.pop("system")
    wanted["solve"] = invert(system, beta, chunks, dtype=jnp.bfloat16, pieces=config.pieces, interpret=True)

    factors, decay = decays(g, beta, chunks, interpret=True)
    given = dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens) | {
        name: Ref(np.array(x)) for name, x in dict(q=q, k=k, factors=factors).items()
    }
    number, size = chunks.seq_idx.shape[0], module.SIZE
    square, bfloat16, float32 = (size, size), jnp.bfloat16, np.float32
    outputs = {name: memory(bfloat16, *wanted[name].shape) for name in ("solve", "attention")}
    outputs |= dict(scales=memory(float32, value_heads, number, 3, size))
    tokens_of = {name: memory(bfloat16, key_dim // size, *square) for name in "kq"}
    systems = memory(float32, 2, *square), memory(bfloat16, 2, config.pieces, *square)
    scratch = dict(memory=(tokens_of, tokens_of, *systems), attention_tile=memory(bfloat16, 2, *square))
    scratch |= dict(per_row=memory(float32, 2, len(Factors()), size), per_column=memory(float32, 2, 2, size))
    scratch |= dict(norms=memory(float32, size), kinds=memory(float32, 2, 3, size), full=None, factors_full=None)

    program = mosaic_in_numpy.patch(monkeypatch, module)
    for chunk in range(number):
        for key_head in range(key_heads):
            program |= dict(chunk=chunk, key_head=key_head)
            arrays = [*given.values(), *outputs.values(), *scratch.values()]
            module.kernel([*given, *outputs, *scratch], *arrays, **options)
    found = {name: np.asarray(x.array, np.float32) for name, x in outputs.items()} | dict(decay=np.asarray(decay))
    found["solve"] = found["solve"].sum(axis=0, keepdims=True).swapaxes(-1, -2)
    found["scales"] = np.moveaxis(found["scales"], 2, 0) * np.array([-1, 1, 1], float32)[:, None, None, None]
    wanted["solve"] = np.asarray(wanted["solve"], np.float32).sum(axis=0, keepdims=True)
    is_full = np.asarray(chunks.cu_chunk_seqlens[1:] > chunks.cu_chunk_seqlens[:-1])
    for name, values in found.items():
        of_full = lambda x, name=name: np.compress(is_full, np.asarray(x, np.float32), axis=1 if name == "decay" else 2)
        actual, expected = of_full(values), of_full(wanted[name])
        # Outputs of queries are rounded to bfloat16, and the two pieces of a solution have a relative error of 2^-16.
        rtol = 2**-7 if name == "attention" else 2**-15
        np.testing.assert_allclose(actual, expected, rtol=rtol, atol=2e-5 * np.abs(expected).max(), err_msg=name)
