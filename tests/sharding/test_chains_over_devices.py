"""A split model decodes by chains over devices, with the log-probabilities that its tokens have in a prompt."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from fakes.chained_models import CONFIG, H200_SMS, TO_FIRST, TO_HEAD, check_log_probabilities, without_convolution
from jax.sharding import Mesh

from benchmarks.random_model import random_model
from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.engine.device import runner
from mamba_align_jax.layers import exchange
from mamba_align_jax.sharding import AXIS
from pallas_kernels import Mailboxes
from pallas_kernels.product_chain import schedule

# Each of two devices has a multiple of 256 inputs of every product, and eight of the gates of the delta net.
MODEL = replace(CONFIG, num_attention_heads=8, linear_num_value_heads=16, linear_value_head_dim=32)


@pytest.fixture
def chains(monkeypatch):
    """Lists, for each chain that is launched, why the launch of a Hopper GPU does not take it; None if it does."""
    found, original = [], exchange.all_reduce_product_chain

    def record(x, steps, residual, mailboxes, epoch, *, parts=None, **options):
        products = without_convolution(steps)
        found.append(schedule.unsupported(x, products, residual, parts, H200_SMS, mailboxes.capacity))
        return original(x, steps, residual, mailboxes, epoch, parts=parts, **options)

    monkeypatch.setattr(exchange, "all_reduce_product_chain", record)
    return found


def check(chains, rng, mesh, requests):
    sizes = dict(block_size=64, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256)
    engine = Engine(random_model(MODEL), EngineConfig(**sizes, num_state_blocks=16, num_kv_pages=99), mesh=mesh)
    check_log_probabilities(engine, rng, requests)
    assert [TO_FIRST, *[None] * 3, TO_HEAD] in [chains[n : n + 5] for n in range(len(chains))]


@pytest.mark.parametrize("requests", [1, 3])
def test_a_split_model_decodes_by_chains_over_devices(chains, rng, monkeypatch, requests):
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    monkeypatch.setattr(runner, "new_mailboxes", lambda layout, hidden: Mailboxes.create(mesh, AXIS, 256 * hidden))
    check(chains, rng, mesh, requests)


@pytest.mark.gpu
@pytest.mark.parametrize("requests", [1, 3])
def test_two_gpus_decode_by_chains_over_devices(chains, rng, requests):
    if len(jax.devices()) < 2:
        pytest.skip("there is no second device")
    check(chains, rng, Mesh(np.array(jax.devices()[:2]), (AXIS,)), requests)
