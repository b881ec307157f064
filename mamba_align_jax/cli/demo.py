"""Serves the demo's requests in every compared mode, measures them, and checks every token.

The requests share a prefix or continue a conversation, so that a prefix cache has something to return.
"""

import argparse
import heapq
import json
import statistics
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mamba_align_jax.data import decode, encode
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.running.engine import Engine
from mamba_align_jax.engine.scheduling.buckets import programs_of
from mamba_align_jax.engine.scheduling.request import RequestOutput
from mamba_align_jax.load.bench import COMPARED_MODES

CONFIG: dict[str, Any] = dict(
    block_size=64, kv_page_size=16, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=1024
)


@dataclass(frozen=True)
class ModeResult:
    """What was measured in one mode.

    Attributes:
        mode: A name in `COMPARED_MODES`.
        prompt_tokens: The tokens of all prompts.
        cached_tokens: How many of them came from the cache.
        prefill_tokens: How many of them were computed.
        ttft_ms: The mean time to a request's first token, in milliseconds.
        tpot_ms: The mean time per token after the first, in milliseconds.
        state_bytes_copied: The bytes of states that the engine copied.
        identical: True if every token is the reference's choice, or ties with it.
        ties: How many tokens differ from the reference's choice by no more than rounding.
    """

    mode: str
    prompt_tokens: int
    cached_tokens: int
    prefill_tokens: int
    ttft_ms: float
    tpot_ms: float
    state_bytes_copied: int
    identical: bool
    ties: int


def _preamble() -> str:
    """A shared prefix of documentation, which stands for a system prompt."""
    docs = [argparse.ArgumentParser.__doc__, json.dumps.__doc__, heapq.merge.__doc__, textwrap.fill.__doc__]
    return "\n".join(textwrap.dedent(doc or "") for doc in docs)[:448]


_QUESTIONS = (
    "def read(path):\n",
    "class Node:\n",
    "import os\n",
    "def main():\n",
    "# Returns the",
    "def parse(",
    "if name",
)
_TURNS = (
    'def parse(text):\n    """Parse a configuration file and return ',
    '\n\ndef write(text, path):\n    """Write the text to ',
    '\n\nclass Reader:\n    """Read lines from the given ',
    "\n\n    def close(self):\n        ",
)


_SAMPLE = 'def split_lines(text):\n    """Return a list of '


def _waves(serve: Callable[[list[list[int]]], list[RequestOutput]]) -> Iterator[list[RequestOutput]]:
    """Yields the outputs of the demo's prompts, wave after wave. Later waves continue earlier answers.

    `serve` returns the outputs of the prompts of one wave, which run together.
    """
    preamble = encode(_preamble())
    # A prefix can be shared once it has been computed, so the first request with it runs alone.
    yield serve([preamble + encode(_QUESTIONS[0])])
    yield serve([preamble + encode(question) for question in _QUESTIONS[1:]])
    talks = [
        encode(f"# Module {name}.\n" + _preamble()[start : start + 160])
        for name, start in zip("abc", (0, 90, 180), strict=True)
    ]
    for turn in _TURNS:
        talks = [talk + encode(turn) for talk in talks]
        outputs = serve(talks)
        talks = [talk + list(output.token_ids) for talk, output in zip(talks, outputs, strict=True)]
        yield outputs


def make_engine(model: Any, mode: str) -> Engine:
    """Makes an engine over a loaded model, in one of `COMPARED_MODES`."""
    return Engine(model, EngineConfig(**CONFIG, **COMPARED_MODES[mode]))


def sample(engine: Engine) -> tuple[str, str]:
    """Returns the start of a docstring, and how the model continues it."""
    (output,) = engine.generate(encode(_SAMPLE), SamplingParams(max_tokens=200, temperature=0.5, seed=1))
    return _SAMPLE, decode(output.token_ids)


def run_mode(
    engine: Engine, reference: Reference, mode: str, start: Callable[[int], Callable[[], None]]
) -> tuple[ModeResult, int]:
    """Compiles the engine, serves the demo's requests and checks them. Returns what was measured and the number of requests.

    The engine is a new one in that mode, over a float32 model, and the reference has the same weights. `start` starts a
    progress bar: it takes the number of turns, and returns the function to call after each turn.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    num_programs, num_waves = len(programs_of(engine.runner.buckets, draws=False)), 2 + len(_TURNS)
    progress = start(num_programs + num_waves)
    engine.warmup(progress, draws=False)
    outputs = []
    for wave in _waves(lambda prompts: engine.generate(prompts, params)):
        outputs += wave
        progress()
    stats = engine.stats
    verdicts = [reference.judge(output.prompt_token_ids, output.token_ids) for output in outputs]
    return ModeResult(
        mode=mode,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        prefill_tokens=stats.prefill_tokens,
        ttft_ms=1e3 * statistics.mean(output.ttft_s for output in outputs if output.ttft_s is not None),
        tpot_ms=1e3 * statistics.mean(output.tpot_s for output in outputs if output.tpot_s is not None),
        state_bytes_copied=stats.state_bytes_copied,
        identical=all(verdict.right for verdict in verdicts),
        ties=sum(verdict.ties for verdict in verdicts),
    ), len(outputs)


def to_json(results: list[ModeResult]) -> str:
    """Returns the demo's results in the form that `--json` writes."""
    return json.dumps({"runs": [asdict(result) for result in results]}, indent=2) + "\n"
