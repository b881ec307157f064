"""Agents whose prompts leave out earlier reasoning hit nearly all tokens that they share, at a tenth of the usual sizes."""

import pytest
from fakes.counting_engine import CountingEngine

from mamba_align_jax.load.client import serve
from mamba_align_jax.load.metrics import summary
from mamba_align_jax.load.workloads import Agents, ClosedLoop

AGENTS = Agents(tools=600, turn=20, reasoning=50, answer=10)
# As 64 tokens are of the usual sizes.
PAGE, BUDGET = 6, 100


@pytest.mark.parametrize("block_size", [PAGE, 8 * PAGE])
@pytest.mark.parametrize("mode", ["align", "all"])
def test_agents_hit_nearly_all_that_is_attainable(mode, block_size):
    """The pool has three blocks for each agent besides those that a running request holds."""
    held = 3 + (BUDGET // block_size if mode == "all" else 0)
    sizes = dict(block_size=block_size, page_size=PAGE, num_pages=8 * AGENTS.longest // PAGE)
    engine = CountingEngine(mode=mode, rows=8, budget=BUDGET, num_blocks=1 + AGENTS.agents * (held + 3), **sizes)
    run = serve(engine, AGENTS.sessions(10**6, 3), AGENTS.output, ClosedLoop(8), agents=AGENTS)
    assert len(run.requests) == AGENTS.agents * AGENTS.turns
    engine.cache.check()
    row = summary(run)
    assert 0.98 <= row["hit_rate_of_attainable"] < 1
    # A turn shares the prompt of the one before, and a first turn perhaps the tools.
    shared = sum(AGENTS.tools + n * (AGENTS.turn + AGENTS.answer) - AGENTS.answer for n in range(1, AGENTS.turns))
    assert AGENTS.agents * shared <= row["attainable_tokens"] <= AGENTS.agents * (shared + AGENTS.tools)
