"""Serves prompts by sglang-jax's engine and writes what it answered: run by `make integrations`, in sglang-jax's Python.

    python sglang_jax_server.py MODEL ANSWERS {native,ours,drafts} {cached,batched,both} [--rehearsed FILE] [--devices N]
        [--abort] [--record FOLDER]

"native" is sglang-jax's own backend and "ours" this library's. "drafts" is ours with speculative decoding: its drafts are
the answers in FILE, with mistakes. "cached" serves one prompt after the other with the radix cache. "batched" serves several
at once, without it and with pages of one token. "both" serves several at once with the radix cache. It corrects sglang-jax's
attention on a CPU, which reads the wrong keys of all rows but the first if pages are larger. Steps do not overlap, because
on a CPU some tokens then depend on timing, with its own backend too. `--devices` divides all heads among devices. `--abort`
aborts requests that are retracted or have no memory, after all others were answered. With `--record`, calls that the model
made of its own backend are written as well.
"""

import argparse
import json
import os
import time

# sglang-jax's kernel for prompts of Kimi delta attention is for TPUs, and runs on a CPU if Pallas interprets it.
os.environ.update(JAX_PLATFORMS="cpu", SGLANG_JAX_CONV_STATE_DTYPE="float32", PALLAS_INTERPRET="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sgl_jax.srt.entrypoints.engine import Engine
from sgl_jax.srt.layers.attention import native_backend
from sgl_jax.srt.managers.io_struct import AbortReq
from sgl_jax.srt.managers.schedule_batch import ScheduleBatch
from sgl_jax.srt.managers.scheduler import Scheduler

from mamba_align_jax.integrations import sglang_jax, sglang_jax_speculation

TOKENS, CHUNK, DRAFTS = 12, 32, 3
STOPS = list(range(32))
# Slots for 24 states and pages for 1024 tokens are fewer than the prompts below fill.
SIZES = dict(
    chunked_prefill_size=CHUNK, max_running_requests=4, max_total_tokens=1024, max_recurrent_state_size=24,
    context_length=512, precompile_token_paddings=[CHUNK], precompile_bs_paddings=[4], mem_fraction_static=0.1,
)  # fmt: skip
OPTIONS = dict(
    device="cpu", attention_backend="native", gdn_prefill_impl="chunked_jax", dtype="float32", skip_tokenizer_init=True,
    enable_single_process=True, disable_precompile=True, disable_overlap_schedule=True,
)  # fmt: skip
SETTINGS = {
    "cached": dict(page_size=16, enable_unified_radix_tree=True, enable_recurrent_extra_buffer=True),
    "batched": dict(page_size=1, disable_radix_cache=True),
}
SETTINGS["both"] = SETTINGS["cached"]


class Rehearsed:
    """Drafts what a request has answered before. One of the drafts may be a mistake, depending on the text."""

    def __init__(self, answers):
        self.texts = [answer["prompt"] + answer["tokens"] for phase in answers.values() for answer in phase]
        self.remembered = set()

    def draft(self, request, tokens, max_drafts):
        self.remembered.add(request)
        tokens = [*tokens]
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), tokens)
        drafts, place = text[len(tokens) :][:max_drafts], sum(tokens) % (max_drafts + 2)
        return [(token + (i == place)) % 255 for i, token in enumerate(drafts)]

    def forget(self, request):
        self.remembered.discard(request)


def watch_acceptance():
    """Counts drafts, which are accepted, where rows end that reach a boundary, and retracted requests, from now on."""
    accept, retract = sglang_jax_speculation.NGramWorker._accept, ScheduleBatch.retract_decode
    names = "rows", "drafts", "accepted", "after a boundary", "at a boundary", "before a boundary", "retracted"
    counts = dict.fromkeys(names, 0)

    def watched(self, rows, sampled, size):
        tokens, accepted = accept(self, rows, sampled, size)
        for row, number in zip(rows, accepted, strict=False):
            counts["rows"] += 1
            counts["drafts"] += len(row.tokens) - 1
            counts["accepted"] += int(number) - 1
            if row.boundary is not None and row.computed + len(row.tokens) >= row.boundary:
                end = np.sign(row.computed + int(number) - row.boundary)
                counts[{1: "after a boundary", 0: "at a boundary", -1: "before a boundary"}[end]] += 1
        return tokens, accepted

    def watched_retract(self, server_args):
        retracted, *rest = retract(self, server_args)
        counts["retracted"] += len(retracted)
        return retracted, *rest

    sglang_jax_speculation.NGramWorker._accept, ScheduleBatch.retract_decode = watched, watched_retract
    return counts


def abort_retracted(engine, drafter):
    """Serves prompts whose requests are aborted: the last one of a batch for want of memory, the others once retracted.

    Returns the numbers of both that had drafts before.
    """
    queue, retract = Scheduler._extend_requests_to_queue, ScheduleBatch.retract_decode
    aborted, drafted, starved = [], [], []
    had_drafts = lambda request: [name for name in drafter.remembered if name[0] == request.rid]

    def watched_queue(self, requests, is_retracted=False):
        queue(self, requests, is_retracted)
        for request in filter(had_drafts, requests if is_retracted else ()):
            aborted.append(request.rid)
            drafted.extend(had_drafts(request))
            self.abort_request(AbortReq(rid=request.rid))

    def watched_retract(self, server_args):
        if sum(bool(had_drafts(request)) for request in self.reqs_info[0].reqs) < 2:
            return retract(self, server_args)
        self.token_to_kv_pool_allocator.available_size = lambda dp_rank=0: -1
        retracted, ratio, without_memory = retract(self, server_args)
        del self.token_to_kv_pool_allocator.available_size
        for request in without_memory:
            aborted.append(request.rid)
            starved.extend(had_drafts(request))
        return retracted, ratio, without_memory

    rng, sampling = np.random.default_rng(2), dict(temperature=0, max_new_tokens=TOKENS, ignore_eos=True)
    prompts = [rng.integers(1, 255, length).tolist() for length in (20, 5, 33, 60, 8, 41)]
    Scheduler._extend_requests_to_queue, ScheduleBatch.retract_decode = watched_queue, watched_retract
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    Scheduler._extend_requests_to_queue, ScheduleBatch.retract_decode = queue, retract
    reasons = [output["meta_info"]["finish_reason"]["type"] for output in outputs]
    assert reasons.count("abort") == len(aborted)
    # The batch of the last step holds its requests, and drafters are told of what is gone before they draft.
    engine.generate(input_ids=prompts[:1], sampling_params=sampling)
    return len(drafted), len(starved)


def wait_until_forgotten(drafter):
    """Returns how many requests the drafter remembers, once it remembers none or after five minutes.

    sglang-jax answers before it has processed the rest of the step.
    """
    end = time.monotonic() + 300
    while drafter.remembered and time.monotonic() < end:
        time.sleep(0.01)
    return len(drafter.remembered)


def without_padding(page_size):
    """Lets sglang-jax's attention on a CPU find the keys of all rows, from now on.

    It looks for them as if each row's keys followed those of the row before, whose last page may not be full.
    """
    attend = native_backend.forward_attention

    def forward_attention(q, k, v, lengths, places, *arguments, mesh, **options):
        lengths, places = (jax.sharding.reshard(x, NamedSharding(mesh, P())) for x in (lengths, places))
        ends, index = jnp.cumsum(lengths), jnp.arange(places.shape[0])
        row = jnp.minimum(jnp.searchsorted(ends, index, side="right"), lengths.shape[0] - 1)
        padding = -lengths % page_size
        before = (jnp.cumsum(padding) - padding)[row]
        places = jnp.where(index < ends[-1], places[jnp.minimum(index + before, index[-1])], 0)
        return attend(q, k, v, lengths, places, *arguments, mesh=mesh, **options)

    native_backend.forward_attention = forward_attention


def phases(setting, several, answers):
    """Prompts in the order in which they are served: the phase's name, then batches that run together.

    `answers` are those until now.
    """
    rng = np.random.default_rng(1)
    new = lambda length: rng.integers(1, 255, length).tolist()
    first, second = new(100), new(64)
    if setting == "cached":
        yield "chunked prefill", [[first], [second], [new(5)], [new(32)], [new(33)]]
        yield "prefix hits", [[first], [second], [first[:70] + new(9)], [first + new(40)], [second[:32] + new(3)]]
        yield "eviction", [[new(96)] for _ in range(14)] + [[first], [second]]
        yield "hits after eviction", [[first], [second]]
        yield "hits in answers", follow_ups(new, answers, "hits in answers")
        yield "stop tokens", follow_ups(new, answers, "stop tokens")
    if setting == "both":
        yield "several at once", several_follow_ups(new, answers, "several at once")
    if several:
        batch = [first, second, new(45), first[:96] + new(20), new(3), new(80), new(32)]
        yield "several at once", [batch, [new(7)] * 3 + [new(50)]]


def follow_ups(new, answers, phase):
    """Prompts that pass the boundary after 64 tokens while they are answered, each followed by one that continues it."""
    for length in range(2 * CHUNK - TOKENS + 1, 2 * CHUNK - 1):
        yield [new(length)]
        last = answers[phase][-1]
        yield [last["prompt"] + last["tokens"] + new(3)]


def several_follow_ups(new, answers, phase):
    """Prompts that are answered at once and pass the boundary after 64 tokens, then as many that continue them."""
    for lengths in ((53, 57, 62, 5, 60), (61, 54, 63, 59), (100, 58, 56, 55, 62, 33)):
        yield [new(length) for length in lengths]
        yield [last["prompt"] + last["tokens"] + new(3) for last in answers[phase][-len(lengths) :]]


def serve(engine, setting, several):
    """Answers all prompts greedily. Returns the answers by phase: prompt, tokens, and the number of cached tokens."""
    answers = {}
    for phase, batches in phases(setting, several, answers):
        answers[phase] = []
        for batch in batches:
            sampling = dict(
                temperature=0, max_new_tokens=TOKENS, ignore_eos=phase != "stop tokens", stop_token_ids=STOPS
            )
            for prompt, output in zip(batch, engine.generate(input_ids=batch, sampling_params=sampling), strict=True):
                cached = output["meta_info"]["cached_tokens"]
                answers[phase].append(dict(prompt=prompt, tokens=output["output_ids"], cached=cached))
    return answers


def shares(engine):
    """Counts the devices among which the heads of the states are divided."""
    pools = engine.scheduler_info["scheduler"].tp_worker.model_runner.memory_pools
    states = pools.recurrent_state_pool.recurrent_buffers[0]
    _, heads, *_ = states.sharding.shard_shape(states.shape)
    assert heads * len(states.sharding.device_set) == states.shape[1]
    return states.shape[1] // heads


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("answers")
    parser.add_argument("backend", choices=("native", "ours", "drafts"))
    parser.add_argument("setting", choices=SETTINGS)
    parser.add_argument("--rehearsed", help="answers of a run without speculation")
    parser.add_argument("--record")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--abort", action="store_true")
    options = parser.parse_args()
    more = dict(tp_size=options.devices)
    if options.backend != "native":
        sglang_jax.install()
    else:  # sglang-jax's attention lacks a method of its hybrid pool on a CPU, whatever the backend.
        from sgl_jax.srt.mem_cache.memory_pool import HybridLinearKVPool

        HybridLinearKVPool.set_kv_buffer_legacy = sglang_jax._set_kv_buffer_legacy
    if options.record:
        import sglang_jax_recorder

        sglang_jax_recorder.watch()
    drafter = None
    if options.backend == "drafts":
        with open(options.rehearsed) as file:
            drafter = Rehearsed(json.load(file)["answers"])
        sglang_jax_speculation.install(drafter=drafter)
        more |= dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=DRAFTS + 1)
    counts = watch_acceptance()
    if options.setting == "both":
        without_padding(SETTINGS["both"]["page_size"])
    engine = Engine(model_path=options.model, **OPTIONS, **SETTINGS[options.setting], **SIZES, **more)
    answers = serve(engine, options.setting, options.setting == "batched" or options.record)
    aborted, starved = abort_retracted(engine, drafter) if options.abort else (0, 0)
    counts |= {"aborted": aborted, "aborted for want of memory": starved}
    result = dict(answers=answers, drafts=counts, devices=shares(engine))
    # Requests of which the drafter keeps something, though all are over.
    result["remembered"] = wait_until_forgotten(drafter) if drafter else 0
    engine.shutdown()
    with open(options.answers, "w") as file:
        json.dump(result, file)
    if options.record:
        sglang_jax_recorder.write(options.record)
    # sglang-jax's scheduler is a thread that never ends, and Python may abort where it tears such a thread down.
    os._exit(0)


if __name__ == "__main__":
    main()
