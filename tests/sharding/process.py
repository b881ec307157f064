"""One of several processes that run an engine together, or the one process that they are compared with.

    process.py COORDINATOR NUM_PROCESSES PROCESS_ID DEVICES_EACH TASK

`test_processes.py` starts it. With one process, the engine has a mesh of as many simulated devices. Process 0 prints what
it found as JSON.
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import time

import jax
import numpy as np
from flax import nnx

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine import buckets, runner
from mamba_align_jax.models import qwen3_5
from mamba_align_jax.processes import Processes

VOCAB = 64
T0 = time.time()
SIZES = dict(
    block_size=16, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=128,
    num_speculative_tokens=2, num_state_blocks=22, num_kv_pages=36, speculation="mtp",
)  # fmt: skip


def make_model():
    """A model of two layers with a draft head, whose weights are equal in every process."""
    config = qwen3_5.Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, dtype="float32",
        layer_types=(qwen3_5.LINEAR, qwen3_5.FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=16,
        max_position_embeddings=256, mtp_num_hidden_layers=1,
    )  # fmt: skip
    graph, state = nnx.split(nnx.eval_shape(lambda: qwen3_5.Model(config, nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def draw(place, variable):
        base = float(place[-1] == "weight" and variable.ndim == 1)
        return variable.replace((base + 0.25 * rng.normal(size=variable.shape)).astype(variable.dtype))

    drawn = [(place, draw(place, variable)) for place, variable in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(drawn))


def serve(make_engine):
    """Serves requests that arrive, are aborted, preempted and interrupted; returns what they got and what was counted."""
    found = []
    for stepping in (False, True):
        engine = make_engine(EngineConfig(**SIZES, async_stepping=stepping))
        print("made", time.time()-T0, file=sys.stderr)
        rng, outputs = np.random.default_rng(0), {}
        shared = rng.integers(0, VOCAB, 36).tolist()
        params = [
            SamplingParams(max_tokens=14, ignore_eos=True),
            SamplingParams(max_tokens=14, ignore_eos=True, temperature=0.9, top_k=20, seed=3),
            SamplingParams(max_tokens=10, min_tokens=3, repetition_penalty=1.3, logit_bias={5: 2.0}, logprobs=1),
            SamplingParams(max_tokens=40, ignore_eos=True, priority=-1),
        ]
        arrivals = {0: 3, 2: 1, 5: 2, 9: 2, 12: 2}
        ids = []
        for step in range(400):
            for _ in range(arrivals.get(step, 0)):
                number = len(ids)
                prompt = shared[: 36 - number] + rng.integers(0, VOCAB, 3 + 4 * number).tolist()
                ids.append(engine.add_request(prompt, params[number % len(params)]))
            if step == 7:
                outputs[ids[1]] = engine.abort(ids[1])
            if step == 11:
                engine.reset_prefix_cache()
            outputs |= {output.request_id: output for output in engine.step()}
            if step > 12 and not engine.has_unfinished:
                break
        print(stepping, time.time()-T0, step, file=sys.stderr)
        stats = dataclasses.asdict(engine.stats)
        assert len(outputs) == len(ids) == 10
        assert stats["null_reads"] == 0
        found.append(([(outputs[each].token_ids, outputs[each].finish_reason) for each in ids], stats))
    return found


def main(coordinator, num_processes, process_id, devices_each, task):
    jax.config.update("jax_num_cpu_devices", devices_each)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_disable_most_optimizations", True)
    one = lambda self: [buckets.Bucket(self.spec.max_num_seqs, self.max_prefill_rows, self.max_num_batched_tokens)]
    runner.StepRunner.buckets = property(one)
    with Processes(coordinator, num_processes, process_id) as processes:
        model = make_model()
        if processes.is_leader:
            print(json.dumps(serve(functools.partial(processes.lead, model))), flush=True)
        else:
            processes.follow(model)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5])
