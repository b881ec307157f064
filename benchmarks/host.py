"""Times the host's part of a step: `python -m benchmarks.host --json FILE`. It needs no GPU.

An engine with asynchronous stepping serves requests whose steps are nearly free on the device: the step returns token 1
for every row. So a step's time is the time that the host needs to plan it, to pack and dispatch it, and to read and
record the result of the step before. The step takes as many parameters as a model of 32 layers has, because a call's
time grows with the number of its arrays.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from mamba_align_jax.engine import runner
from mamba_align_jax.engine.config import EngineConfig, SamplingParams
from mamba_align_jax.engine.engine import Engine
from mamba_align_jax.engine.packed import Packed, pack
from mamba_align_jax.engine.program import DeviceState, StepResult
from mamba_align_jax.load.random_model import TINY, random_model
from mamba_align_jax.load.rows import Row, append, facts

_NUM_PARAMETERS = 400
_STATIC = ("graph", "spec", "drafter", "num_decode_rows", "layout")


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames=("device_state",))
def instant_step(
    params: Any, inputs: Packed, device_state: DeviceState, sampler: None, mailboxes: None, **static: Any
) -> tuple[Packed, DeviceState, None]:
    """Takes and returns what `run_step` does, but runs no model: every row that samples gets token 1."""
    spec = static["spec"]
    counts = inputs.unpack().samples.astype(jnp.int32)
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    result = StepResult(
        tokens=jnp.ones((counts.shape[0], spec.window), jnp.int32),
        counts=counts,
        drafts=zeros(counts.shape[0]),
        copies=zeros((2, len(spec.groups))),
        null_reads=zeros(()),
    )
    return pack(result), device_state, sampler


def make_engine(rows: int, drafts: int = 0) -> Engine:
    """Makes an engine with `rows` requests in the middle of their answers."""
    config = EngineConfig(
        async_stepping=True,
        block_size=512,
        max_num_seqs=rows,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        num_speculative_tokens=drafts,
    )
    engine = Engine(random_model(TINY), config)
    engine.runner.params = [jnp.zeros(8)] * _NUM_PARAMETERS
    prompts = ([1 + number % 500] * 100 for number in range(rows))
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(max_tokens=3900, ignore_eos=True))
    while any(request.is_prefilling for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    return engine


def time_steps(engine: Engine, steps: int) -> Row:
    """Returns the median time of a step, how much of it the engine's thread is busy, and the median times of its parts.

    All are microseconds.
    """
    parts = {"plan": (engine.scheduler, "schedule"), "dispatch": (engine.runner, "dispatch")}
    parts |= {"note": (engine.scheduler, "dispatched"), "read": (engine, "_read")}
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
    micros = lambda values: round(1e6 * statistics.median(values), 1)
    return {"step_us": micros(whole), "busy_us": micros(busy)} | {
        f"{name}_us": micros(spent) for name, spent in times.items()
    }


def main(arguments: list[str] | None = None) -> list[Row]:
    """Times engines of the sizes that the options ask for, and returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, action="append", help="decode rows; default: 1, 16, 64 and 256")
    parser.add_argument("--drafts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", metavar="FILE", help="append a JSON row to FILE for each number of rows")
    parser.add_argument("--commit", default="unknown", help="the commit that rows name")
    options = parser.parse_args(arguments)
    rows, real = [], runner.run_step
    runner.run_step = instant_step
    try:
        for count in options.rows or [1, 16, 64, 256]:
            engine = make_engine(count, options.drafts)
            row = {"case": f"host decode {count}", "rows": count, "drafts": options.drafts}
            row |= time_steps(engine, options.steps)
            print(row, flush=True)
            rows.append(row | facts(options.commit))
            append(options.json, rows[-1])
    finally:
        runner.run_step = real
    return rows


if __name__ == "__main__":
    main()
