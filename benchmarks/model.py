"""Times a whole model beside its floor: `python -m benchmarks.model --json benchmarks/results/model.jsonl`.

A decode or verify case keeps `rows` requests of `context` tokens running in an engine and times the engine's own steps, with
the host and asynchronously. Of a verify row's drafts, each number from none to all is right equally often (`scripted.py`). A
prompt case times a request from its arrival at an idle engine to its first token. The weights are random, in the shapes of a
published model. Cases share one engine configuration, except for the number of drafts. Names of cases of a model with
experts begin with "moe". Requests take their most likely token, and draw it in cases whose names end with "drawn". For the
floor, see `model_floor.py`.

A row of a decode or verify case also says how long the host takes to start a step's program, `start_us`, and how long it
waits for the step before, `wait_us`. If it hardly waits, the host is slower than the devices. Steps over several devices
take longer in the first tenths of a second after the prompts were read. So others come before those that are timed, and the
prompts are shorter by as many tokens as these generate. The median of the first ones is `first_step_us`.
"""

import argparse
import contextlib
import functools
import inspect
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.cases import cases_named
from benchmarks.model_floor import Case, Ring, floor_us
from benchmarks.random_model import MODELS, random_model
from benchmarks.rows import Row, append, facts
from benchmarks.scripted import ScriptedDrafter, ScriptedModel
from benchmarks.timing import copy_bandwidth, kernel_times
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.engine.device import runner
from mamba_align_jax.layers.moe import Experts, SharedExpertMoE
from mamba_align_jax.load.runs import free_pools
from mamba_align_jax.models.qwen3_5 import Config
from mamba_align_jax.sharding import AXIS
from pallas_kernels import choose_experts

# The pools hold 256 requests of 4096 tokens with their states, and little more.
CONFIGURATION: dict[str, Any] = dict(
    prefix_cache="all", block_size=512, kv_page_size=64, max_num_batched_tokens=8192, max_num_seqs=256,
    max_model_len=140000, async_stepping=True, num_state_blocks=1000, num_kv_pages=18000,
)  # fmt: skip
# How Qwen's models are meant to be sampled.
DRAWS: dict[str, Any] = dict(temperature=0.7, top_k=20, top_p=0.8)
STEPS = 32  # of which the median is taken
WARM_UP = 160  # steps before these, the first ones included
LONGEST = 15  # kernels that a row lists


CASES = (
    *(Case("decode", rows, 4096) for rows in (1, 5, 8, 16, 20, 64, 65, 256)),
    *(Case("decode", rows, 32768) for rows in (1, 16)),
    *(Case("decode", rows, 4096, draws=True) for rows in (1, 16, 64)),
    *(Case("verify", rows, 4096, drafts=3) for rows in (16, 64)),
    *(Case("prompt", 1, context) for context in (512, 4096, 32768, 131072)),
)


def ring_of(engine: Engine, case: Case, tokens_per_row: float) -> Ring | None:
    """Returns what the rows of an engine keep, or None unless its policy is "deferred"."""
    align = engine.align
    if not align.is_deferred or case.kind == "prompt":
        return None
    return Ring(align.fold_length, case.rows * tokens_per_row, align.ring_bytes_per_slot / (2 * align.fold_length))


def prompts(config: Config, case: Case, seed: int = 0, fewer: int = 0) -> list[list[int]]:
    """Random prompts that share nothing, with `fewer` tokens than the case's context."""
    rng = np.random.default_rng([seed, case.rows, case.context])
    return rng.integers(0, config.vocab_size, (case.rows, case.context - fewer)).tolist()


def _check(outputs: Sequence[Any]) -> None:
    for output in outputs:
        if output.error is not None:
            raise output.error


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def chosen_experts(engine: Engine, config: Config) -> float:
    """Runs one step, compiled anew, and returns the mean number of different experts that a layer's tokens chose.

    Shared experts are not counted.
    """
    counts: list[int] = []
    call = Experts.routed_sums

    def counting(self: Experts, x: jax.Array, *choice: Any, **options: Any) -> Any:
        chosen, _ = choose_experts(*choice, **options)
        of_expert = chosen.reshape(-1) == jnp.arange(config.num_experts, dtype=jnp.int32)[:, None]
        jax.debug.callback(lambda count: counts.append(int(count)), jnp.sum(jnp.any(of_expert, axis=1)))
        return call(self, x, *choice, **options)

    original = inspect.unwrap(runner.run_step)
    given = inspect.signature(original).parameters.values()
    # A new function, because JAX keeps what it has traced by the function.
    step = jax.jit(
        lambda params, inputs, state, *others, **static: original(params, inputs, state, *others, **static),
        static_argnames=[parameter.name for parameter in given if parameter.kind is parameter.KEYWORD_ONLY],
        donate_argnames="state",
    )
    # A chain would choose inside its launch.
    counted = _replaced(Experts, "routed_sums", counting), _replaced(SharedExpertMoE, "takes_chains", False)
    with counted[0], counted[1], _replaced(runner, "run_step", step):
        engine.step()
        jax.block_until_ready(engine.runner.device_state)
        jax.effects_barrier()
    return statistics.mean(counts)


def _timing(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Returns a function that makes a call and appends its microseconds to `times`."""

    @functools.wraps(call)
    def timed(*arguments: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments)
        times.append(1e6 * (time.perf_counter() - begin))
        return result

    return timed


def time_steps(engine: Engine, steps: int) -> Row:
    """Times the engine's own steps, and what the host does in them."""
    whole: list[float] = []
    starts: list[float] = []
    waits: list[float] = []
    own, step, median = engine.runner, _timing(engine.step, whole), statistics.median
    timed = _replaced(own, "do_step", _timing(own.do_step, starts)), _replaced(own, "read", _timing(own.read, waits))
    with timed[0], timed[1]:
        for _ in range(steps):
            step()
    row: Row = {"step_us": median(whole), "step_us_min": min(whole), "step_us_max": max(whole)}
    row["step_us_mean"] = statistics.mean(whole)
    return row | {"start_us": median(starts), "wait_us": median(waits)}


def measure_decode(engine: Engine, config: Config, case: Case, steps: int, warm_up: int) -> Row:
    """The median time of the engine's own steps while every row decodes, and the kernels of a step."""
    # The first rows decode while the last ones' prompts are read.
    reading = case.rows * -(-case.context // engine.config.max_num_batched_tokens)
    length = (1 + case.drafts) * (reading + warm_up + steps + 64)
    params = SamplingParams(max_tokens=length, ignore_eos=True, **DRAWS if case.draws else {})
    generated = int(warm_up * (1 + case.drafts / 2))
    ids = [engine.add_request(prompt, params) for prompt in prompts(config, case, fewer=generated)]
    while engine.scheduler.waiting or any(not request.token_times for request in engine.scheduler.running):
        _check(engine.step())
    first = time_steps(engine, min(warm_up, steps))
    for _ in range(warm_up - steps):
        engine.step()
    before = engine.stats
    row = time_steps(engine, steps) | {"first_step_us": first["step_us"], "warm_up": warm_up}
    after = engine.stats

    # No step is in flight when the profiler begins, so that it sees whole steps only.
    jax.block_until_ready(engine.runner.device_state)

    def run() -> None:
        for _ in range(8):
            engine.step()
        jax.block_until_ready(engine.runner.device_state)

    launches = kernel_times(run) if jax.default_backend() == "gpu" else []
    experts = chosen_experts(engine, config) if config.num_experts else None
    for request in ids:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()
    if case.drafts:
        accepted = sum(after.accepted_tokens) - sum(before.accepted_tokens)
        row["tokens_per_row"] = 1 + accepted / (steps * case.rows)
    if experts is not None:
        row["experts_per_layer"] = experts
    return row | _kernels(launches, 8 * devices_of(engine))


def devices_of(engine: Engine) -> int:
    """The number of devices over which an engine's model is split."""
    layout = engine.runner.layout
    return 1 if layout is None else layout.mesh.size


def _kernels(launches: Sequence[tuple[str, float]], steps: int) -> Row:
    """Busy time and launches of a step, and its longest kernels: (name, launches, microseconds), all per step.

    `steps` counts the steps of every device.
    """
    if not launches:
        return {}
    each: dict[str, list[float]] = {}
    for name, us in launches:
        each.setdefault(name, []).append(us)
    total = {name: sum(times) / steps for name, times in each.items()}
    names = sorted(total, key=lambda name: total[name], reverse=True)
    longest = [(name, len(each[name]) / steps, total[name]) for name in names[:LONGEST]]
    return {"busy_us": sum(total.values()), "kernels": len(launches) / steps, "longest": longest}


def measure_prompt(engine: Engine, config: Config, case: Case, repetitions: int) -> Row:
    """The median time from the arrival of a prompt at an idle engine to its first token, and a prompt's kernels."""

    def run(seed: int) -> float:
        (prompt,) = prompts(config, case, seed=seed)
        (output,) = engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        assert output.ttft_s is not None
        jax.block_until_ready(engine.runner.device_state)
        return 1e3 * output.ttft_s

    run(seed=0)  # compiles
    times = [run(seed=1 + repetition) for repetition in range(repetitions)]
    launches = kernel_times(lambda: run(seed=1 + repetitions)) if jax.default_backend() == "gpu" else []
    return {"ttft_ms": statistics.median(times), "ttft_ms_runs": times} | _kernels(launches, devices_of(engine))


def make_engine(model: Any, config: EngineConfig, devices: int) -> Engine:
    """Makes an engine. With drafts, its model's tokens follow a script, and its drafter knows it."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,)) if devices > 1 else None
    if not config.num_speculative_tokens:
        return Engine(model, config, mesh=mesh)
    return Engine(ScriptedModel(model), config, drafter=ScriptedDrafter(model.config.vocab_size), mesh=mesh)


def main(arguments: list[str] | None = None) -> list[Row]:
    """Runs the cases and returns their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help='names of cases, without "moe"; default: all')
    parser.add_argument("--model", choices=MODELS, default="qwen3.5-4b", help="shapes of the random weights")
    parser.add_argument("--devices", type=int, default=1, help="devices that share the model")
    text = "leave out what an engine chooses by itself"
    parser.add_argument("--configuration", choices=("benchmark", "defaults"), default="benchmark", help=text)
    parser.add_argument("--policy", choices=POLICIES, default="copy_free", help="which states a step writes")
    parser.add_argument("--max-model-len", type=int, default=CONFIGURATION["max_model_len"])
    parser.add_argument("--max-num-seqs", type=int, default=CONFIGURATION["max_num_seqs"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=CONFIGURATION["max_num_batched_tokens"])
    parser.add_argument("--num-state-blocks", type=int, default=CONFIGURATION["num_state_blocks"])
    parser.add_argument("--num-kv-pages", type=int, default=CONFIGURATION["num_kv_pages"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps before those that are timed, at least one")
    parser.add_argument("--budget", type=float, default=math.inf, help="start no case after so many seconds")
    parser.add_argument("--json", help="append a row per case to this JSON Lines file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    config = MODELS[options.model]
    prefix = "moe " if config.num_experts else ""
    cases = cases_named(CASES, options.case, prefix)
    begin, header, rows = time.perf_counter(), facts(options.commit), []
    rate = copy_bandwidth() if jax.default_backend() == "gpu" else 4.27e6
    model = random_model(config)
    jax.block_until_ready(nnx.state(model))
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_state_blocks", "num_kv_pages")
    fields = CONFIGURATION | {name: getattr(options, name) for name in ("policy", *names)}
    given = dict(policy=options.policy) if options.configuration == "defaults" else fields
    suffix = "" if options.policy == "copy_free" else f", {options.policy}"
    engine: Engine | None = None
    print(f"{header}; {time.perf_counter() - begin:.0f} s", flush=True)
    # Cases of one engine follow one another.
    for case in sorted(cases, key=lambda case: case.drafts):
        if time.perf_counter() - begin > options.budget:
            print(f"{case.name}: no time left", flush=True)
            continue
        if engine is None or engine.config.num_speculative_tokens != case.drafts:
            if engine is not None:
                free_pools(engine)
            engine = make_engine(model, EngineConfig(**given, num_speculative_tokens=case.drafts), options.devices)
            print(f"{engine.explain()}\n{engine.sizes}; {time.perf_counter() - begin:.0f} s", flush=True)
        engine.reset_prefix_cache()
        measure = functools.partial(measure_prompt, repetitions=4) if case.kind == "prompt" else functools.partial(
            measure_decode, steps=options.steps, warm_up=options.warm_up
        )  # fmt: skip
        row: Row = {"case": prefix + case.name + suffix, "devices": options.devices, "model": options.model}
        row |= measure(engine, config, case)
        row["floor_us"] = floor_us(
            config,
            case,
            rate,
            jnp.dtype(config.dtype).itemsize,
            experts=row.get("experts_per_layer"),
            devices=options.devices,
            ring=ring_of(engine, case, row.get("tokens_per_row", 1)),
        )
        measured_us = 1e3 * row["ttft_ms"] if case.kind == "prompt" else row["step_us"]
        row["ratio"] = measured_us / row["floor_us"]
        if options.configuration == "defaults":
            row |= {"configuration": "defaults"} | {name: getattr(engine.config, name) for name in fields}
        else:
            row |= fields
        row |= {"copy_bandwidth_tb_s": rate / 1e6} | header
        rows.append(row)
        append(options.json, row)
        print({name: value for name, value in row.items() if name not in header}, flush=True)
    return rows


if __name__ == "__main__":
    main()
