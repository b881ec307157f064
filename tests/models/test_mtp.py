"""The draft head against the formulas in float64, however its tokens are cut into steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.head import NumpyHead, write_with_head
from models.test_qwen3_5 import ATOL, CHECKPOINT

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.attention import step_inputs
from mamba_align_jax.models import load_model
from mamba_align_jax.spec import AlignConfig

PAGE, PAGES, TOKENS = 16, 9, 96


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_with_head(CHECKPOINT, tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module")
def sequence(checkpoint):
    """Hidden states of a model, the tokens behind them, and what the head ought to make of them."""
    random = np.random.default_rng(0)
    hidden, tokens = random.normal(size=(TOKENS, 64)).astype(np.float32), random.integers(0, 256, TOKENS)
    head = NumpyHead(checkpoint)
    return hidden, tokens, np.stack([head.step(*each) for each in zip(hidden, tokens, range(TOKENS), strict=True)])


@functools.partial(jax.jit, static_argnames=("graph", "spec", "decode"))
def _draft(params, hidden, tokens, batch, state, kv, *, graph, spec, decode):
    model = nnx.merge(graph, params)
    _, indices = begin_step(spec, state, batch, BlockTables.create(spec))
    rows = batch.idx_mapping.shape[0] if decode else 0
    step = step_inputs(
        batch, indices, num_decode_rows=rows, num_decode_tokens=rows * spec.window,
        page_tables=jnp.arange(1, PAGES, dtype=jnp.int32)[None], num_tokens=tokens.shape[0], page_size=PAGE, num_pages=PAGES,
    )  # fmt: skip
    return model.draft(hidden, tokens, step, kv)


@pytest.mark.parametrize("cuts", [(96,), (64, 32), (37, 59), (90, 1, 3, 2)])
def test_head(checkpoint, sequence, cuts):
    """Chunks, single tokens and verify rows; the model's own layers of the pages stay as they are."""
    hidden, tokens, wanted = sequence
    model = load_model(checkpoint)
    spec = AlignConfig(
        groups=model.state_groups(), block_size=128, num_speculative_tokens=2, max_num_reqs=1, max_model_len=128
    )
    graph, params = nnx.split(model)
    layers = model.num_attention_layers + 1
    kv = KVPages.create(layers, PAGES, PAGE, model.num_kv_heads, model.head_dim, model.dtype)
    kv = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), kv)
    out = []
    for begin, length in zip(np.cumsum([0, *cuts]), cuts, strict=False):
        decode = length <= spec.window
        batch = StepBatch.from_host(spec, 1, [0], [0, length], [length - 1 if decode else -1], [not decode])
        state = dataclasses.replace(AlignState.create(spec), num_computed_tokens=jnp.array([begin], jnp.int32))
        padding, now = (0, (spec.window if decode else TOKENS) - length), slice(begin, begin + length)
        found, kv = _draft(
            params, np.pad(hidden[now], (padding, (0, 0))), np.pad(tokens[now], padding), batch, state, kv,
            graph=graph, spec=spec, decode=decode,
        )  # fmt: skip
        out.append(np.asarray(found)[:length])
    np.testing.assert_allclose(np.concatenate(out), wanted, atol=ATOL, rtol=0)
    assert np.isnan(kv.keys[: layers - 1]).all()
