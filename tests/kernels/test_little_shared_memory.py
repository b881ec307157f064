"""GPUs with little shared memory: the default configurations fit, and what can't fit is refused with a reason."""

import jax.numpy as jnp
import pytest
from kernels import lowered_cases as lowering
from kernels.attention_batches import DIMS, assert_is_attention, make

from pallas_kernels import UnsupportedError, device
from pallas_kernels.gated_delta_rule.config import default_prefill_config
from pallas_kernels.linear.config import default_config
from pallas_kernels.paged_attention.config import default_config as attention_config

A100 = 166_912


@pytest.fixture
def little(monkeypatch):
    monkeypatch.setattr(device, "shared_bytes", lambda: device.LEAST_SHARED_BYTES)


def test_a_machine_without_a_gpu_lowers_for_a_hopper_gpu():
    assert device.shared_bytes() == device.HOPPER_SHARED_BYTES
    assert not device.has_little_shared_memory()


def refusal(run, case):
    """Lowers a case. Returns why the kernel refuses it, or None."""
    try:
        assert "__gpu$xla.gpu.triton" in run("NVIDIA GeForce RTX 4090", case)
    except UnsupportedError as error:
        return str(error)
    return None


# `tests/ahead.py` compiles these cases; without it, they are at least lowered here.
@pytest.mark.parametrize("op", ["linear", "paged_attention", "gated_delta_rule_prefill", "ssd"])
def test_cases_lower_or_are_refused(op, little):
    run, cases, _ = lowering.EVERY[op]
    reasons = {case.name: reason for case in cases if (reason := refusal(run, case))}
    for reason in reasons.values():
        assert "shared memory" in reason or f"of {device.LEAST_SHARED_BYTES}" in reason
    assert [*reasons] == {
        "ssd": [
            "ssd_prefill float32 4x2048",
            "ssd_prefill float16 4x2048",
            "ssd_prefill chunks of 128 4x2048",
        ],
        "paged_attention": ["attention decode MLA float32", "attention prompt MLA float32"],
    }.get(op, [])


def test_wide_keys_are_refused(little):
    run, _, case = lowering.EVERY["gated_delta_rule_prefill"]
    wide = type(case)("wide", (300,), key_dim=256)
    with pytest.raises(UnsupportedError, match="keys must have at most 128 dims on a GPU with little shared memory"):
        run("NVIDIA GeForce RTX 4090", wide)


@pytest.mark.parametrize(
    ("shared", "stages"), [(device.HOPPER_SHARED_BYTES, 6), (A100, 5), (device.LEAST_SHARED_BYTES, 3)]
)
def test_fewer_blocks_of_weights_are_in_flight_where_they_do_not_fit(shared, stages, monkeypatch):
    """A block of 32 tokens and 2 x 128 outputs, 64 inputs each, takes 36,864 bytes. All but one are in flight."""
    monkeypatch.setattr(device, "shared_bytes", lambda: shared)
    x, weight = jnp.zeros((32, 2560), jnp.bfloat16), jnp.zeros((18432, 2560), jnp.bfloat16)
    config = default_config(x, weight, is_gated=True)
    assert (config.tokens, config.outputs, config.inputs, config.num_stages) == (32, 128, 64, stages)


@pytest.mark.parametrize(("shared", "stages"), [(device.HOPPER_SHARED_BYTES, 3), (device.LEAST_SHARED_BYTES, 2)])
def test_fewer_chunks_are_in_flight_where_they_do_not_fit(shared, stages, monkeypatch):
    monkeypatch.setattr(device, "shared_bytes", lambda: shared)
    assert default_prefill_config(4096, 128, 2, per_channel=False).num_stages == stages


@pytest.mark.parametrize("window", [1, None])
def test_smaller_tiles_attend_rightly(rng, window, little):
    dims = DIMS["16 of 256"]
    config = attention_config(512, 2, is_prompt=window is None, is_latent=False)
    assert (config.queries, config.block, config.num_stages) == ((32, 64, 2) if window else (64, 32, 2))
    batch = make(rng, [1, 1] if window else [70, 3], [600, 40], dims, jnp.bfloat16)
    assert_is_attention(batch, batch.run(max_query_tokens=window, implementation="triton", interpret=True))
