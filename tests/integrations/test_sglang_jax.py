"""The backends answer recorded calls of sglang-jax as its own ones did. `make integrations` runs the real code."""

import functools
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes import sgl_jax
from integrations.recorded_calls import SIGNATURES, assert_as_recorded, load, run

from mamba_align_jax.integrations import sglang_jax
from mamba_align_jax.integrations.delta_rule_step import BlockRows, Taps, delta_rule_step

GDN_CALLS = ("prefill_of_several_rows", "prefill_that_goes_on", "decode_of_several_rows", "decode_that_keeps")
CALLS = (*GDN_CALLS, "kda_prefill", "kda_decode")


@pytest.fixture
def stack(monkeypatch):
    """What stands for sglang-jax's modules."""
    return sgl_jax.put(monkeypatch)


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_call_has_the_recorded_result(stack, name):
    call = load(name)
    assert_as_recorded(call, run(name, call))


def test_the_calls_have_all_kinds_of_rows():
    calls = [load(name) for name in GDN_CALLS]
    assert any((call["recurrent_indices"] == 0).any() for call in calls)
    assert any((call["has_initial_state"] & (call["recurrent_track_mask"] != 0)).any() for call in calls)
    assert any((~call["has_initial_state"] & (call["recurrent_indices"] > 0)).any() for call in calls)


@pytest.mark.parametrize("name", ["prefill_of_several_rows", "kda_prefill", "kda_decode"])
def test_fresh_rows_read_nothing_of_their_slots(stack, name):
    call = load(name)
    fresh = ~call["has_initial_state"] & (call["recurrent_indices"] > 0)
    assert fresh.any()
    poisoned = {pool: call[pool].copy() for pool in ("states", "windows")}
    for pool in poisoned.values():
        pool[call["recurrent_indices"][fresh]] = np.nan
        pool[0] = np.nan
    _, states, windows = run(name, call, **poisoned)
    assert not np.isnan(states[1:]).any()
    assert not np.isnan(windows[1:]).any()


@pytest.mark.parametrize("name", ["prefill_of_several_rows", "decode_that_keeps"])
def test_a_row_without_a_boundary_keeps_no_copy(stack, name):
    call = load(name)
    marked = call["recurrent_track_indices"].copy()
    marked[call["recurrent_indices"] > 0] = len(call["states"]) - 1
    off = dict(recurrent_track_indices=marked, recurrent_track_mask=np.zeros_like(call["recurrent_track_mask"]))
    _, states, _ = run(name, call, **off)
    if len(call["states"]) - 1 not in call["recurrent_indices"]:
        np.testing.assert_array_equal(states[-1], call["states"][-1])
    # Without any copies the running slots are the same bits.
    del call["recurrent_track_indices"], call["recurrent_track_mask"]
    np.testing.assert_array_equal(run(name, call)[1], states)


def test_a_prompt_that_is_cut_after_64_tokens_ends_in_the_same_bits():
    rng = np.random.default_rng(0)
    heads, dim, tokens, cut = 2, 8, 80, 64
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    qkv, a, b = draw(tokens, 3 * heads * dim), draw(tokens, heads), draw(tokens, heads)
    weights = Taps(draw(3 * heads * dim, 4), draw(heads), draw(heads))
    pools = jnp.full((3, 3 * heads * dim, 3), jnp.nan), jnp.full((3, heads, dim, dim), jnp.nan)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def step(begin, end, pools):
        starts = jnp.array([0, end - begin], jnp.int32)
        rows = BlockRows(starts, jnp.array([2]), jnp.array([begin == 0]), jnp.array([begin]))
        part = slice(begin, end)
        return delta_rule_step(qkv[part], a[part], b[part], weights, rows, *pools, decode=False)

    whole, *expected = step(0, tokens, pools)
    first, *pools = step(0, cut, pools)
    second, *came = step(cut, tokens, pools)
    np.testing.assert_array_equal(jnp.concatenate([first, second]), whole)
    for x, y in zip(came, expected, strict=True):
        np.testing.assert_array_equal(x[2], y[2])


@pytest.mark.deep
def test_two_devices_answer_as_one():
    """A process of its own has two devices. Each device's windows are [its queries | its keys | its values]."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[2])])
    env = os.environ | dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=paths)
    subprocess.run([sys.executable, "-c", TWO_DEVICES], env=env, check=True)


TWO_DEVICES = """
import numpy as np, pytest
from fakes import sgl_jax
from integrations import recorded_calls as t

with pytest.MonkeyPatch.context() as patch:
    sgl_jax.put(patch)
    for name in ("kda_prefill", "kda_decode"):
        call = t.load(name)
        channels = call["windows"].shape[1]
        # [queries | keys | values] of both devices, from those of each.
        order = np.arange(channels).reshape(3, 2, -1).swapaxes(0, 1).ravel()
        windows = call["windows"][:, order]
        out, states, windows = t.run(name, call, devices=2, windows=windows)
        t.assert_as_recorded(call, (out, states, windows[:, np.argsort(order)]))
"""


def test_the_backends_are_made_and_called_as_native_ones(stack):
    for ours, native in zip(sglang_jax.backends(), ("GDNAttnBackend", "KDAAttnBackend"), strict=True):
        for method in ("__init__", "__call__"):
            assert list(inspect.signature(getattr(ours, method)).parameters) == SIGNATURES[f"{native}.{method}"]
    base = sgl_jax.LinearRecurrentAttnBackend
    assert (
        list(inspect.signature(base.get_layer_cache).parameters)
        == SIGNATURES["LinearRecurrentAttnBackend.get_layer_cache"]
    )


def test_install_replaces_both_backends_and_forwards_keys(stack):
    sglang_jax.install()
    installed = stack.gdn_backend.GDNAttnBackend, stack.kda_backend.KDAAttnBackend
    assert installed == sglang_jax.backends()
    calls = []
    inner = SimpleNamespace(set_kv_buffer_legacy=lambda *arguments: calls.append(arguments))
    pool = stack.memory_pool.HybridLinearKVPool([3, 7], inner)
    names = SIGNATURES["MHATokenToKVPool.set_kv_buffer_legacy"][1:]
    pool.set_kv_buffer_legacy(**{name: 7 if name == "layer_id" else name for name in names})
    assert calls == [(1, *names[1:])]


def test_bad_input_is_refused_by_name(stack):
    with pytest.raises(ValueError, match="implementation must be 'xla', 'triton' or None, got 'cuda'"):
        sglang_jax.install(implementation="cuda")
    call = load("kda_decode")
    with pytest.raises(ValueError, match="dtype float32, got bfloat16: set SGLANG_JAX_CONV_STATE_DTYPE=float32"):
        run("kda_decode", call, windows=jnp.asarray(call["windows"], jnp.bfloat16))
    with pytest.raises(ValueError, match="activation of the convolution must be SiLU or None, got 'gelu'"):
        sglang_jax._activation("gelu")
    mesh = SimpleNamespace(shape=dict(data=1, tensor=2))
    with pytest.raises(ValueError, match="num_v_heads must be a multiple of the 2 devices of axis 'tensor', got 3"):
        sglang_jax.backends()[0](2, 3, 8, 8, 4, mesh)
    rows = BlockRows(jnp.array([0, 1], jnp.int32), jnp.array([1]))
    call = load("decode_that_keeps")
    weights = Taps(*(jnp.asarray(call[name]) for name in ("conv", "A_log", "dt_bias")))
    qkv = jnp.concatenate([jnp.asarray(call[part][:1]) for part in "qkv"], axis=1)
    pools = jnp.asarray(call["windows"]), jnp.asarray(call["states"])
    with pytest.raises(ValueError, match=r"rows\.num_computed_tokens must be the positions of a prefill step's rows"):
        delta_rule_step(qkv, call["a"][:1], call["b"][:1], weights, rows, *pools, decode=False)


def test_without_sglang_jax_the_error_says_what_to_install():
    with pytest.raises(ImportError, match=r"needs sglang-jax.*github\.com/sgl-project/sglang-jax"):
        sglang_jax.install()
