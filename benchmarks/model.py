"""Times a whole model beside its floor: `python -m benchmarks.model --json benchmarks/results/model.jsonl`.

A decode or verify case keeps `rows` requests of `context` tokens running in an engine and times the engine's own steps, with
the host and asynchronously. Of a verify row's drafts, each number from none to all is right equally often (`scripted.py`). A
prompt case times a request from its arrival at an idle engine to its first token. The weights are random, in the shapes of a
published model. Cases share one engine configuration, except for the number of drafts. Names of cases of a model with
experts begin with "moe". Requests take their most likely token, and draw it in cases whose names end with "drawn".

The floor of a step is arithmetic, in `floor_us`: every matrix product takes the larger of its bytes at the copy rate and its
operations at the rate of a large product, keys and values are read once, and recurrent states are read once and written once
for each token of a row. Under policy "deferred" states are written once for each fold group of accepted tokens, and entries
of rings are read and written. Of experts, the chosen ones are read: they are counted in a step of decode and verify cases,
and expected in prompts, as if tokens chose at random. Several devices share the work equally, and what they send is not
counted.
"""

import argparse
import contextlib
import functools
import inspect
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from benchmarks.scripted import ScriptedDrafter, ScriptedModel
from benchmarks.timing import copy_bandwidth, kernel_times
from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.engine import runner
from mamba_align_jax.layers.moe import Experts, SharedExpertMoE
from mamba_align_jax.load.random_model import MODELS, random_model
from mamba_align_jax.load.rows import Row, append, facts
from mamba_align_jax.load.runs import free_pools
from mamba_align_jax.models.qwen3_5 import LINEAR, Config
from mamba_align_jax.sharding import AXIS
from pallas_kernels import choose_experts

FLOPS_PER_US = 790e6  # of a large bfloat16 product on one H200
# The pools hold 256 requests of 4096 tokens with their states, and little more.
CONFIGURATION: dict[str, Any] = dict(
    prefix_cache="all", block_size=512, kv_page_size=64, max_num_batched_tokens=8192, max_num_seqs=256,
    max_model_len=140000, async_stepping=True, num_state_blocks=1000, num_kv_pages=18000,
)  # fmt: skip
# How Qwen's models are meant to be sampled.
DRAWS: dict[str, Any] = dict(temperature=0.7, top_k=20, top_p=0.8)
STEPS = 32  # of which the median is taken
LONGEST = 15  # kernels that a row lists


@dataclass(frozen=True)
class Case:
    """What is timed.

    Attributes:
        kind: "decode", "verify", or "prompt" for the time to the first token.
        rows: Requests that run at once.
        context: Tokens of each prompt.
        drafts: Drafts of each row, in a verify case.
        draws: Whether the rows of a decode case draw their tokens.
    """

    kind: str
    rows: int
    context: int
    drafts: int = 0
    draws: bool = False

    @property
    def name(self) -> str:
        """The name in the rows of results."""
        if self.kind == "prompt":
            return f"prompt {self.context}"
        drafts, drawn = f" K{self.drafts}" if self.drafts else "", " drawn" if self.draws else ""
        return f"{self.kind}{drafts} {self.rows}x{self.context}{drawn}"

    @property
    def tokens(self) -> int:
        """The tokens of what is timed: a step, or a whole prompt."""
        return self.context if self.kind == "prompt" else self.rows * (1 + self.drafts)


CASES = (
    *(Case("decode", rows, 4096) for rows in (1, 5, 16, 20, 64, 65, 256)),
    *(Case("decode", rows, 32768) for rows in (1, 16)),
    *(Case("decode", rows, 4096, draws=True) for rows in (1, 16, 64)),
    *(Case("verify", rows, 4096, drafts=3) for rows in (16, 64)),
    *(Case("prompt", 1, context) for context in (512, 4096, 32768, 131072)),
)


@dataclass(frozen=True)
class Ring:
    """What decode and verify rows keep under policy "deferred".

    Attributes:
        fold_length: Tokens of a fold group.
        accepted: Tokens by which all rows together advance in a step.
        entry_bytes: Bytes of one entry in all layers.
    """

    fold_length: int
    accepted: float
    entry_bytes: float


def ring_of(engine: Engine, case: Case, tokens_per_row: float) -> Ring | None:
    """Returns what the rows of an engine keep, or None unless its policy is "deferred"."""
    spec = engine.spec
    if not spec.is_deferred or case.kind == "prompt":
        return None
    return Ring(spec.fold_length, case.rows * tokens_per_row, spec.ring_bytes_per_slot / (2 * spec.fold_length))


def products(config: Config) -> Iterator[tuple[int, int]]:
    """The inputs and outputs of every matrix product of the layers that all tokens have. Routed experts are left out."""
    c = config
    keys, values = c.linear_num_key_heads * c.linear_key_head_dim, c.linear_num_value_heads * c.linear_value_head_dim
    heads, kv_heads = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for layer, kind in enumerate(c.layer_types):
        if kind == LINEAR:
            yield c.hidden_size, 2 * keys + 2 * values + 2 * c.linear_num_value_heads
            yield values, c.hidden_size
        else:
            yield c.hidden_size, 2 * heads + 2 * kv_heads
            yield heads, c.hidden_size
        size = c.shared_expert_intermediate_size if c.is_sparse(layer) else c.intermediate_size
        yield c.hidden_size, 2 * size
        yield size, c.hidden_size
        if c.is_sparse(layer):
            yield c.hidden_size, c.num_experts
            yield c.hidden_size, 1


def expected_experts(config: Config, tokens: int) -> float:
    """The mean number of different experts that `tokens` tokens of one layer choose, if they choose at random."""
    return config.num_experts * (1 - (1 - config.num_experts_per_tok / config.num_experts) ** tokens)


def floor_us(
    config: Config,
    case: Case,
    copy_rate: float,
    itemsize: int = 2,
    *,
    experts: float | None = None,
    devices: int = 1,
    ring: Ring | None = None,
) -> float:
    """The least time of a case.

    Args:
        config: The model.
        case: A decode or verify case is one step after `context` tokens; a prompt case is a whole prompt.
        copy_rate: Bytes per microsecond that a copy moves, read and written.
        itemsize: Bytes of a weight, a key and a value.
        experts: The mean number of experts of a layer that are chosen; None expects them.
        devices: The number of devices that share the work.
        ring: What the rows keep under policy "deferred"; None under the others.
    """
    c, tokens = config, case.tokens
    product = lambda m, k, n: max(itemsize * k * n / copy_rate, 2.0 * m * k * n / FLOPS_PER_US)
    # A prompt and a decode row sample one token, a verify row one after each of its tokens.
    total = product(1 if case.kind == "prompt" else tokens, c.hidden_size, c.vocab_size)
    total += sum(product(tokens, k, n) for k, n in products(c))
    if c.num_experts:
        layers = sum(c.is_sparse(layer) for layer in range(c.num_hidden_layers))
        weights = 3 * c.hidden_size * c.moe_intermediate_size
        chosen = expected_experts(c, tokens) if experts is None else experts
        operations = 2.0 * tokens * c.num_experts_per_tok * weights
        total += layers * max(itemsize * chosen * weights / copy_rate, operations / FLOPS_PER_US)
    full = sum(kind != LINEAR for kind in c.layer_types)
    key_values = case.rows * case.context * full * 2 * c.num_key_value_heads * c.head_dim * itemsize
    state = (
        (c.num_hidden_layers - full) * c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim * 4
    )
    if case.kind == "prompt":
        # Two products of the queries with half of the positions each.
        total += 2.0 * full * c.num_attention_heads * c.head_dim * case.context**2 / FLOPS_PER_US
    else:
        written = tokens * state
        if ring is not None:
            # Rows are in every phase of their groups, so each reads half of a group's entries and one more.
            read = case.rows * (ring.fold_length + 1) / 2
            written = ring.accepted / ring.fold_length * state + (read + tokens) * ring.entry_bytes
        total += (key_values + case.rows * state + written) / copy_rate
    return total / devices


def prompts(config: Config, case: Case, seed: int = 0) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = np.random.default_rng([seed, case.rows, case.context])
    return rng.integers(0, config.vocab_size, (case.rows, case.context)).tolist()


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


def measure_decode(engine: Engine, config: Config, case: Case, steps: int) -> Row:
    """The median time of the engine's own steps while every row decodes, and the kernels of a step."""
    # The first rows decode while the last ones' prompts are read.
    reading = case.rows * -(-case.context // engine.config.max_num_batched_tokens)
    length = (1 + case.drafts) * (reading + steps + 64)
    params = SamplingParams(max_tokens=length, ignore_eos=True, **DRAWS if case.draws else {})
    ids = [engine.add_request(prompt, params) for prompt in prompts(config, case)]
    while engine.scheduler.waiting or any(not request.token_times for request in engine.scheduler.running):
        _check(engine.step())
    for _ in range(4):
        engine.step()
    times, before = [], engine.stats
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        times.append(1e6 * (time.perf_counter() - begin))
    after = engine.stats

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
    row: Row = {"step_us": statistics.median(times), "step_us_min": min(times), "step_us_max": max(times)}
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
    parser.add_argument("--policy", choices=POLICIES, default="copy_free", help="which states a step writes")
    parser.add_argument("--max-model-len", type=int, default=CONFIGURATION["max_model_len"])
    parser.add_argument("--max-num-seqs", type=int, default=CONFIGURATION["max_num_seqs"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=CONFIGURATION["max_num_batched_tokens"])
    parser.add_argument("--num-state-blocks", type=int, default=CONFIGURATION["num_state_blocks"])
    parser.add_argument("--num-kv-pages", type=int, default=CONFIGURATION["num_kv_pages"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--budget", type=float, default=math.inf, help="start no case after so many seconds")
    parser.add_argument("--json", help="append a row per case to this JSON Lines file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    begin, header, rows = time.perf_counter(), facts(options.commit), []
    rate = copy_bandwidth() if jax.default_backend() == "gpu" else 4.27e6
    config = MODELS[options.model]
    prefix = "moe " if config.num_experts else ""
    model = random_model(config)
    jax.block_until_ready(nnx.state(model))
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_state_blocks", "num_kv_pages")
    fields = CONFIGURATION | {name: getattr(options, name) for name in ("policy", *names)}
    suffix = "" if options.policy == "copy_free" else f", {options.policy}"
    engine: Engine | None = None
    print(f"{header}; {time.perf_counter() - begin:.0f} s", flush=True)
    # Cases of one engine follow one another.
    for case in sorted(CASES, key=lambda case: case.drafts):
        if options.case and not {case.name, prefix + case.name} & set(options.case):
            continue
        if time.perf_counter() - begin > options.budget:
            print(f"{case.name}: no time left", flush=True)
            continue
        if engine is None or engine.config.num_speculative_tokens != case.drafts:
            if engine is not None:
                free_pools(engine)
            engine = make_engine(model, EngineConfig(**fields, num_speculative_tokens=case.drafts), options.devices)
            print(f"{engine.sizes}; {time.perf_counter() - begin:.0f} s", flush=True)
        engine.reset_prefix_cache()
        measure = functools.partial(measure_prompt, repetitions=4) if case.kind == "prompt" else functools.partial(
            measure_decode, steps=options.steps
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
        row |= fields | {"copy_bandwidth_tb_s": rate / 1e6} | header
        rows.append(row)
        append(options.json, row)
        print({name: value for name, value in row.items() if name not in header}, flush=True)
    return rows


if __name__ == "__main__":
    main()
