"""The main job: one workload of shared prefixes and growing conversations, served in every mode and checked."""

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
from mamba_align_jax.engine.engine import Engine
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.request import RequestOutput

MODES: dict[str, dict[str, Any]] = {
    "none": dict(prefix_cache="none"),
    "align/pre_copy": dict(prefix_cache="align", policy="pre_copy"),
    "align/copy_free": dict(prefix_cache="align", policy="copy_free"),
}
CONFIG: dict[str, Any] = dict(
    block_size=64, kv_page_size=16, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=1024
)


@dataclass(frozen=True)
class Run:
    """One mode's row. `identical`: every token is right, ties included; `ties`: how many tokens are."""

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
    """A shared prefix of documentation, as a system prompt would be."""
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


class Workload:
    """Prompts in waves: each wave runs at once, and later ones continue what earlier ones generated."""

    def __init__(self, serve: Callable[[list[list[int]]], list[RequestOutput]]) -> None:
        self._serve = serve
        self.num_waves = 2 + len(_TURNS)

    def run(self) -> Iterator[list[RequestOutput]]:
        """Yields the outputs of each wave."""
        preamble = encode(_preamble())
        # Only what has been computed can be shared: the first request of a prefix runs alone.
        yield self._serve([preamble + encode(_QUESTIONS[0])])
        yield self._serve([preamble + encode(question) for question in _QUESTIONS[1:]])
        talks = [
            encode(f"# Module {name}.\n" + _preamble()[start : start + 160])
            for name, start in zip("abc", (0, 90, 180), strict=True)
        ]
        for turn in _TURNS:
            talks = [talk + encode(turn) for talk in talks]
            outputs = self._serve(talks)
            talks = [talk + list(output.token_ids) for talk, output in zip(talks, outputs, strict=True)]
            yield outputs


def make_engine(model: Any, mode: str) -> Engine:
    """An engine in one of `MODES`."""
    return Engine(model, EngineConfig(**CONFIG, **MODES[mode]))


def sample(engine: Engine) -> tuple[str, str]:
    """The start of a docstring, and how the model goes on."""
    (output,) = engine.generate(encode(_SAMPLE), SamplingParams(max_tokens=200, temperature=0.5, seed=1))
    return _SAMPLE, decode(output.token_ids)


def run_mode(
    engine: Engine, reference: Reference, mode: str, start: Callable[[int], Callable[[], None]]
) -> tuple[Run, int]:
    """Serves the workload in one mode, after compiling; returns the row and the number of requests.

    Args:
        engine: In that mode, fresh, over a float32 model.
        reference: Of the same weights.
        mode: A name in `MODES`.
        start: Takes the number of turns of a progress bar, and returns what to call after each.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    workload = Workload(lambda prompts: engine.generate(prompts, params))
    advance = start(engine.num_programs + workload.num_waves)
    engine.warmup(advance)
    outputs = []
    for wave in workload.run():
        outputs += wave
        advance()
    stats = engine.stats
    verdicts = [reference.judge(output.prompt_token_ids, output.token_ids) for output in outputs]
    return Run(
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


def to_json(runs: list[Run]) -> str:
    """The demo's result as `--json` writes it."""
    return json.dumps({"runs": [asdict(run) for run in runs]}, indent=2) + "\n"
