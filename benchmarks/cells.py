"""Names the cells of the serving benchmark: each is a workload, a loop, a mode, and a way of drafting."""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import Row
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.engine.device.sizing import align_config
from mamba_align_jax.load.bench import COMPARED_MODES, MODES
from mamba_align_jax.load.workloads import Agents, ClosedLoop, Loop, MultiTurn, OpenLoop, PrefixRepetition, Workload

# Guesses of seconds for the large model on an H200, so that a run's length is known before it starts: a decode step of 16
# rows per generated token, by what drafts; the time that each prompt token adds; and compiling one engine's programs.
_STEP_S = {"none": 6.2e-3, "prompt_lookup": 3.5e-3, "mtp": 1e-2}
_PROMPT_TOKEN_S = 2.3e-5
COMPILE_S = 40.0


@dataclass(frozen=True)
class Cell:
    """One thing to measure.

    Attributes:
        workload: What is sent.
        loop: When it is sent.
        mode: A name in `MODES`.
        speculation: What drafts: "prompt_lookup", "mtp" or "none".
        num_drafts: The number of draft tokens in each step.
    """

    workload: Workload
    loop: Loop
    mode: str
    speculation: str
    num_drafts: int

    @property
    def engine(self) -> str:
        """The name of its engine. Cells with equal names can use one engine."""
        return f"{self.mode} {self.speculation} K{self.num_drafts}" if self.num_drafts else f"{self.mode} K0"

    @property
    def name(self) -> str:
        """The cell's part of "case" in its rows of results; how the engine steps follows it."""
        return f"{self.workload.name} x{self._num_requests} {self.loop.name} {self.engine}"

    @property
    def _num_requests(self) -> int:
        of = self.workload
        if isinstance(of, PrefixRepetition):
            return of.prompts
        return of.turns * (of.agents if isinstance(of, Agents) else of.conversations)

    @property
    def sizes(self) -> Row:
        """The sizes of its workload and loop, for its rows of results."""
        return load_sizes(self.workload, self.loop)

    @property
    def guess_s(self) -> float:
        """About how many seconds one run of the large model takes on an H200, without compiling."""
        requests, turns, step = self._num_requests, 1, _STEP_S[self.speculation]
        if isinstance(self.workload, PrefixRepetition):
            cached = 0 if self.mode == "none" else self.workload.prefix
            tokens = self.workload.prefix + self.workload.suffix - cached
        else:
            turns = self.workload.turns
            new = self.workload.turn + (
                self.workload.answer if isinstance(self.workload, Agents) else self.workload.output
            )
            tokens = self.workload.longest / 2 if self.mode == "none" else new
        busy = requests * (self.workload.output / 16 * step + tokens * _PROMPT_TOKEN_S)
        if isinstance(self.loop, ClosedLoop):
            return busy
        return max(busy, requests / turns / self.loop.rate + turns * self.workload.output * step)


def load_sizes(workload: Workload, loop: Loop) -> Row:
    """Returns the sizes of a workload and a loop, for rows of results."""
    fields = vars(workload) | vars(loop)
    return {name: value for name, value in fields.items() if name not in ("name", "seed")}


def loads(options: argparse.Namespace) -> list[tuple[Workload, Loop]]:
    """Returns the workloads that the options of the serving benchmark ask for, each with each loop."""
    workloads: dict[str, Workload] = {
        "prefix_repetition": PrefixRepetition(
            prefix=options.prefix, suffix=options.suffix, output=options.output, prefixes=options.prefixes,
            prompts=options.prompts,
        ),
        "multi_turn": MultiTurn(
            conversations=options.conversations, turns=options.turns, first=options.first, turn=options.turn,
            output=options.turn_output,
        ),
        "agents": Agents(
            agents=options.agents, turns=options.agent_turns, tools=options.tools, turn=options.agent_turn,
            reasoning=options.reasoning, answer=options.answer,
        ),
    }  # fmt: skip
    loops = {"closed": ClosedLoop(options.concurrency), "open": OpenLoop(options.rate, options.seed)}
    return [
        (workloads[workload], loops[loop])
        for workload in options.workload or ["prefix_repetition"]
        for loop in options.loop or ["closed"]
    ]


def cells(options: argparse.Namespace) -> Iterator[Cell]:
    """Yields the cells that the options of the serving benchmark ask for.

    Cells that draft in the same way follow each other; among them the mode changes first.
    """
    modes = options.mode or list(COMPARED_MODES)
    for num_drafts in options.drafts or [0]:
        for speculation in (options.speculation or ["prompt_lookup"]) if num_drafts else ["none"]:
            for workload, loop in loads(options):
                yield from (Cell(workload, loop, mode, speculation, num_drafts) for mode in modes)


def engine_config(options: argparse.Namespace, cell: Cell, model: Any, longest: int) -> EngineConfig:
    """Returns the configuration of a cell's engine.

    All sizes depend on the options and on `longest` alone, so cells with one mode and one way of drafting share programs.
    The state pool holds what the running requests need and four more blocks for each, of which a request keeps two. The KV
    pool holds three times the pages of the running requests. Shared prefixes are used all the time and stay cached; the
    least recently used of the rest are evicted.

    Args:
        options: The options of the serving benchmark.
        cell: The cell.
        model: The model that the engine will serve.
        longest: The number of tokens of the longest sequence of any cell.
    """
    fields: dict[str, Any] = MODES[cell.mode] | dict(
        block_size=options.block_size,
        kv_page_size=options.kv_page_size,
        max_model_len=longest,
        max_num_seqs=options.concurrency,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_rows=options.max_prefill_rows,
        async_stepping=options.stepping == "async",
        num_speculative_tokens=cell.num_drafts,
        num_kv_pages=1 + 3 * options.concurrency * math.ceil(longest / options.kv_page_size),
    )  # fmt: skip
    if cell.num_drafts:
        fields["speculation"] = cell.speculation
    config = EngineConfig(**fields)
    held = align_config(config, model).blocks_per_request(
        config.steps_in_flight, max_chunk=config.max_num_batched_tokens
    )
    return EngineConfig(**fields, num_state_blocks=1 + options.concurrency * (held + 4))
