"""The Mosaic GPU kernel for the products of Kimi delta attention, run in NumPy, beside the Triton kernels, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import mosaic_in_numpy
from kernels.mosaic_in_numpy import Ref, memory

from pallas_kernels.chunks import chunk_rows
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.gated_delta_rule.prefill import products_per_channel_mosaic as module
from pallas_kernels.gated_delta_rule.prefill.launch import invert, multiply
from pallas_kernels.gated_delta_rule.prefill.products import decay_spans

LENGTHS, COMPUTED = (130, 0, 65), (7, 0, 0)  # the first row's chunks have 57, 64 and 9 tokens
EXTRA = 9  # tokens after the last row, which hold NaN
HEADS = 3  # an odd number: a program takes two


@pytest.mark.parametrize("use_qk_l2norm", [True, False])
@pytest.mark.parametrize("key_dim", [64, 128])
def test_products_per_channel_are_those_of_the_triton_kernels(rng, monkeypatch, key_dim, use_qk_l2norm):
    tokens = sum(LENGTHS)
    draw = lambda *shape: np.concatenate([rng.normal(size=(tokens, *shape)), np.full((EXTRA, *shape), np.nan)])
    q, k = (jnp.asarray(draw(HEADS, key_dim) * key_dim**-0.5, jnp.bfloat16) for _ in range(2))
    g, beta = jnp.asarray(-0.3 * np.abs(draw(HEADS, key_dim))), jnp.asarray(1 / (1 + np.exp(-draw(HEADS))))
    g, beta = g.astype(jnp.float32), beta.astype(jnp.float32)
    loc = jnp.asarray(np.cumsum([0, *LENGTHS]), jnp.int32)
    chunks = chunk_rows(loc, jnp.asarray(COMPUTED, jnp.int32), tokens + EXTRA)
    config = default_prefill_config(HEADS * key_dim, key_dim, 2, per_channel=True)
    options = dict(scale=0.3, use_qk_l2norm=use_qk_l2norm)
    wanted = multiply(q, k, g, beta, chunks, **options, config=config, interpret=True)
    system = wanted.pop("system")
    wanted["solve"] = invert(system, beta, chunks, dtype=jnp.bfloat16, pieces=config.pieces, interpret=True)

    given = dict(q=q, k=k, g=g, beta=module.of_chunks(beta, chunks))
    given |= dict(spans=decay_spans(module.SIZE, module.BLOCK), levels=module.levels())
    given = dict(cu_chunk_seqlens=chunks.cu_chunk_seqlens) | {name: Ref(np.array(x)) for name, x in given.items()}
    outputs = {name: memory(x.dtype, *x.shape) for name, x in wanted.items()}
    tile, square = (module.SIZE, module.KEYS), (module.SIZE, module.SIZE)
    tiles, bfloat16, float32 = key_dim // module.KEYS, jnp.bfloat16, np.float32
    tokens_of = {name: memory(bfloat16, tiles, *tile) for name in "kq"}
    decays, pieces = memory(float32, tiles, *tile), memory(bfloat16, 2, module.SIZE, key_dim)
    systems = memory(bfloat16, 2, 4, *tile), memory(float32, 2, *square), memory(bfloat16, 2, 1, *square)
    scratch = dict(tokens=(tokens_of, tokens_of), log_decays=(decays, decays, pieces), systems=systems)
    scratch |= dict(attention_tile=memory(bfloat16, *square), betas=memory(float32, 2, module.SIZE))
    scratch |= dict(norms=memory(float32, module.SIZE), total=memory(float32, 2, key_dim), full=None)

    program = mosaic_in_numpy.patch(monkeypatch, module)
    for chunk in range(chunks.seq_idx.shape[0]):
        for pair in range((HEADS + 1) // 2):
            program |= dict(chunk=chunk, pair=pair)
            arrays = [*given.values(), *outputs.values(), *scratch.values()]
            module.kernel([*given, *outputs, *scratch], *arrays, **options)
    is_full = np.asarray(chunks.cu_chunk_seqlens[1:] > chunks.cu_chunk_seqlens[:-1])
    for name, output in outputs.items():
        of_full = lambda x, name=name: np.compress(is_full, np.asarray(x, np.float32), axis=1 if name == "decay" else 2)
        found, expected = of_full(output.array), of_full(wanted[name])
        # Both round the same numbers, of which sums in another order may have another last bit, to bfloat16.
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=1e-5 * np.abs(expected).max(), err_msg=name)
