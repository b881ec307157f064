"""The mixer that CONTRIBUTING.md shows works in rows of all kinds, and in a model that declares it as the page says."""

import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import layer_steps as steps
from flax import nnx

from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.kv import KVPages
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.layers.split import Cut
from mamba_align_jax.models.causal_lm import CausalLM
from mamba_align_jax.models.config import ModelConfig

HIDDEN, CHANNELS, LAYERS, LAYER = 12, 10, 2, 1


@pytest.fixture(scope="module")
def page():
    """The names that the page's two pieces of code define."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    names = {"nnx": nnx, "RMSNorm": RMSNorm, "__name__": "leaky_sum"}
    for code in re.findall(r"^( *)```python\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        exec(textwrap.dedent(code[1]), names)
    return names


def test_mixer_of_the_page_runs_rows_of_all_kinds(page, rng):
    layer = page["LeakySum"](HIDDEN, CHANNELS, "float32", nnx.Rngs(0))
    layer.log_rate[...] = jnp.asarray(rng.normal(size=CHANNELS), jnp.float32)
    step, num_tokens, loc = steps.make()
    x = rng.normal(size=(num_tokens, HIDDEN)).astype(np.float32)
    pool = np.full((LAYERS, steps.BLOCKS, 1, CHANNELS, 1), np.nan, np.float32)
    for row in steps.ROWS:
        if row.read:
            pool[LAYER, row.read] = rng.normal(size=pool.shape[2:])
    out, after = map(np.asarray, jax.jit(lambda x, pool: layer(x, step.layer(LAYER), pool))(x, pool))

    into, rate, onto = (
        np.asarray(value, float)
        for value in (layer.in_proj.weight[...].T, jnp.exp(layer.log_rate[...]), layer.out_proj.weight[...].T)
    )
    written = set()
    for row, begin, end in zip(steps.ROWS, loc, loc[1:], strict=False):
        if not row.length:
            continue
        state, states = (pool[LAYER, row.read, 0, :, 0].astype(float) if row.read else np.zeros(CHANNELS)), []
        for token in x[begin:end].astype(float) @ into:
            state = np.exp(-rate) * state + token
            states.append(state)
        np.testing.assert_allclose(out[begin:end], np.array(states) @ onto, atol=2e-5, rtol=0)
        kept = dict(zip(row.write, states, strict=False)) if row in steps.DECODE else {row.write[0]: states[-1]}
        for block, wanted in kept.items():
            np.testing.assert_allclose(after[LAYER, block, 0, :, 0], wanted, atol=2e-5, rtol=0)
        written |= set(kept)
    others = [block for block in range(steps.BLOCKS) if block not in written]
    np.testing.assert_array_equal(after[:, others], pool[:, others])


def test_model_of_the_page_declares_its_mixers_and_runs(page):
    config = ModelConfig(
        vocab_size=16, hidden_size=HIDDEN, intermediate_size=CHANNELS, num_hidden_layers=LAYERS, dtype="float32"
    )
    layers = [page["Layer"](config, nnx.Rngs(0)) for _ in range(LAYERS)]
    model = CausalLM(config, layers, RMSNorm(HIDDEN, config.rms_norm_eps), nnx.Rngs(0))
    (group,) = model.state_groups()
    assert (group.name, group.num_layers, group.states[0].shape) == ("leaky_sum", LAYERS, (1, CHANNELS, 1))
    step, num_tokens, _ = steps.make()
    pool = StatePool(states=((jnp.zeros((LAYERS, steps.BLOCKS, 1, CHANNELS, 1)),),))
    kv = KVPages.create(model.kv_spec(), steps.PAGES, steps.PAGE_SIZE)
    hidden, after, _ = jax.jit(model)(jnp.arange(num_tokens, dtype=jnp.int32) % 16, step, pool, kv)
    assert hidden.shape == (num_tokens, HIDDEN)
    assert bool(jnp.isfinite(hidden).all())
    # Both layers have written their own states.
    first, second = np.asarray(after.states[0][0])[:, 7]
    assert first.any()
    assert second.any()
    assert not np.array_equal(first, second)


def test_mixer_of_the_page_places_every_parameter_on_a_mesh(page):
    layer = page["LeakySum"](HIDDEN, CHANNELS, "float32", nnx.Rngs(0))
    cut = Cut(jax.make_mesh((1,), ("tensor",)))
    layer.split(cut)
    placed = [id(variable) in cut.placed for _, variable in nnx.iter_graph(layer) if isinstance(variable, nnx.Param)]
    assert placed == [True] * 3
