"""A prompt that is aborted or preempted leaves the state of the last boundary that it has computed, and is resumed there."""

import pytest
from fakes.device import BLOCK, Device, assert_complete, kept, make, request, serve
from fakes.engines import poison
from fakes.speller import Speller, next_token

from mamba_align_jax import Engine, EngineConfig, SamplingParams

PROMPT = range(77)


@pytest.mark.parametrize(
    ("mode", "budget", "in_flight"),
    [("align", 16, 0), ("align", 20, 1), ("align", 5, 0), ("all", 20, 0), ("all", 5, 1)],
)
def test_an_aborted_prompt_leaves_its_last_boundary(mode, budget, in_flight):
    for step in range(1, 20):
        scheduler, device, this, seen = make(mode=mode, budget=budget), Device(mode), request(0, PROMPT, 1), [0]
        before = lambda step, this=this, seen=seen: seen.append(this.min_computed)
        serve(scheduler, [this], aborts=[(step, 0)], device=device, between=before, steps_in_flight=in_flight)
        if len(this.tokens) > len(PROMPT):
            break
        last = seen[step + 1] // BLOCK * BLOCK
        left = range(BLOCK, last + 1, BLOCK)
        assert kept(scheduler, list(PROMPT)) == [*(left[-1:] if mode == "align" else left)]
        again = request(1, PROMPT, 1)
        serve(scheduler, [again], device=device)
        assert again.num_cached == last
        assert_complete([again])
        if mode == "align":
            assert kept(scheduler, list(PROMPT)) == sorted({last, 72} - {0})
    assert step > 3


@pytest.mark.parametrize(("mode", "budget"), [("align", 16), ("align", 5), ("all", 20), ("all", 5)])
def test_a_preempted_prompt_is_resumed_from_its_last_boundary_and_still_rolls_it(mode, budget):
    for step in range(1, 20):
        scheduler, device, this = make(mode=mode, budget=budget), Device(mode), request(0, PROMPT, 1)
        starts, computed = [], []

        def preempt(now, step=step, this=this, scheduler=scheduler, computed=computed):
            if now == step and this.is_prefilling and this.slot >= 0:
                computed.append(this.min_computed)
                scheduler._preempt(this)

        heard = lambda row, tokens, late, starts=starts: starts.append(row.start) if row.enters else None
        serve(scheduler, [this], device=device, between=preempt, heard=heard)
        assert_complete([this])
        if not computed:
            break
        assert starts[-1] == computed[0] // BLOCK * BLOCK
        if mode == "align":
            assert kept(scheduler, list(PROMPT)) == [72]
    assert step > 3


@pytest.mark.usefixtures("one_program")
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(prefix_cache="all"), marks=pytest.mark.deep, id="all"),
        dict(policy="deferred", fold_length=8, num_speculative_tokens=2, async_stepping=True),
    ],
    ids=lambda changes: changes["policy"],
)
def test_a_retry_goes_on_where_the_aborted_prompt_was(changes):
    sizes = dict(block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=16, max_model_len=96)
    sizes |= dict(num_state_blocks=30, num_kv_pages=60, checked=True, prefix_cache="align")
    adds = "policy" in changes
    engine = Engine(Speller(adds=adds), EngineConfig(**sizes | changes))
    poison(engine)
    prompt, params = [(3 + 7 * n) % 61 for n in range(77)], SamplingParams(max_tokens=4, ignore_eos=True)
    number, computed = engine.add_request(prompt, params), []
    for _ in range(3):
        engine.step()
        computed.append(engine.core.requests[number].min_computed)
    engine.abort(number)
    while engine.has_unfinished:
        engine.step()
    (output,) = engine.generate([prompt], params)
    assert output.num_cached_tokens == computed[-1] == 48
    tokens = list(prompt)
    for token in output.token_ids:
        assert token == next_token(tokens, adds=adds)
        tokens.append(token)
    engine.cache.check()
    assert engine.stats.null_reads == engine.cache.states.pool.num_held == 0
