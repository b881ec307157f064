"""Which sums of a split model an exchange takes, in each family of models."""

import jax
import numpy as np
import pytest
from fakes.driver import DATA
from jax.sharding import Mesh

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.engine.device import runner
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.layers.exchange import Partial
from mamba_align_jax.models import load_model
from mamba_align_jax.sharding import AXIS
from pallas_kernels import Mailboxes

FAMILIES = sorted(path.parent.name for path in DATA.glob("*/config.json"))
# Mamba-1 needs the whole of dt, B and C in each layer, and Nemotron-H adds up its experts and its shared experts.
LEFT_TO_XLA = {"mamba": 3, "nemotron_h": 2}
SIZES = dict(block_size=64, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=128)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exchange_takes_every_sum_of_a_decode_step(family, monkeypatch):
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    monkeypatch.setattr(runner, "new_mailboxes", lambda layout, hidden: Mailboxes.create(mesh, AXIS, 256 * hidden))
    left, total = [], Partial.total
    monkeypatch.setattr(Partial, "total", lambda summand: left.append(summand) or total(summand))
    config = EngineConfig(**SIZES, num_state_blocks=20, num_kv_pages=32)
    engine = Engine(load_model(DATA / family, dtype="float32"), config, mesh=mesh)
    engine.runner.trace(Bucket(2, 0, 0, Level.MOST_LIKELY))
    assert len(left) == LEFT_TO_XLA.get(family, 0)
