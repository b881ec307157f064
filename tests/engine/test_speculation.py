"""The engine generates the right tokens whatever drafts are accepted. The model is tiny and random."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fakes.engines import load_two_layers
from fakes.foresight import Foresight, found_in, in_turn
from oracles.traces import Listener, replay

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.program import run_step
from mamba_align_jax.engine.drafting.prompt_lookup_device import HistoryDrafter
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.running.trace import read_trace

CHECKPOINT = Path(__file__).parents[1] / "data" / "qwen3_5_text"
# One set of sizes, so that each policy is compiled once: windows as wide as blocks, and pools that run out.
K = 7
SIZES = dict(block_size=8, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=96)
SIZES |= dict(num_speculative_tokens=K, num_state_blocks=34, num_kv_pages=24, checked=True)
SIZES |= dict(prefix_cache="align", async_stepping=False)
pytestmark = pytest.mark.usefixtures("fewest_programs")
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
# How many drafts a verify row gets, and how many of them are right.
PLAN = ((7, 7), (3, 1), (0, 0), (7, 0), (5, 5), (1, 1), (7, 3), (2, 2), (7, 6))


def foresight(outputs, plan=PLAN):
    """A drafter that knows the sequences of `outputs`; `plan` has pairs of (drafts, right drafts)."""
    return Foresight(found_in([[*o.prompt_token_ids, *o.token_ids] for o in outputs]), in_turn(plan), vocab_size=256)


class DeviceForesight(HistoryDrafter):
    """Does the same on the device. The number of tokens so far chooses from the plan; sequences differ in their first."""

    def __init__(self, outputs, plan=PLAN):
        self.known = np.zeros((len(outputs), 2 * SIZES["max_model_len"]), np.int32)
        for row, output in zip(self.known, outputs, strict=True):
            row[: len(output.prompt_token_ids) + len(output.token_ids)] = output.prompt_token_ids + output.token_ids
        self.plan = np.array(plan, np.int32)

    def propose(self, history, length, most):
        coming = jnp.argmax(jnp.all(history[:, None, :5] == self.known[:, :5], axis=2), axis=1)
        place = jnp.arange(most)
        tokens = jnp.asarray(self.known)[coming[:, None], length[:, None] + place]
        count, right = jnp.asarray(self.plan)[length % len(self.plan)].T
        # Tokens after the valid drafts are right, but must not be accepted.
        wrong = (place >= right[:, None]) & (place < count[:, None])
        return jnp.where(wrong, (tokens + 1) % 256, tokens), count


@pytest.fixture(scope="module")
def model():
    return load_two_layers(CHECKPOINT)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module", params=["copy_free", pytest.param("pre_copy", marks=pytest.mark.deep)])
def make(request, model):
    """Makes engines of one policy."""
    return lambda drafter=None: Engine(model, EngineConfig(policy=request.param, **SIZES), drafter=drafter)


@pytest.fixture(scope="module")
def make_async(model):
    """Makes engines that dispatch a step before the tokens of the last one are read."""

    return lambda drafter=None: Engine(model, EngineConfig(**SIZES | dict(async_stepping=True)), drafter=drafter)


def undrafted(make, prompts, params=GREEDY):
    """Generates the outputs without drafts."""
    return make().generate(prompts, dataclasses.replace(params, num_speculative_tokens=0))


def prompts(rng, *lengths):
    return [rng.integers(1, 256, length).tolist() for length in lengths]


def assert_right(reference, outputs):
    verdicts = [reference.judge(output.prompt_token_ids, output.token_ids) for output in outputs]
    assert all(verdict.right for verdict in verdicts), verdicts
    assert sum(verdict.ties for verdict in verdicts) <= 1


def assert_everything_is_returned(engine):
    engine.cache.check()
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == 0


def test_any_acceptance_is_right_under_preemption(rng, make, reference):
    batch = prompts(rng, 30, 25, 40, 28, 9, 17)
    plain = undrafted(make, batch)
    engine = make(foresight(plain))
    engine.warmup()
    programs = run_step._cache_size()
    outputs = engine.generate(batch, GREEDY)
    assert run_step._cache_size() == programs
    assert_right(reference, [*plain, *outputs])
    assert_everything_is_returned(engine)
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.null_reads == 0
    assert len(stats.draft_tokens) == len(stats.accepted_tokens) == K
    assert all(
        0 < accepted < drafts for accepted, drafts in zip(stats.accepted_tokens, stats.draft_tokens, strict=True)
    )
    assert list(stats.accepted_tokens) == sorted(stats.accepted_tokens, reverse=True)
    assert sum(stats.draft_tokens) == sum(output.num_draft_tokens for output in outputs)
    assert sum(stats.accepted_tokens) == sum(output.num_accepted_tokens for output in outputs)


def test_accepted_drafts_save_steps_up_to_the_longest_sequence(rng, make, reference):
    """All drafts are right up to max_model_len: a step adds K + 1 tokens, and the last step has fewer drafts."""
    (prompt,) = prompts(rng, 51)
    params = dataclasses.replace(GREEDY, max_tokens=45)
    plain = undrafted(make, [prompt], params)
    engine = make(foresight(plain, [(K, K)]))
    (output,) = engine.generate(prompt, params)
    assert output.token_ids == plain[0].token_ids
    assert_right(reference, [output])
    # Two steps for the prompt and its last block, one token of them; then 5 x 8, and 4 of which 3 were drafts.
    assert engine.stats.steps == 2 + 6
    assert output.num_draft_tokens == output.num_accepted_tokens == 5 * K + 3
    assert output.finish_reason == "length"


def test_stop_token_among_accepted_drafts_ends_the_request(rng, make, reference):
    """The device passes the boundary after the stop token, and the cache does not find it."""
    (prompt,) = prompts(rng, 13)
    (plain,) = undrafted(make, [prompt])
    whole = [*prompt, *plain.token_ids]
    # Drafted are 14 to 20, and the stop is at 15: computed are 15 or 16 tokens, and not the second boundary's.
    stop = whole[14]
    assert stop not in whole[13:14]
    engine = make(foresight([plain], [(K, K)]))
    (output,) = engine.generate(prompt, dataclasses.replace(GREEDY, stop_token_ids=(stop,)))
    assert [*prompt, *output.token_ids] == whole[:15]
    assert output.finish_reason == "stop"
    assert output.num_accepted_tokens == K
    assert_everything_is_returned(engine)
    (after,) = engine.generate(whole[:30], dataclasses.replace(GREEDY, max_tokens=3))
    assert after.num_cached_tokens == 8
    assert_right(reference, [output, after])


def test_boundaries_passed_by_accepted_drafts_hit_the_cache(rng, make, reference):
    """Boundaries that verify rows pass have the right states, at any place in the window."""
    batch = prompts(rng, 10)
    plain = undrafted(make, batch)
    for right in range(K + 1):
        engine = make(foresight(plain, [(K, right)]))
        (first,) = engine.generate(batch, GREEDY)
        talk = [*first.prompt_token_ids, *first.token_ids, 3, 4]
        (second,) = engine.generate([talk], dataclasses.replace(GREEDY, max_tokens=4))
        assert second.num_cached_tokens == 48
        assert_right(reference, [first, second])


def test_any_acceptance_is_right_with_drafts_of_the_device(rng, make_async, reference):
    """The requests are preempted and aborted, and choose their own K. The device is one step ahead of the host."""
    batch = prompts(rng, 30, 25, 40, 28, 9, 17)
    plain = undrafted(make_async, batch)
    engine = make_async(DeviceForesight(plain))
    outputs = engine.generate(batch, GREEDY)
    assert_right(reference, [*plain, *outputs])
    assert_everything_is_returned(engine)
    stats = engine.stats
    assert stats.preemptions > 0
    assert stats.null_reads == 0
    assert 0 < stats.accepted_tokens[0] < stats.draft_tokens[0]
    assert stats.accepted_tokens[5] > 0, "six of seven, at every ninth length"
    sampled = SamplingParams(max_tokens=30, temperature=0.9, top_k=20, top_p=0.95, seed=11, ignore_eos=True)
    ids = [engine.add_request(batch[n], dataclasses.replace(GREEDY, num_speculative_tokens=n)) for n in range(4)]
    ids += [engine.add_request(prompt, sampled) for prompt in batch[:2]]
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
        if len(outputs) == 1:
            engine.abort(ids[3])
    assert_right(reference, [outputs[i] for i in ids[:3]])
    assert outputs[ids[0]].num_draft_tokens == 0
    assert [outputs[i].token_ids for i in ids[4:]] == [
        output.token_ids for output in undrafted(make_async, batch[:2], sampled)
    ]
    assert_everything_is_returned(engine)


def test_prompt_lookup_on_the_device_generates_the_same_tokens(rng, model, make_async):
    """One request runs alone, with drafts of the host and of the device."""
    (prompt,) = prompts(rng, 6)
    prompt = (prompt * 9)[:50]
    host = Engine(model, EngineConfig(**SIZES)).generate(prompt, GREEDY)[0]
    device = make_async().generate(prompt, GREEDY)[0]
    assert device.token_ids == host.token_ids
    assert host.num_draft_tokens > 0
    assert device.num_accepted_tokens > 0


def test_late_result_does_not_reach_the_next_request_in_its_slot(rng, make_async, reference):
    """When an aborted request's step is read, its slot and its blocks belong to another request."""
    batch = prompts(rng, 12, 13, 14, 15, 20, 9)
    engine = make_async()
    ids = [engine.add_request(prompt, GREEDY) for prompt in batch[:4]]
    outputs = [output for _ in range(3) for output in engine.step()]
    for i in ids:
        engine.abort(i)
    assert engine.unread_steps
    later = [engine.add_request(prompt, GREEDY) for prompt in batch[4:]]
    while engine.has_unfinished:
        outputs += engine.step()
    assert sorted(output.request_id for output in outputs) == later
    assert_right(reference, outputs)
    assert_everything_is_returned(engine)


def assert_traced(rng, engine, file):
    """Serves chunks, hits, drafts, preemptions and an abort, and compares the trace with the outputs and the counts."""
    batch, published = prompts(rng, 55, 21, 40), Listener(engine.cache.states)
    batch.append((prompts(rng, 6)[0] * 9)[:50])
    params = dataclasses.replace(GREEDY, max_tokens=30)
    already = pytest.raises(ValueError, match="a trace is being written already, got 'x' for another one")
    with engine.trace(file), already, engine.trace("x"):
        pass
    with engine.trace(file):
        outputs = engine.generate(batch, params)
        for number in range(4):
            engine.add_request([*batch[3][:24], 1, *[2] * number], params)
        outputs += [output for _ in range(3) for output in engine.step()]
        aborted = engine.abort(engine.scheduler.running[0].id)
        while engine.has_unfinished:
            outputs += engine.step()
    stats = engine.stats
    steps = list(read_trace(file))
    rows = [row for step in steps for row in step.rows]
    computed = replay(rows, SIZES["block_size"])
    assert [step.step for step in steps] == list(range(1, stats.steps + 1))
    assert {output.request_id for output in (*outputs, aborted)} == computed.keys()
    for output in (*outputs, aborted):
        own = [row for row in rows if row.request == output.request_id]
        assert (own[0].enters, own[0].computed) == (True, output.num_cached_tokens)
        taken = [row for row in own if not row.gone]
        assert sum(row.proposed for row in taken) == output.num_draft_tokens
        assert sum(row.accepted for row in taken) == output.num_accepted_tokens
        assert computed[output.request_id] >= len(output.prompt_token_ids) + len(output.token_ids) - 1
    taken = [row for row in rows if not row.gone]
    assert sum(row.proposed for row in taken) == sum(stats.draft_tokens) > 0
    assert sum(row.accepted for row in taken) == sum(stats.accepted_tokens) > 0
    assert sum(row.scheduled for row in taken if row.prefill) == stats.prefill_tokens
    assert sum(step.copied_bytes for step in steps) == stats.state_bytes_copied > 0
    assert sum(row.enters for row in rows) == len(computed) + stats.preemptions > len(computed)
    assert stats.hit_requests > 0
    offered = [(row.request, row.published) for row in rows if row.published]
    assert sorted(offered) == sorted(published.heard[: len(offered)])
    return {row.request for row in rows if row.gone}, aborted.request_id


@pytest.mark.parametrize("make", ["copy_free"], indirect=True)
def test_trace_agrees_with_the_engine(rng, make, tmp_path):
    late, _ = assert_traced(rng, make(), tmp_path / "trace.jsonl")
    assert late == set()


def test_trace_of_late_results_agrees_with_the_engine(rng, make_async, tmp_path):
    late, aborted = assert_traced(rng, make_async(), tmp_path / "trace.jsonl")
    assert aborted in late


@pytest.mark.gpu
def test_speculation_is_right_with_compiled_kernels(rng, make, make_async, reference):
    test_any_acceptance_is_right_with_drafts_of_the_device(rng, make_async, reference)
    test_any_acceptance_is_right_under_preemption(rng, make, reference)
    test_boundaries_passed_by_accepted_drafts_hit_the_cache(rng, make, reference)


def test_request_chooses_its_number_of_drafts(rng, make, reference):
    batch = prompts(rng, *[12] * 4)
    plain = undrafted(make, batch, params := dataclasses.replace(GREEDY, max_tokens=20))
    engine = make(foresight(plain, [(K, K)]))
    chosen = [0, 1, 4, None]
    ids = [
        engine.add_request(prompt, dataclasses.replace(params, num_speculative_tokens=own))
        for prompt, own in zip(batch, chosen, strict=True)
    ]
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    assert_right(reference, outputs.values())
    # 19 tokens follow the prompt's: by twos, by fives (the last of them clipped), by eights.
    assert [outputs[i].num_draft_tokens for i in ids] == [0, 9, 15, 16]


def test_sampled_tokens_do_not_depend_on_drafts(rng, make):
    """The tokens are equal, because a token's randomness depends only on seed and position."""
    batch = prompts(rng, 20, 11, 5)
    params = SamplingParams(max_tokens=30, temperature=0.9, top_k=20, top_p=0.95, seed=11, ignore_eos=True)
    plain = undrafted(make, batch, params)
    engine = make(foresight(plain))
    outputs = engine.generate(batch, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert sum(engine.stats.accepted_tokens) > 20
    assert len(set(outputs[0].token_ids)) > 10


def test_wrong_numbers_of_drafts_and_drafters_raise(model):
    engine = Engine(model, EngineConfig(**SIZES))
    with pytest.raises(ValueError, match="num_speculative_tokens must be at most the engine's 7, got 8"):
        engine.add_request([1], SamplingParams(num_speculative_tokens=8))
    assert not engine.has_unfinished
    with pytest.raises(ValueError, match="drafter must be None or a DeviceDrafter under async_stepping"):
        Engine(model, EngineConfig(**SIZES | dict(async_stepping=True)), drafter=foresight([]))
    with pytest.raises(ValueError, match="num_speculative_tokens must be None or at least 0, got -1"):
        SamplingParams(num_speculative_tokens=-1)
