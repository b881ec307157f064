"""Recorded calls of sglang-jax's backends, and how they run on ours."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from mamba_align_jax.integrations import sglang_jax

DATA = Path(__file__).parent / "data"
SIGNATURES = json.loads((DATA / "sglang_jax_signatures.json").read_text())
# Both sides compute in float32. Native's chunks and its inverse of a triangle round otherwise than ours.
TOLERANCE = 2e-5


def load(name):
    with np.load(DATA / f"sglang_jax_{name}.npz") as file:
        return dict(file)


def boxed(value):
    """A parameter as sglang-jax's layers hold it."""
    return SimpleNamespace(value=jnp.asarray(value))


def run(name, call, devices=1, **changed):
    """Runs a recorded call on our backend. Returns its outputs and pools."""
    call = call | changed
    kda = name.startswith("kda")
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(1, -1), ("data", "tensor"))
    heads, dim = call["states"].shape[1:3]
    weights = ("q_conv", "k_conv", "v_conv") if kda else ("conv",)
    layer = SimpleNamespace(
        layer_id=0, num_q_heads=heads, head_q_dim=dim, scale=dim**-0.5, activation=jax.nn.silu,
        A_log=boxed(call["A_log"]), dt_bias=boxed(call["dt_bias"]),
        **{f"{part}1d": SimpleNamespace(weight=boxed(call[part])) for part in weights},
    )  # fmt: skip
    gdn_class, kda_class = sglang_jax.backends()
    key_heads = (call["conv"].shape[0] // dim - heads) // 2 if not kda else heads
    backend = (
        kda_class(mesh=mesh) if kda else gdn_class(key_heads, heads, dim, dim, 4, mesh, jnp.float32, "chunked_jax")
    )
    names = SIGNATURES["LinearRecurrentAttnBackendMetadata"]
    backend.forward_metadata = SimpleNamespace(**{n: jnp.asarray(call[n]) if n in call else None for n in names})
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: "extend_prefix_lens" not in call))
    batch.extend_prefix_lens = call.get("extend_prefix_lens")
    pool = SimpleNamespace(
        get_linear_recurrent_layer_cache=lambda layer_id: (jnp.asarray(call["states"]), [jnp.asarray(call["windows"])])
    )
    tokens = (jnp.asarray(call[part]) for part in "qkvab")
    out, (states, (windows,)) = jax.jit(lambda tokens: backend(*tokens, layer, batch, pool, mixed_qkv=None))(
        tuple(tokens)
    )
    return np.asarray(out), np.asarray(states), np.asarray(windows)


def after(call, pool):
    """A pool as sglang-jax's own backend left it."""
    expected = call[pool].copy()
    expected[call[f"{pool}_slots"]] = call[f"{pool}_after"]
    return expected


def assert_as_recorded(call, result):
    out, states, windows = result
    tokens = call["cu_q_lens"][-1]  # Native's outputs of padding tokens are arbitrary.
    # Decode batches are padded by rows of slot 0, whose tokens count.
    real = np.repeat(call["recurrent_indices"] > 0, np.diff(call["cu_q_lens"]))
    expected = call["out"].reshape(len(call["out"]), -1)
    assert np.abs(out[:tokens][real] - expected[:tokens][real]).max() < TOLERANCE * max(1, np.abs(expected).max())
    for pool, came in (("states", states), ("windows", windows)):
        expected = after(call, pool)
        assert np.abs(came - expected).max() < TOLERANCE * max(1, np.abs(expected).max())
        written = {*call["recurrent_indices"], *call.get("recurrent_track_indices", ())} - {0}
        others = [slot for slot in range(len(came)) if slot not in written]
        np.testing.assert_array_equal(came[others], call[pool][others])
