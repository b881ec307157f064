"""A small engine that runs the speller, its requests, and what must hold when they have ended."""

import dataclasses

from fakes.speller import VOCAB, Speller, next_tokens

from mamba_align_jax import SamplingParams

SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=64)
# Three long requests at once need more blocks and pages, so that some are preempted.
SIZES |= dict(num_state_blocks=12, num_kv_pages=18, prompt_lookup_min=1)
DRAFTS = dict(num_speculative_tokens=2)
STEPPING = {"sync": DRAFTS, "async": DRAFTS | dict(async_stepping=True)}
STUTTER = 2
PARAMS = SamplingParams(max_tokens=18, ignore_eos=True)
# Needs a program of a higher level, and changes no token.
FULL = dataclasses.replace(PARAMS, logit_bias={0: 0.0}, logprobs=1)
# It also runs under policy "deferred".
SPELLER = Speller(STUTTER, adds=True)


def prompts(rng):
    shared = rng.integers(0, VOCAB, 17).tolist()
    return [shared + rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 9)] + [
        rng.integers(0, VOCAB, n).tolist() for n in (25, 3)
    ]


def serve(engine, asked):
    """Runs requests to their ends, and returns the outputs in their order."""
    ids, outputs = [engine.add_request(prompt, PARAMS) for prompt in asked[:-1]], {}
    ids.append(engine.add_request(asked[-1], FULL))
    for _ in range(600):
        if not engine.has_unfinished:
            break
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs.keys() == set(ids), "a request was lost"
    return [outputs[number] for number in ids]


def assert_right(outputs, asked):
    for output, prompt in zip(outputs, asked, strict=True):
        assert list(output.prompt_token_ids) == prompt
        tokens = [*output.prompt_token_ids, *output.token_ids]
        wanted = next_tokens(tokens[:-1], STUTTER, adds=True)[len(prompt) - 1 :]
        assert wanted == list(output.token_ids) or not output.token_ids
        assert len(output.token_times) == len(output.token_ids)
        assert [found.token_id for found in output.logprobs or ()] == list(
            output.token_ids[: len(output.logprobs or ())]
        )
        if output.error is None:
            assert (output.finish_reason, len(output.token_ids)) == ("length", PARAMS.max_tokens)


def assert_nothing_is_held(engine):
    engine.cache.check()
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == engine.stats.null_reads == 0
    assert not engine.cache.states._requests
    assert not engine.cache.states._rolling.left
    assert not engine.cache.kv._requests
    assert not engine.scheduler.running
    assert len(engine.scheduler.waiting) == 0
    assert len(engine.scheduler._free_slots) == SIZES["max_num_seqs"]


def drain(engine, *, steps=600):
    updates = []
    for _ in range(steps):
        if not engine.has_unfinished:
            return updates
        updates += engine.step_outputs()
    raise AssertionError("the engine does not come to an end")


def joined(updates):
    """One update for each request, by its id."""
    whole = {}
    for update in updates:
        before = whole.get(update.request_id)
        assert before is None or before.output is None, "an update after the last one"
        whole[update.request_id] = before.followed_by(update) if before else update
    return whole
