"""One of several processes that run an engine together, or the one process that they are compared with.

    process.py COORDINATOR NUM_PROCESSES PROCESS_ID DEVICES_EACH [TASK ...]

`test_processes.py` starts it. One process has a mesh of as many simulated devices. Process 0 serves requests and prints what
it found as JSON. The tasks: "interrupt" interrupts steps meanwhile, "work" then generates until the process is ended, "fail"
raises; with "differ" each process has other weights. "quick" steps in one way, moves no prefix, and traces what a CPU runs
alone.
"""

import dataclasses
import functools
import json
import signal
import sys

import jax
import numpy as np
from flax import nnx

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device import model_worker, runner
from mamba_align_jax.engine.scheduling import buckets
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.models import qwen3_5
from mamba_align_jax.processes import Processes

VOCAB, FULL = 64, Level.FULL
SIZES = dict(
    block_size=16, kv_page_size=8, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=96,
    num_state_blocks=13, num_kv_pages=24,
)  # fmt: skip


def make_model(seed=1):
    """A model of two layers, whose weights are equal in every process that gives the same seed."""
    config = qwen3_5.Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, dtype="float32",
        layer_types=(qwen3_5.LINEAR, qwen3_5.FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=16,
        max_position_embeddings=256,
    )  # fmt: skip
    graph, state = nnx.split(nnx.eval_shape(lambda: qwen3_5.Model(config, nnx.Rngs(0))))
    rng = np.random.default_rng(seed)

    def draw(place, variable):
        base = float(place[-1] == "weight" and variable.ndim == 1)
        return variable.replace((base + 0.25 * rng.normal(size=variable.shape)).astype(variable.dtype))

    drawn = [(place, draw(place, variable)) for place, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(drawn))


def serve(make_engine, interrupts=0, steppings=(False, True), moves=True):
    """Serves requests that arrive, are aborted and preempted; returns what they got and what was counted.

    Afterwards it moves a prefix, if it `moves` any.

    With `interrupts`, steps are interrupted by a signal at any time, which may change what is counted, and how many tokens
    a request has when it is aborted.
    """
    found = []
    for stepping in steppings:
        engine = make_engine(EngineConfig(**SIZES, async_stepping=stepping))
        rng, when, outputs, ids = np.random.default_rng(0), np.random.default_rng(1), {}, []
        shared = rng.integers(0, VOCAB, 36).tolist()
        params = [
            SamplingParams(max_tokens=8, ignore_eos=True),
            SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, top_k=20, seed=3),
            SamplingParams(max_tokens=6, min_tokens=3, repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=1),
            SamplingParams(max_tokens=16, ignore_eos=True, priority=-1),
        ]
        arrivals = {0: 3, 2: 1, 5: 2, 8: 2}
        for step in range(400):
            for _ in range(arrivals.get(step, 0)):
                number = len(ids)
                prompt = shared[: 36 - number] + rng.integers(0, VOCAB, 3 + 4 * number).tolist()
                ids.append(engine.add_request(prompt, params[number % len(params)]))
            if step == 6:
                outputs[ids[1]] = engine.abort(ids[1])
            if step == 7:
                engine.reset_prefix_cache()
            if interrupts:
                signal.setitimer(signal.ITIMER_REAL, float(when.uniform(0.001, 0.2)))
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except KeyboardInterrupt:
                interrupts += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            if step > max(arrivals) and not engine.has_unfinished:
                break
        stats = dataclasses.asdict(engine.stats)
        assert len(outputs) == len(ids) == 8
        assert stats["null_reads"] == 0
        got = [
            (each.token_ids, each.finish_reason) for _, each in sorted(outputs.items()) if each.finish_reason != "abort"
        ]
        found.append({"outputs": got, "stats": stats} | ({"moved": move(engine, shared)} if moves else {}))
    return found, engine


def move(engine, prompt):
    """Moves a prefix out of an engine and back; returns how much of it came back and hit, and whether it is the same."""
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    (first,) = engine.generate(prompt, params)
    data = engine.export_prefix(prompt)
    engine.reset_prefix_cache()
    length = engine.import_prefix(data, prompt)
    (again,) = engine.generate(prompt, params)
    return [length, again.num_cached_tokens, engine.export_prefix(prompt) == data, again.token_ids == first.token_ids]


def work(engine):
    """Says when it begins, and generates until it is ended."""
    print("working", flush=True)
    while True:
        engine.generate([1, 2, 3])


def interrupt(number, frame):
    raise KeyboardInterrupt


def main(coordinator, num_processes, process_id, devices_each, *tasks):
    jax.config.update("jax_num_cpu_devices", devices_each)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    signal.signal(signal.SIGALRM, interrupt)
    one = lambda self: [
        buckets.Bucket(self.align.max_num_seqs, self.max_prefill_rows, self.max_num_batched_tokens, FULL)
    ]
    runner.StepRunner.buckets = property(one)
    ways = dict(steppings=(False, True), moves=True)
    if "quick" in tasks:
        ways = dict(steppings=(True,), moves=False)
        jax.lax.platform_dependent = lambda *operands, default, **others: default(*operands)
    if num_processes == 1:
        # Several processes launch no step ahead, so their steps are compared with those of one that does not, either.
        model_worker.is_slow_to_start = lambda mesh: False
        mesh, model = jax.make_mesh((devices_each,), ("tensor",)), make_model()
        print(json.dumps(serve(lambda config: Engine(model, config, mesh=mesh), **ways)[0]))
        return
    with Processes(coordinator, num_processes, process_id) as processes:
        model = make_model(seed=1 + process_id if "differ" in tasks else 1)
        if not processes.is_leader:
            processes.follow(model)
            return
        found, engine = serve(functools.partial(processes.lead, model), int("interrupt" in tasks), **ways)
        print(json.dumps(found), flush=True)
        if "work" in tasks:
            work(engine)
        if "fail" in tasks:
            raise LookupError("what process 0 raised")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), *sys.argv[5:])
