"""Times the host's part of a step: `python -m benchmarks.host --json FILE`. It needs no GPU.

An engine with asynchronous stepping serves requests whose steps are nearly free on the device: the step returns token 1
for every row. So a step's time is the time that the host needs to plan it, to pack and dispatch it, and to read and
record the result of the step before. The step takes as many parameters as a model of 32 layers has, because a call's
time grows with the number of its arrays.

Cases "host admit N of R" replace N of R running requests by N that share a cached prefix of 4096 tokens with them.
`add_us` is the time of the calls that add these, and `step_us` that of the step that admits them. The other requests
wait for both.
"""

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.random_model import TINY, random_model
from benchmarks.rows import Row, append, facts
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.device import runner
from mamba_align_jax.engine.device.packed import Packed, pack
from mamba_align_jax.engine.device.program import DeviceState, StepResult
from mamba_align_jax.engine.running.engine import Engine

_NUM_PARAMETERS = 400
# Tokens of the prefix that admitted requests share, and of the rest of their prompts.
_PREFIX, _REST = 4096, 128
# Requests that run while others are admitted.
_ROWS = 16
_ANSWER = SamplingParams(max_tokens=3900, ignore_eos=True)
_STATIC = ("graph", "align", "drafter", "num_decode_rows", "layout")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("device_state",))
def instant_step(
    params: Any, inputs: Packed, device_state: DeviceState, sampler: None, mailboxes: None, **static: Any
) -> tuple[Packed, DeviceState, None]:
    """Takes and returns what `run_step` does, but runs no model: every row that samples gets token 1."""
    align = static["align"]
    counts = inputs.unpack().samples.astype(jnp.int32)
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    result = StepResult(
        tokens=jnp.ones((counts.shape[0], align.window), jnp.int32),
        counts=counts,
        drafts=zeros(counts.shape[0]),
        copies=zeros((2, len(align.groups))),
        null_reads=zeros(()),
    )
    return pack(result), device_state, sampler


def make_engine(rows: int, drafts: int = 0, prompts: Iterable[list[int]] = ()) -> Engine:
    """Makes an engine with `rows` requests in the middle of their answers, to the first of `prompts` or to short ones."""
    config = EngineConfig(
        prefix_cache="align",
        async_stepping=True,
        block_size=512,
        kv_page_size=16,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_model_len=2 * _PREFIX,
        num_speculative_tokens=drafts,
    )
    engine = Engine(random_model(TINY), config)
    engine.runner.params = [jnp.zeros(8)] * _NUM_PARAMETERS
    short = ([1 + number % 500] * 100 for number in range(rows))
    for prompt in itertools.islice(itertools.chain(prompts, short), rows):
        engine.add_request(prompt, _ANSWER)
    while any(request.is_prefilling for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


def time_admissions(count: int, rows: int, drafts: int, times: int) -> Row:
    """Returns the median times, in microseconds, of adding `count` requests and of the step that admits them."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(1, 500, _PREFIX).tolist()
    prompts = (prefix + rng.integers(1, 500, _REST).tolist() for _ in itertools.count())
    engine = make_engine(rows, drafts, prompts)
    adding, stepping = [], []
    for _ in range(times):
        for request in engine.scheduler.running[:count]:
            engine.abort(request.id)
        own = list(itertools.islice(prompts, count))
        # What was aborted still has a row in a step that is unread.
        for _ in range(3):
            engine.step()
        begin = time.perf_counter()
        for prompt in own:
            engine.add_request(prompt, _ANSWER)
        between = time.perf_counter()
        engine.step()
        stepping.append(time.perf_counter() - between)
        adding.append(between - begin)
        while any(request.is_prefilling for request in engine.scheduler.running):
            engine.step()
    return {"add_us": _micros(adding), "step_us": _micros(stepping)}


def _micros(seconds: list[float]) -> float:
    return round(1e6 * statistics.median(seconds), 1)


def time_steps(engine: Engine, steps: int) -> Row:
    """Returns the median time of a step, how much of it the engine's thread is busy, and the median times of its parts.

    All are microseconds.
    """
    parts = {"plan": (engine.scheduler, "schedule"), "dispatch": (engine.runner, "dispatch")}
    parts |= {"note": (engine.scheduler, "dispatched"), "read": (engine.core, "_read")}
    times: dict[str, list[float]] = {name: [] for name in parts}

    def timed(function: Any, spent: list[float]) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = function(*arguments, **options)
            spent.append(time.perf_counter() - begin)
            return result

        return call

    for _ in range(20):
        engine.step()
    whole, busy = [], []
    for _ in range(steps):
        begin, begin_busy = time.perf_counter(), time.thread_time()
        engine.step()
        whole.append(time.perf_counter() - begin)
        busy.append(time.thread_time() - begin_busy)
    for name, (owner, method) in parts.items():
        setattr(owner, method, timed(getattr(owner, method), times[name]))
    for _ in range(steps):
        engine.step()
    parts_us = {f"{name}_us": _micros(spent) for name, spent in times.items()}
    return {"step_us": _micros(whole), "busy_us": _micros(busy)} | parts_us


def _measure(options: argparse.Namespace) -> Iterator[Row]:
    drafts = {"drafts": options.drafts}
    for count in options.rows or [1, 16, 64, 256]:
        times = time_steps(make_engine(count, options.drafts), options.steps)
        yield {"case": f"host decode {count}", "rows": count} | drafts | times
    for count in options.admit or [1, 4]:
        times = time_admissions(count, _ROWS, options.drafts, options.steps)
        yield {"case": f"host admit {count} of {_ROWS}", "rows": _ROWS} | drafts | times


def main(arguments: list[str] | None = None) -> list[Row]:
    """Times engines of the sizes that the options ask for, and returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", help="decode rows; default: 1, 16, 64 and 256")
    parser.add_argument("--admit", type=int, action="append", help="admitted requests of 16; default: 1 and 4")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200, help="steps, or admissions, that are timed")
    parser.add_argument("--json", metavar="FILE", help="append a JSON row to FILE for each number of rows")
    parser.add_argument("--commit", default="unknown", help="the commit that rows name")
    options = parser.parse_args(arguments)
    rows, real = [], runner.run_step
    runner.run_step = instant_step
    try:
        for row in _measure(options):
            print(row, flush=True)
            rows.append(row | facts(options.commit))
            append(options.json, rows[-1])
    finally:
        runner.run_step = real
    return rows


if __name__ == "__main__":
    main()
