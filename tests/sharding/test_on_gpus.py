"""A model that is split over two GPUs, which exchange sums by themselves: its tokens are those of one GPU."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks.random_model import random_model
from benchmarks.sharding import SMALL
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.sharding import AXIS
from pallas_kernels import can_write_each_other

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def engine_over(devices, model, drafts):
    config = EngineConfig(
        prefix_cache="align",
        block_size=64,
        kv_page_size=16,
        max_num_batched_tokens=256,
        max_num_seqs=8,
        max_model_len=512,
        num_state_blocks=160,
        num_kv_pages=300,
        num_speculative_tokens=drafts,
        speculation="prompt_lookup",
        async_stepping=True,
    )
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,)) if devices > 1 else None
    return Engine(model, config, mesh=mesh)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_tokens_on_two_gpus_are_those_of_one(rng, drafts):
    if len(jax.devices()) < 2:
        pytest.skip("there is no second device")
    model = random_model(SMALL)
    prompts = rng.integers(1, SMALL.vocab_size, (8, 150)).tolist()
    one, two = engine_over(1, model, drafts), engine_over(2, model, drafts)
    assert (two.runner.mailboxes is not None) == can_write_each_other(jax.devices()[:2])
    wanted = [output.token_ids for output in one.generate(prompts, PARAMS)]
    reference, epoch = Reference(model), 1
    for fresh in (False, False, True):
        if fresh:
            # Fresh mailboxes begin with epoch 1 again.
            two.runner.reset()
            two.reset_prefix_cache()
        found = [output.token_ids for output in two.generate(prompts, PARAMS)]
        for prompt, mine, first in zip(prompts, found, wanted, strict=True):
            assert mine == first or reference.judge(prompt, mine).right
        # Every all-reduce has taken an epoch.
        after = int(two.runner.device_state.epoch)
        assert after > (1 if fresh else epoch) or two.runner.mailboxes is None
        epoch = after
