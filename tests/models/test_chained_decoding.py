"""Few requests that decode have the log-probabilities that their tokens have as a prompt.

A step of few tokens launches products and norms together (`layers/chain.py`), and a prompt launches them one by one. The
model's sizes are such that the one launch of a Hopper GPU takes all chains of one token, and most of several tokens.
"""

import jax
import pytest
from fakes.chained_models import (
    CONFIG,
    H200_SMS,
    TO_FIRST,
    TO_HEAD,
    WITH_EXPERTS,
    check_log_probabilities,
    without_convolution,
)

from benchmarks.random_model import random_model
from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.layers import chain
from pallas_kernels.product_chain import schedule


@pytest.fixture
def chains(monkeypatch):
    """Lists, for each chain that is launched, why the launch of a Hopper GPU does not take it; None if it does."""
    found, original = [], chain.product_chain

    def record(x, steps, residual, *, parts=None, **options):
        products = without_convolution(steps)
        few = "few steps" if schedule.is_short(products) else None
        found.append(schedule.unsupported(x, products, residual, parts, H200_SMS) or few)
        return original(x, steps, residual, parts=parts, **options)

    monkeypatch.setattr(chain, "product_chain", record)
    return found


@pytest.mark.parametrize("model", [CONFIG, WITH_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("requests", [1, 3])
def test_decoded_tokens_have_the_log_probabilities_that_they_have_in_a_prompt(chains, rng, requests, model):
    config = EngineConfig(
        prefix_cache="align",
        async_stepping=False,
        block_size=64,
        kv_page_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=256,
        num_state_blocks=16,
        num_kv_pages=99,
    )
    check_log_probabilities(Engine(random_model(model), config), rng, requests)
    # To the first mixer, between the mixers of four layers, and from the last one to the head.
    if requests == 1:
        assert chains == [TO_FIRST, *[None] * 4]
    elif model is CONFIG:
        assert [TO_FIRST, *[None] * 3, TO_HEAD] in [chains[n : n + 5] for n in range(len(chains))]


@pytest.mark.gpu
@pytest.mark.parametrize("model", [CONFIG, WITH_EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("requests", [1, 3])
def test_compiled_chains_decode_the_same(chains, rng, requests, model):
    jax.clear_caches()
    test_decoded_tokens_have_the_log_probabilities_that_they_have_in_a_prompt(chains, rng, requests, model)
