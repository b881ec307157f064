"""A fake server in mode "all". Its blocks hold tokens instead of numbers, so it notices a wrong state."""

import collections
import itertools
import random
from dataclasses import dataclass, field

import jax
import numpy as np
from oracles.tokens import Pool, Row, last_inputs
from vllm_compat.rows import SLOTS, WIDTH, Batch, Scheduled, make_spec

from mamba_align_jax.align.interior import prefill_checkpoints
from mamba_align_jax.vllm_compat.mamba_utils import cleanup_mamba_state_idx, gather_state_indices, postprocess_mamba
from mamba_align_jax.vllm_compat.staging import AcceptedTokens


@dataclass(eq=False)
class Request:
    """A running request. `prompt` is what prefill runs, `computed` what has run, `held` its blocks by column."""

    req_id: str
    slot: int
    prompt: tuple
    computed: tuple = ()
    held: dict = field(default_factory=dict)


class Server:
    """A simple random scheduler over one pool. It reads each result before it makes the next step."""

    def __init__(self, align, num_blocks, rng):
        self.align, self.rng, self.size, self.num_blocks = align, rng, align.state_block_size, num_blocks
        self.K, self.bs = align.num_speculative_tokens, align.block_size
        self.pool = Pool(num_blocks, WIDTH, self.K, self.size)
        self.free = list(range(1, num_blocks))
        self.cached = {}
        self.running, self.waiting = [], []
        self.tables = np.zeros((2, align.max_num_seqs, align.num_columns), np.int32)
        self.tokens, self.ids = itertools.count(), itertools.count()
        self.events = collections.Counter()

    def fresh(self, n):
        return tuple(itertools.islice(self.tokens, n))

    def enter(self, req_id, prompt):
        """Starts a request on the longest cached prefix of its prompt. Old entries of the slot's block row stay."""
        slot = min(set(range(self.align.max_num_seqs)) - {request.slot for request in self.running})
        request = Request(req_id, slot, prompt)
        for block, tokens in self.cached.items():
            if len(request.computed) < len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens:
                request.computed, request.held = tokens, {len(tokens) // self.size - 1: block}
        self.events["prefix hits"] += bool(request.held)
        self.running.append(request)
        self.write_tables(request)

    def write_tables(self, request):
        for column, block in request.held.items():
            self.tables[:, request.slot, column] = block, self.num_blocks - block

    def let_go(self, request, columns):
        for column in columns:
            block = request.held.pop(column)
            if block not in self.cached and not any(block in other.held.values() for other in self.running):
                self.free.append(block)
                self.pool.scribble(block)

    def leave(self, request):
        self.let_go(request, list(request.held))
        self.running.remove(request)

    def schedule(self):
        """Ends, preempts, resumes and starts some requests."""
        rng, finished, preempted, resumed = self.rng, [], [], []
        for request in list(self.running):
            full = len(request.computed) + 1 >= self.align.max_model_len
            if full or rng.random() < 0.03:
                self.leave(request)
                finished.append(request.req_id)
            elif rng.random() < 0.06:
                self.leave(request)
                again = request.computed + request.prompt[len(request.computed) :]
                # A resumed request need not have been listed as preempted.
                if rng.random() < 0.5:
                    preempted.append(request.req_id)
                self.waiting.append((request.req_id, again or self.fresh(1)))
                self.events["preempted"] += 1
        rng.shuffle(self.waiting)
        while len(self.running) < self.align.max_num_seqs and rng.random() < 0.6:
            if self.waiting and rng.random() < 0.5:
                req_id, prompt = self.waiting.pop()
                resumed.append(req_id)
            else:
                shared = rng.choice([(), *self.cached.values()])[: self.align.max_model_len - 2]
                room = self.align.max_model_len - 1 - len(shared)
                prompt = shared + self.fresh(rng.randint(1, min(room, 3 * self.bs + 2)))
                req_id = f"r{next(self.ids)}"
            self.enter(req_id, prompt)
        return Scheduled(finished, preempted or None, resumed)

    def row(self, request):
        """Chooses what a request runs in this step."""
        rng, start = self.rng, len(request.computed)
        room = self.align.max_model_len - start
        if rng.random() < 0.15 or room == 0:
            return Row(request.slot, request.computed, (), rng.randint(-1, self.K), held=request.held)
        if start >= len(request.prompt) and rng.random() < 0.1:
            # The next turn of a conversation is a prefill chunk after a verify step.
            request.prompt = request.computed + self.fresh(rng.randint(1, min(room, 2 * self.bs)))
        inputs, drafts, accepted = request.prompt[start:], -1, 1
        if inputs:
            to_boundary = rng.randint(1, 3) * self.bs - start % self.bs
            inputs = inputs[: min(room, rng.choice([to_boundary, rng.randint(1, 2 * self.bs)]))]
        else:
            drafts, inputs = (self.K, self.fresh(1 + self.K)) if room > self.K else (-1, self.fresh(1))
        if drafts >= 0:
            accepted = rng.choice([1, 1 + drafts, rng.randint(1, 1 + drafts)])
        return Row(request.slot, request.computed, inputs, drafts, accepted, request.held)

    def allocate(self, row):
        computed, q = len(row.before), len(row.inputs)
        last = (computed + q - 1) // self.size + (self.K if row.drafts >= 0 else 0)
        wanted = range(computed // self.size, last + 1)
        new = {column: self.free.pop() for column in wanted if column not in row.held}
        row.held.update(new)

    def step(self):
        """Chooses the requests of the batch, and their rows."""
        requests = [request for request in self.running if self.rng.random() < 0.9]
        self.rng.shuffle(requests)
        rows = [self.row(request) for request in requests]
        for request, row in zip(requests, rows, strict=True):
            if row.inputs:
                self.allocate(row)
                self.write_tables(request)
        return requests, rows

    def batch(self, requests, rows):
        return Batch(
            [request.req_id for request in requests],
            [len(row.before) for row in rows],
            [len(row.inputs) for row in rows],
            [row.drafts for row in rows],
            self.tables[:, [row.slot for row in rows]].copy(),
        )

    def finish(self, requests, rows):
        for request, row in zip(requests, rows, strict=True):
            if row.inputs:
                # These columns are released one step late, because the live state may have been there until now.
                self.let_go(request, [c for c in request.held if c < len(row.before) // self.size])
                request.computed = row.after
                self.publish(request, row)
        held = {block for request in self.running for block in request.held.values()}
        for block in self.rng.sample(sorted(self.cached.keys() - held), max(0, len(self.cached.keys() - held) - 6)):
            del self.cached[block]
            self.free.append(block)
            self.pool.scribble(block)

    def boundaries(self, row):
        """Returns the boundaries at which the row leaves a state that other requests may continue."""
        return [b for b in range(len(row.before) + 1, len(row.after) + 1) if b % self.size == 0 and row.drafts < 0]

    def publish(self, request, row):
        for boundary in self.boundaries(row):
            prefix = row.after[:boundary]
            if self.rng.random() < 0.6 and prefix not in self.cached.values():
                self.cached[request.held[boundary // self.size - 1]] = prefix


def mirrored(tree, num_blocks):
    """Checks that the block ids of the second group are those of the first group, mirrored."""
    for array in jax.tree.leaves(tree):
        if array.ndim > 1:
            np.testing.assert_array_equal(array[1], np.where(array[0] > 0, num_blocks - array[0], 0))


def run_all(block_size, K, steps):
    """Runs random steps through the host path, checks each, and returns how often each special case occurred."""
    rng = random.Random(f"{block_size} {K} all")
    align = make_spec(block_size, K, "all")
    server = Server(align, 1 + SLOTS * (K + 9) + 60, rng)
    state_idx, counts, events, pool = {}, AcceptedTokens(), server.events, server.pool
    for _ in range(steps):
        scheduled = server.schedule()
        requests, rows = server.step()
        batch = server.batch(requests, rows)
        cleanup_mamba_state_idx(scheduled, state_idx)
        accepted = counts.reorder(scheduled, batch.req_ids)
        indices = gather_state_indices(align, batch, state_idx, accepted, SLOTS)
        mirrored(indices, server.num_blocks)
        holders = collections.Counter(block for request in server.running for block in request.held.values())
        pool.start(rows, holders, server.cached)
        pool.forward(indices)
        for r, row in enumerate(rows):
            if row.drafts < 0:
                kept = prefill_checkpoints(len(row.before), len(row.inputs), block_size, batch.block_rows[0][r])
                for offset, block in zip(*kept, strict=True):
                    pool.check_write(block, r)
                    tokens = row.before + row.inputs[:offset]
                    pool.recurrent[block] = tokens
                    pool.conv[block] = last_inputs(tokens, WIDTH) + pool.conv[block][WIDTH - 1 :]
                events["interior"] += len(kept[0])
                events["chunk after verify"] += bool(row.inputs) and accepted[r] > 1
            else:
                events["anchored"] += requests[r].req_id in state_idx and accepted[r] > 1
        published = [max(server.boundaries(row), default=0) for row in rows]
        plan, accepted = postprocess_mamba(align, batch, state_idx, [row.accepted for row in rows], published)
        assert plan.is_empty
        counts.expect(batch.req_ids, accepted)
        server.finish(requests, rows)
    return events
