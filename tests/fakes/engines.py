"""What tests of whole engines share: pools that show a stale read, and models that compile quickly."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_align_jax.engine.device import model_worker
from mamba_align_jax.models import load_model


def launch_ahead(monkeypatch):
    """Makes engines on one device step as those do whose models are split: in a thread, and with two steps in flight."""
    monkeypatch.setattr(model_worker, "is_slow_to_start", lambda mesh: True)


def poison(engine):
    """Fills the pools with NaN, as memory that was never cleared. No step may read it."""
    state = engine.runner.device_state
    pool, kv = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), (state.pool, state.kv))
    engine.runner.device_state = dataclasses.replace(state, pool=pool, kv=kv)


def load_two_layers(path):
    """The last two layers of a model in float32, which are one of each kind: more take long to compile."""
    model, layers = load_model(path, "float32"), slice(-2, None)
    model.config = dataclasses.replace(model.config, num_hidden_layers=2, layer_types=model.config.layer_types[layers])
    model.layers = nnx.List(list(model.layers)[layers])
    return model
