"""Thousands of requests through the whole engine on small pools: `make soak`.

The requests share prefixes, continue others' answers, wait, and are aborted. The soak checks every token of every request:
a stub model's are known exactly, and the bundled model's are judged by its float32 reference. After each step both pools
must account for all their blocks, and whenever no request runs, no block may be held. No request may be overtaken by a
later one or by one of lower priority, and none may be refused while the queue has room. Some calls raise, some lose the
pools, some steps are interrupted at a line that is drawn, and during some others threads add and abort requests.
"""

import argparse
import dataclasses
import gc
import itertools
import json
import logging
import math
import resource
import sys
import threading
import time
import types
from collections import deque
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from fakes.engines import poison
from fakes.speller import VOCAB, Speller, next_tokens

import mamba_align_jax
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.data import BYTE_MODEL, encode
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.sampling.draw import sample
from mamba_align_jax.errors import QueueFullError
from mamba_align_jax.models import load_model

STUTTER = 2
LONGEST_ANSWER = 24
STUB = dict(block_size=8, kv_page_size=4, max_num_seqs=12, max_num_batched_tokens=96, max_model_len=96)
STUB |= dict(num_state_blocks=64, num_kv_pages=100, prompt_lookup_min=1, prefix_cache="align", async_stepping=False)
DRAFTS = dict(num_speculative_tokens=4)
STUB_CONFIGS = {
    "copy_free": dict(),
    "copy_free, drafts": DRAFTS,
    "pre_copy, drafts, a short queue": dict(policy="pre_copy", max_waiting=3, **DRAFTS),
    "windows as wide as blocks": dict(num_speculative_tokens=7, num_state_blocks=90),
    "chunks inside blocks": dict(
        block_size=16, max_num_batched_tokens=12, checkpoint_interval=32, num_state_blocks=40, num_kv_pages=50, **DRAFTS
    ),
    "none": dict(prefix_cache="none", **DRAFTS),
    "deferred, drafts": dict(policy="deferred", block_size=16, fold_length=16, **DRAFTS),
    "deferred": dict(policy="deferred", fold_length=4),
    "deferred, none": dict(policy="deferred", prefix_cache="none", fold_length=9, **DRAFTS),
    "every boundary": dict(prefix_cache="all", **DRAFTS),
}
MODEL = dict(block_size=16, kv_page_size=8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=192)
MODEL |= dict(num_state_blocks=40, num_kv_pages=70, prompt_lookup_min=1, prefix_cache="align", async_stepping=False)
MODEL_CONFIGS = {
    "copy_free, drafts": DRAFTS,
    "pre_copy": dict(policy="pre_copy"),
    "deferred, drafts": dict(policy="deferred", **DRAFTS),
    "its own drafts": dict(speculation="mtp", **DRAFTS),
}
STEPPING = {"": dict(), ", asynchronous": dict(async_stepping=True)}


class SoakTraffic:
    """Draws requests: fresh ones, ones that share a prefix, and ones that continue an earlier answer.

    Args:
        seed: of all draws.
        books: long token lists. Requests share their beginnings, and fresh tokens are taken from their middle.
        config: the engine's.
        levels: whether some requests need programs of higher levels.
    """

    def __init__(self, seed, books, config, levels=False):
        self.rng, self.books, self.config = np.random.default_rng(seed), books, config
        self.levels = levels
        self.conversations = deque(maxlen=60)
        self.edges = [n * config.block_size + d for n in range(4) for d in (-1, 0, 1) if n * config.block_size + d > 0]

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def some(self, max_tokens):
        """Draws 1 to `max_tokens` fresh tokens."""
        book = self.books[self.rng.integers(len(self.books))]
        first = self.rng.integers(len(book) - max_tokens)
        return list(book[first : first + 1 + self.rng.integers(max_tokens)])

    def length(self, max_length):
        """Draws a length, which is often one at or beside a block boundary."""
        edge = self.pick(*self.edges)
        return edge if edge <= max_length and self.rng.random() < 0.5 else 1 + int(self.rng.integers(max_length))

    def request(self):
        """Draws a prompt and its parameters."""
        rng, max_tokens = self.rng, 1 + int(self.rng.integers(LONGEST_ANSWER))
        max_prompt = self.config.max_model_len - max_tokens
        salt, kind = self.pick(*[""] * 6, "a", "b"), rng.random()
        if kind < 0.15:
            prompt = (self.some(8) + self.some(max_prompt))[: self.length(max_prompt)]
        elif kind < 0.6 or not self.conversations:
            # There are few books and few lengths, so that equal prompts and prompts that begin others are common.
            book = self.books[min(int(rng.exponential(1.5)), len(self.books) - 1)]
            prompt = list(book[: self.length(max_prompt)]) + (self.some(12) if rng.random() < 0.7 else [])
        else:
            salt, conversation = self.conversations[rng.integers(len(self.conversations))]
            prompt = conversation + self.some(8)
        prompt = [int(token) for token in prompt[:max_prompt]]
        drafts = self.config.num_speculative_tokens
        params = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            cache_salt=salt,
            stop_token_ids=self.some(2) if rng.random() < 0.15 else (),
            checkpoint_at=rng.integers(0, max_prompt, 2).tolist() if rng.random() < 0.2 else (),
            num_speculative_tokens=self.pick(None, None, *range(drafts + 1)),
            priority=self.pick(0, 0, 0, -1, 1),
        )
        if rng.random() < 0.3:
            params = dataclasses.replace(
                params,
                temperature=float(rng.uniform(0.3, 2)),
                top_k=self.pick(0, 0, 1, 5),
                top_p=self.pick(1.0, 1.0, 0.9),
                seed=int(rng.integers(1 << 31)),
            )
        if self.levels and len(prompt) % 5 == 0:
            # Needs programs of a higher level, and changes no token.
            asked = 1 if len(prompt) % 3 == 0 else None
            params = dataclasses.replace(params, logit_bias={0: 0.0}, logprobs=1, prompt_logprobs=asked)
        return prompt, params

    def done(self, params, output):
        """Takes a finished request, which a later one may continue."""
        self.conversations.append((params.cache_salt, [*output.prompt_token_ids, *output.token_ids]))


def answers(logits, params, first):
    """The tokens that `params` choose by logits [tokens, vocab]. `first` is the position of the first token."""
    if params.temperature == 0:
        return np.argmax(logits, axis=-1)
    rows = np.zeros((LONGEST_ANSWER, logits.shape[1]), np.float32)
    rows[: len(logits)] = logits
    each = lambda value, dtype: jnp.full(len(rows), value, dtype)
    options = each(params.temperature, jnp.float32), each(params.top_k, jnp.int32), each(params.top_p, jnp.float32)
    position = first + jnp.arange(len(rows), dtype=jnp.int32)
    return np.asarray(sample(jnp.asarray(rows), *options, each(params.seed, jnp.int32), position))[: len(logits)]


class Exactly:
    """Judges the stub model, whose tokens are known."""

    def __init__(self, stutter=STUTTER):
        self.stutter = stutter

    def __call__(self, served):
        """Returns what is wrong, with what would be right, and the number of ties among pairs of (params, output)."""
        wrong = []
        for params, output in served:
            tokens, first = [*output.prompt_token_ids, *output.token_ids], len(output.prompt_token_ids)
            right = np.array(next_tokens(tokens[:-1], self.stutter, adds=True)[first - 1 :])
            if params.temperature > 0:
                right = answers(-((np.arange(VOCAB) - right[:, None]) ** 2), params, first)
            if not np.array_equal(right, output.token_ids):
                wrong.append((right.tolist(), params, output))
        return wrong, 0


class ByReference:
    """Judges a model by its reference: every token must be the reference's choice up to rounding (see `Reference`)."""

    def __init__(self, model):
        self.reference = Reference(model)

    def __call__(self, served):
        """Returns what `Exactly` returns. A sequence that begins another one shares its run of the reference."""
        wrong, ties, run, logits = [], 0, (), None
        for tokens, params, output in sorted(
            (((*output.prompt_token_ids, *output.token_ids), params, output) for params, output in served),
            key=lambda entry: entry[0],
            reverse=True,
        ):
            if run[: len(tokens)] != tokens:
                run, logits = tokens, self.reference.logits(tokens)
            first = len(output.prompt_token_ids)
            here = logits[first - 1 : len(tokens) - 1]
            differ = answers(here, params, first) != output.token_ids
            gaps = [self.gap(here[n], params, first + n, output.token_ids[n]) for n in np.flatnonzero(differ)]
            if any(gap > self.reference.tau(here) for gap in gaps):
                wrong.append((params, output))
            ties += len(gaps)
        return wrong, ties

    @staticmethod
    def gap(logits, params, position, token):
        """How much larger the logit of `token` would have to be for `token` to be chosen."""
        scale = params.temperature or 1.0
        noise = np.zeros_like(logits)
        if params.temperature > 0:
            key = jax.random.fold_in(jax.random.key(params.seed, impl="threefry2x32"), position)
            noise = np.asarray(jax.random.gumbel(key, logits.shape, logits.dtype))
        # The token has either less than the best of the top tokens, or less than the last of them and is no top token.
        order = np.sort(logits)[::-1]
        mass = np.exp((order - order[0]) / scale)
        kept = int(np.sum(np.cumsum(mass) - mass < params.top_p * mass.sum()))
        last = order[min(kept, params.top_k or kept) - 1]
        best = np.max((logits / scale + noise)[logits >= last]) - (logits / scale + noise)[token]
        return max(float(best) * scale, float(last - logits[token]))


def records(root):
    """Counts the entries of all containers in the host's objects, except those of block pools, which the soak checks."""
    count, seen, todo = 0, set(), [root]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, BlockPool):
            continue
        seen.add(id(x))
        if isinstance(x, dict):
            count += len(x)
            todo += [*x, *x.values()]
        elif isinstance(x, list | tuple | set | frozenset | deque):
            count += len(x)
            todo += x
        elif isinstance(x, types.MethodType):
            todo.append(x.__self__)
        elif type(x).__module__.startswith("mamba_align_jax"):
            todo.append(vars(x) if hasattr(x, "__dict__") else ())
    return count


class PlannedError(Exception):
    """The error that a soak makes a step raise."""


PACKAGE = str(Path(mamba_align_jax.__file__).parent)
# What may raise, as attributes of an engine. "lost" stands for a step that takes the pools with it.
FAILING = ("runner.read", "runner.dispatch", "cache.allocate", "cache.commit", "cache.lookup", "cache.free", "lost")


class Interrupt:
    """Raises KeyboardInterrupt before the line number `turn` of the package that runs within the context."""

    def __init__(self, turn):
        self.left = turn

    def __enter__(self):
        sys.settrace(self.trace)

    def __exit__(self, kind, error, traceback):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self.trace


class Watch:
    """Checks an engine at every step.

    Attributes:
        live: The parameters of each unfinished request, by number.
        wrong: What was wrong.
        leaked: The number of blocks and records that were not returned.
    """

    def __init__(self, engine):
        self.engine, self.live, self.leaked, self.wrong = engine, {}, 0, []
        self.aborted = self.refused = self.stalled = 0
        # Whether something has failed or was interrupted since the last step. The order of requests then changes.
        self.is_disturbed = False
        # What `fail` has made raise: an object and the name of its method.
        self.armed = self, ""
        # Requests that have never run.
        self.new = set()
        # Which request had each prefix, by salt; 0 for several. Only what another request had can be cached for a request.
        self.known = {}
        # Requests that begin again because a step failed before their first result was read. They may hit what their own
        # chunks have published.
        self.again = set()
        # Let everything happen once, so that records that stay for good are there before they are counted.
        self.left = None
        engine.generate([1], SamplingParams(max_tokens=2, stop_token_ids=range(engine.model_config.vocab_size)))
        engine.abort(engine.add_request([1], SamplingParams(max_tokens=1)))
        self.fail()
        engine.add_request([1], SamplingParams(max_tokens=1))
        while engine.has_unfinished:
            engine.step()
        engine.runner.make_sampler()
        self.left = self.rest()

    @property
    def pools(self):
        """The block pools. A step that raises replaces them."""
        return self.engine.cache.states.pool, self.engine.cache.kv.pool

    @property
    def waiting(self):
        return [request.id for request in self.engine.scheduler.waiting]

    def add(self, prompt, params):
        """Adds a request; returns its number, or None if it is refused, which must happen exactly if the queue is full."""
        before, number = self.waiting, None
        try:
            number = self.engine.add_request(prompt, params)
        except QueueFullError:
            self.refused += 1
        else:
            self.live[number] = params
            self.new.add(number)
            self.remember(number, params, prompt)
        max_waiting = self.engine.config.max_waiting
        full = max_waiting is not None and len(self.new.intersection(before)) >= max_waiting
        if full != (number is None) or [other for other in self.waiting if other != number] != before:
            self.wrong.append(f"{before} waited, {number} came, {self.waiting} wait")
        return number

    def abort(self, number):
        """Aborts a request, if it has not finished."""
        try:
            output = self.engine.abort(number)
        except PlannedError:
            # The request goes on.
            return []
        if output is not None:
            self.aborted += 1
        return [] if output is None else self.took([output])

    def fail(self, what="lost"):
        """Makes the next call of something raise, one of `FAILING`."""
        self.spare()
        part, name = ("runner", "read") if what == "lost" else what.split(".")
        self.armed = owner, name = getattr(self.engine, part), name

        def once(*args, **options):
            self.spare()
            self.is_disturbed = True
            if what == "lost":
                for array in jax.tree.leaves(self.engine.runner.device_state):
                    array.delete()
            raise PlannedError

        setattr(owner, name, once)

    def spare(self):
        """Lets the next call succeed, if it has not raised yet."""
        owner, name = self.armed
        vars(owner).pop(name, None)

    def interrupt(self, turn):
        """Interrupts a step at a line; the outputs that it would have returned come later."""
        outputs = []
        with Interrupt(turn):
            outputs = self.engine.step()
        self.is_disturbed = True
        return self.took(outputs) + self.step()

    def crowded_step(self, request, victim):
        """Runs steps while another thread adds a request and aborts one.

        Returns:
            Whether the request was queued, and what `step` returns.
        """
        number, aborted = None, None
        self.spare()

        def disturb():
            nonlocal number, aborted
            try:
                number = self.engine.add_request(*request)
            except QueueFullError:
                self.refused += 1
            aborted = self.engine.abort(victim)

        thread = threading.Thread(target=disturb)
        thread.start()
        outputs = [output for _ in range(3) for output in self.engine.step()]
        thread.join()
        if number is not None:
            prompt, self.live[number] = request
            self.new.add(number)
            self.remember(number, self.live[number], prompt)
        self.aborted += aborted is not None
        served = self.took([*outputs, *([aborted] if aborted else [])])
        self.is_disturbed = True
        return number is not None, served + self.step()

    def step(self):
        """Runs a step; returns the requests that it finished as pairs of (params, output)."""
        rank = {number: (params.priority, number) for number, params in self.live.items()}
        before = set(self.waiting)
        for request in self.engine.scheduler.waiting:
            if request.num_admissions and not request.is_counted:
                self.again.add(request.id)
        served = self.took(self.engine.step())
        if not self.is_disturbed:
            self.check_order(rank, before, set(self.waiting))
        self.is_disturbed = False
        self.new &= {request.id for request in self.engine.scheduler.waiting if request.num_admissions == 0}
        for pool in self.pools:
            self.leaked += abs(len(pool._free) + pool.num_cached + pool.num_held - (pool.num_blocks - 1))
        self.stalled = 0 if served or not rank else self.stalled + 1
        assert self.stalled < 1000, "no request has finished in 1000 steps"
        return served

    def check_order(self, rank, before, waiting):
        """Checks that every request that was admitted ranks before those that wait, and every preempted one after those
        that still run.
        """
        last = lambda numbers: max((rank[number] for number in numbers), default=(-np.inf,))
        first = lambda numbers: min((rank[number] for number in numbers), default=(np.inf,))
        if last(before - waiting) > first(waiting) or last(rank.keys() - waiting) > first(waiting - before):
            self.wrong.append(f"out of turn: {before} waited, {waiting} wait, of {rank}")

    def took(self, outputs):
        """Checks what a caller can tell of finished requests without knowing the model; returns (params, output) of each."""
        served = []
        for output in outputs:
            params, count = self.live.pop(output.request_id), len(output.token_ids)
            cached = output.num_cached_tokens
            stops = [token in params.stop_token_ids for token in output.token_ids]
            reason = "stop" if stops and stops[-1] else "length" if count == params.max_tokens else "abort"
            if isinstance(output.error, PlannedError):
                reason = "error"
            if (
                output.finish_reason != reason
                or any(stops[:-1])
                or count > params.max_tokens
                or cached % self.engine.config.block_size
                or (cached and self.only_own(params, output))
                or cached >= len(output.prompt_token_ids)
                or not logprobs_fit(params, output)
            ):
                self.wrong.append(output)
            self.remember(output.request_id, params, [*output.prompt_token_ids, *output.token_ids])
            served.append((params, output))
        return served

    def rest(self):
        """Checks an engine without requests: all blocks are free, and there are no more records than when it was new.

        Returns:
            The number of records outside the block pools.
        """
        assert not self.engine.has_unfinished
        self.spare()
        self.engine.generate([1], SamplingParams(max_tokens=1))
        self.engine.cache.check()
        for pool in self.pools:
            self.leaked += pool.num_held + max(len(pool._evicted) - pool.num_blocks, 0)
        left = records(self.engine)
        self.leaked += 0 if self.left is None else max(left - self.left, 0)
        return left

    def only_own(self, params, output):
        """Whether a request hit a prefix that no other request had."""
        name = self.known[self.key(params, output.prompt_token_ids[: output.num_cached_tokens])]
        return name == 1 + output.request_id and output.request_id not in self.again

    @staticmethod
    def key(params, tokens):
        return hash((params.cache_salt, tuple(tokens)))

    def remember(self, number, params, tokens):
        size, name = self.engine.config.block_size, 1 + number
        for end in range(size, len(tokens) + 1, size):
            key = self.key(params, tokens[:end])
            self.known[key] = name if self.known.get(key, name) == name else 0


def soak(engine, traffic, judge, count, report=lambda line: None, end=math.inf):
    """Serves `count` requests in bursts and lulls; some are aborted, some steps raise, and the cache is reset at times.

    At `end`, as `time.monotonic` tells the time, no request is added any more.

    Returns:
        A list of what is wrong, and the numbers of requests, of ties, of leaks, of aborted and of refused requests.
    """
    rng, watch, slots = traffic.rng, Watch(engine), engine.config.max_num_seqs
    wrong, ties, added, judged, served, again = [], 0, 0, 0, [], None
    begin = said = time.perf_counter()
    # The largest number of requests at once. Many requests take each other's blocks; few find what others have left.
    crowd = slots
    while added < count or watch.live:
        if time.monotonic() > end:
            count = added
        if not crowd and not watch.live:
            watch.rest()
            crowd = traffic.pick(1, 3, slots, slots, 2 * slots, 2 * slots)
        while added < count and len(watch.live) < crowd and rng.random() < 0.7:
            asked, again = again or traffic.request(), None
            if watch.add(*asked) is None:
                # The refused request is sent again, or dropped.
                again = traffic.pick(asked, None)
                break
            added += 1
            # A lull begins: no request is added until all have finished.
            crowd = 0 if rng.random() < 0.02 else crowd
        done = []
        if watch.live and rng.random() < 0.03:
            # It may be any request: one that waits, one in its prompt or one that decodes.
            done += watch.abort(list(watch.live)[rng.integers(len(watch.live))])
        if rng.random() < 0.001:
            engine.reset_prefix_cache()
        if watch.live and rng.random() < 0.004:
            watch.fail(traffic.pick(*FAILING))
        if watch.live and rng.random() < 0.004:
            done += watch.interrupt(int(rng.integers(1, 3000)))
        if watch.live and added < count and rng.random() < 0.004:
            is_added, more = watch.crowded_step(traffic.request(), list(watch.live)[rng.integers(len(watch.live))])
            added += is_added
            done += more
        if rng.random() < 0.02:
            engine.cache.check()
        done += watch.step()
        for params, output in done:
            traffic.done(params, output)
        served += done
        if len(served) >= 500 or not watch.live:
            verdict, tied = judge(served)
            wrong += verdict
            ties, judged, served = ties + tied, judged + len(served), []
        if time.perf_counter() - said > 5:
            said = time.perf_counter()
            report(f"{judged}/{count} requests, {engine.stats.steps} steps, {said - begin:.0f} s")
    watch.rest()
    assert judged == count, f"{judged} of {count} requests came back"
    return wrong + watch.wrong, judged, ties, watch.leaked, watch.aborted, watch.refused


def logprobs_fit(params, output):
    """Whether an output has the log-probabilities that were asked for, one of each token."""
    own, of_prompt = output.logprobs, output.prompt_logprobs
    own_fit = own is None or [found.token_id for found in own] == list(output.token_ids)
    fit = of_prompt is None or [found.token_id for found in of_prompt[1:]] == list(output.prompt_token_ids[1:])
    lacks = params.prompt_logprobs is not None and of_prompt is None and len(output.token_ids) > 0
    return own_fit and fit and not lacks and (own is None) == (params.logprobs is None)


def shares(count, configs):
    """Yields each configuration under both ways of stepping, with its share of the requests, if it has one."""
    both = [(name + how, options | more) for name, options in configs.items() for how, more in STEPPING.items()]
    for number, (name, options) in enumerate(both):
        share = count * (number + 1) // len(both) - count * number // len(both)
        if share:
            yield name, share, options


def parts(seed, stub, model):
    """Yields (name, number of requests, make) of every configuration. `make` returns its engine, traffic and judge."""
    rng = np.random.default_rng(seed)
    books = [rng.integers(0, VOCAB, 400).tolist() for _ in range(12)]
    speller = Speller(STUTTER, adds=True)
    for name, share, options in shares(stub, STUB_CONFIGS):
        config = EngineConfig(**{**STUB, **options})
        yield (
            f"stub, {name}",
            share,
            lambda config=config, share=share: (
                Engine(speller, config),
                SoakTraffic([seed, share], books, config, True),
                Exactly(),
            ),
        )
    if model:
        bundled = load_model(BYTE_MODEL, "float32")
        text = encode("".join(thing.__doc__ for thing in (argparse.ArgumentParser, SamplingParams, EngineConfig)))
        texts, judge = [text[start:][:400] for start in range(0, 960, 80)], ByReference(bundled)
        for name, share, options in shares(model, MODEL_CONFIGS):
            config = EngineConfig(**{**MODEL, **options})
            yield (
                f"model, {name}",
                share,
                lambda config=config, share=share: (
                    Engine(bundled, config),
                    SoakTraffic([seed, share], texts, config),
                    judge,
                ),
            )


def rounds(options):
    """Yields (seed, name, number of requests, make): one round, or with `--seconds` rounds with further seeds without end.

    With `--seconds` a round begins at another configuration for each seed, so that short rounds reach all of them.
    """
    for seed in itertools.count(options.seed, options.stride) if options.seconds else [options.seed]:
        every = [
            (seed, *part) for part in parts(seed, options.requests, options.model_requests) if options.only in part[0]
        ]
        first = seed % len(every) if options.seconds and every else 0
        yield from every[first:] + every[:first]


def memory():
    """Returns the bytes in use of the host, where Linux says so, and of the device, where it is no CPU."""
    gc.collect()
    statm = Path("/proc/self/statm")
    host = int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else None
    return host, (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000, help="through the stub")
    parser.add_argument("--model-requests", type=int, default=1_000, help="through the bundled model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        default="",
        help="run only the configurations whose names contain this, with their share of the requests",
    )
    parser.add_argument(
        "--seconds", type=float, help="go on with further seeds, and add no request after so many seconds"
    )
    parser.add_argument("--stride", type=int, default=1, help="between the seeds of --seconds; processes share them so")
    parser.add_argument("--json", type=Path, help="append what each configuration has done to this file")
    options = parser.parse_args(arguments)
    logging.disable()
    total, wrong, ties, leaked = 0, 0, 0, 0
    end = time.monotonic() + options.seconds if options.seconds else math.inf
    for seed, name, count, make in rounds(options):
        if time.monotonic() > end:
            break
        begin = time.perf_counter()
        engine, traffic, judge = make()
        poison(engine)
        engine.warmup()
        say = lambda line, name=name: print(f"{name}: {line}", flush=True)
        bad, done, tied, lost, aborted, refused = soak(engine, traffic, judge, count, say, end)
        stats, seconds = engine.stats, time.perf_counter() - begin
        cached = stats.cached_tokens / max(stats.prompt_tokens, 1)
        say(
            f"{done} requests in {seconds:.0f} s, {stats.steps} steps: {len(bad)} wrong, {tied} ties, "
            f"{lost} leaked; {cached:.0%} cached, {stats.preemptions} preemptions, "
            f"{stats.evicted_state_blocks} evictions, {aborted} aborts, {refused} refused, {stats.failed_requests} failed, "
            f"drafts {stats.draft_tokens} accepted {stats.accepted_tokens}, {stats.null_reads} lost states"
        )
        for output in bad[:3]:
            say(f"wrong: {output}")
        lost += stats.null_reads
        total, wrong, ties, leaked = total + done, wrong + len(bad), ties + tied, leaked + lost
        steps = stats.steps
        # Another configuration has other programs, and those of all need more maps of memory than Linux gives a process.
        del engine, traffic, judge, make, stats
        jax.clear_caches()
        host, device = memory()
        if options.json:
            row = dict(seed=seed, name=name, requests=done, steps=steps, seconds=round(seconds, 1))
            row |= dict(wrong=len(bad), ties=tied, leaked=lost, host_bytes=host, device_bytes=device)
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print(f"requests={total} wrong={wrong} ties={ties} leaked={leaked}")
    return int(wrong > 0 or leaked > 0)


if __name__ == "__main__":
    sys.exit(main())
