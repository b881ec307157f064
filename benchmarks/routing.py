"""Simulates eight replicas behind a router: `python -m benchmarks.routing --json FILE`. It runs no model and needs no GPU.

Conversations of the workload `multi_turn`, which begin with one of several system prompts, are served by the schedulers and
caches of eight engines. Only their bookkeeping runs: a step samples tokens that are known beforehand, and all replicas step
at the same time. A router sends each turn to one of the replicas that have a free place:

- "states": to the one from whose states the prompt starts after the most tokens, as `StateRouter` does;
- "pages": to the one that has the most pages of the prompt, which is all that events of KV blocks tell;
- "round_robin": to the next one.

Attainable is what the best of the replicas with a free place would have resumed from, as its cache says. `share` is how much
of that the chosen replicas resumed from.
"""

import argparse
import heapq
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.rows import Row, append
from mamba_align_jax.cache.events import CacheLog
from mamba_align_jax.cache.hybrid import HybridCache
from mamba_align_jax.cache.kv_pages import KVPageManager
from mamba_align_jax.cache.state_blocks import StateBlockManager
from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Scheduler
from mamba_align_jax.load.workloads import MultiTurn, Tokens
from mamba_align_jax.routing import StateRouter

VOCAB = 50_000


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """The load, and what each replica has.

    Attributes:
        workload: The conversations, without system prompts.
        system_prompts: The number of system prompts, which are equally frequent. 0 for none.
        system_tokens: The length of each.
        edits: The share of turns before which the user goes back to the end of an earlier answer.
        pause: The mean number of steps between an answer and the next turn.
        rate: The mean number of conversations that begin in a step.
        num_state_blocks: The size of a replica's pool of states.
        num_kv_pages: The size of its pool of pages.
        block_size: Tokens per state block.
        kv_page_size: Tokens per page.
        max_num_seqs: The number of requests that a replica takes at once.
        max_num_batched_tokens: The number of prompt tokens that it computes in a step.
        replicas: The number of replicas.
        seed: Draws the load, which is the same for all policies.
    """

    workload: MultiTurn = field(
        default_factory=lambda: MultiTurn(conversations=160, turns=8, first=512, turn=128, output=64)
    )
    system_prompts: int = 0
    system_tokens: int = 2048
    edits: float = 0.0
    pause: float = 200.0
    rate: float = 0.2
    num_state_blocks: int = 38
    num_kv_pages: int = 2500
    block_size: int = 256
    kv_page_size: int = 16
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    replicas: int = 8
    seed: int = 0


@dataclass
class _Conversation:
    """What was said up to the end of each answer, and what will be said by the user and by the model.

    `back` is drawn for each turn: whether the user goes back, and how far.
    """

    said: list[Tokens]
    back: list[tuple[float, float]]
    turns: list[Tokens]
    answers: list[Tokens]


class _Replica:
    """The bookkeeping of an engine."""

    def __init__(self, of: Circumstances) -> None:
        self.log = CacheLog()
        states = StateBlockManager(of.num_state_blocks, of.block_size)
        self.cache = HybridCache(states, KVPageManager(of.num_kv_pages, of.kv_page_size), log=self.log)
        self.scheduler = Scheduler(self.cache, of.max_num_seqs, 4, of.max_num_batched_tokens)

    @property
    def load(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting)

    def step(self, answers: dict[int, Tokens]) -> list[Request]:
        """Runs one step and returns the requests that ended in it."""
        plan, ended = self.scheduler.schedule(), []
        self.scheduler.dispatched(plan)
        for row in plan.rows:
            request = row.request
            self.scheduler.finished(row, [answers[request.id][len(request.generated)]] if row.samples else [])
            if len(request.generated) == request.params.max_tokens:
                self.scheduler.remove(request)
                ended.append(request)
        return ended


def _conversations(of: Circumstances) -> list[_Conversation]:
    rng = np.random.default_rng(of.seed)
    draw = lambda size: tuple(rng.integers(0, VOCAB, size).tolist())
    systems = [draw(of.system_tokens) for _ in range(of.system_prompts)] or [()]
    sessions = of.workload.sessions(VOCAB, of.seed)
    return [
        _Conversation(
            said=[systems[rng.integers(len(systems))]],
            back=rng.random((len(turns), 2)).tolist(),
            turns=list(turns),
            answers=[draw(of.workload.output) for _ in turns],
        )
        for turns in sessions
    ]


def _router(policy: str, router: StateRouter[int]) -> Callable[[Tokens, dict[int, int]], int]:
    """Returns what chooses one of the replicas with a free place, which come with their numbers of requests."""
    turn = iter(range(10**9))

    def by_pages(tokens: Tokens, loads: dict[int, int]) -> int:
        reaches = router.reaches(tokens)
        return max(loads, key=lambda replica: (reaches[replica].num_paged_tokens, -loads[replica]))

    def in_turn(tokens: Tokens, loads: dict[int, int]) -> int:
        return list(loads)[next(turn) % len(loads)]

    return {"states": router.choose, "pages": by_pages, "round_robin": in_turn}[policy]


def simulate(of: Circumstances, policy: str) -> Row:
    """Serves all conversations, and returns what was resumed from."""
    replicas = [_Replica(of) for _ in range(of.replicas)]
    router = StateRouter(range(of.replicas), of.kv_page_size)
    choose = _router(policy, router)
    rng = np.random.default_rng(of.seed + 1)
    conversations = _conversations(of)
    begins = np.cumsum(rng.exponential(1 / of.rate, len(conversations)))
    pauses = rng.exponential(of.pause, (len(conversations), of.workload.turns))
    due = [(float(begin), number) for number, begin in enumerate(begins)]
    heapq.heapify(due)
    answers: dict[int, Tokens] = {}
    owner: dict[int, int] = {}
    counts: dict[str, Any] = dict.fromkeys(("attainable_tokens", "reached_tokens", "prompt_tokens", "cached_tokens"), 0)
    counts |= dict(requests=0, moved_turns=0)
    attained: dict[int, int] = {}
    home: dict[int, int] = {}
    step = 0
    while due or answers:
        while due and due[0][0] <= step:
            loads = {n: replica.load for n, replica in enumerate(replicas) if replica.load < of.max_num_seqs}
            if not loads:
                break
            _, number = heapq.heappop(due)
            talk = conversations[number]
            goes_back, how_far = talk.back.pop(0)
            if goes_back < of.edits and len(talk.said) > 2:
                del talk.said[2 + int(how_far * (len(talk.said) - 2)) :]
            prompt = talk.said[-1] + talk.turns.pop(0)
            name, where = counts["requests"], choose(prompt, loads)
            attained[name] = max(replicas[replica].cache.lookup(prompt).length for replica in loads)
            counts["requests"] += 1
            counts["moved_turns"] += home.get(number, where) != where
            home[number], owner[name], answers[name] = where, number, talk.answers.pop(0)
            replicas[where].scheduler.add(Request(name, prompt, SamplingParams(max_tokens=of.workload.output)))
        for place, replica in enumerate(replicas):
            for request in replica.step(answers):
                number = owner.pop(request.id)
                talk = conversations[number]
                talk.said.append(request.prompt + answers.pop(request.id))
                if talk.turns:
                    heapq.heappush(due, (step + float(pauses[number, len(talk.turns)]), number))
                best = attained.pop(request.id)
                counts["attainable_tokens"] += best
                counts["reached_tokens"] += min(best, request.num_cached)
                counts["prompt_tokens"] += len(request.prompt)
                counts["cached_tokens"] += request.num_cached
            router.apply(place, replica.log.pending)
            replica.log.pending.clear()
        step += 1
    return counts | {
        "steps": step,
        "share": counts["reached_tokens"] / max(counts["attainable_tokens"], 1),
        "cached_share": counts["cached_tokens"] / counts["prompt_tokens"],
    }


_SYSTEM = Circumstances(system_prompts=16, system_tokens=1024, rate=0.4)
# The pools are in the proportion of 300 states and 20,000 pages for 64 requests, which one H200 has left beside the weights
# of Qwen3.5-35B-A3B.
CASES = {
    "conversations": Circumstances(),
    "edited conversations": Circumstances(edits=0.3),
    "system prompts": _SYSTEM,
    "system prompts, four times the pages": replace(_SYSTEM, num_kv_pages=10_000),
    "system prompts, four times the pages and states": replace(_SYSTEM, num_kv_pages=10_000, num_state_blocks=152),
}
POLICIES = ("states", "pages", "round_robin")


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs all cases under all policies, and returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="append the rows to FILE")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    rows = []
    for case in options.case or CASES:
        for policy in POLICIES:
            of = CASES[case]
            row: Row = {"case": case, "routing": policy, "commit": options.commit}
            row |= simulate(of, policy) | {name: value for name, value in asdict(of).items() if name != "workload"}
            row |= asdict(of.workload)
            append(options.json, row)
            rows.append(row)
            print(
                f"{case} | {policy}: {row['share']:.3f} of attainable, {row['cached_share']:.3f} of prompts cached, "
                f"{row['moved_turns']} of {row['requests']} turns at another replica than before",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    main()
