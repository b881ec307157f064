"""Whole steps of an engine, compiled without arrays: the second half of `make ahead`."""

import functools
import math
import re
from typing import NamedTuple

import jax
from flax import nnx

from mamba_align_jax import EngineConfig
from mamba_align_jax.engine.buckets import Bucket
from mamba_align_jax.engine.levels import Level
from mamba_align_jax.engine.packed import pack
from mamba_align_jax.engine.packing import Packer
from mamba_align_jax.engine.program import DeviceState, Graph, run_step
from mamba_align_jax.engine.sizing import align_config, pages_spec
from mamba_align_jax.load.random_model import QWEN3_5_4B, QWEN3_5_35B_A3B
from mamba_align_jax.models.qwen3_5 import Config, Model

BLOCKS, PAGES, PAGE_SIZE = 300, 2000, 64
# Instructions of a compiled program that launch nothing.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}


class Step(NamedTuple):
    """A program of an engine. `max_launches` bounds its launches; None only reports them."""

    name: str
    bucket: Bucket
    model: Config = QWEN3_5_4B
    drafts: int = 0
    policy: str = "copy_free"
    max_launches: int | None = None


_DECODE = [Bucket(rows, 0, 0, Level.MOST_LIKELY) for rows in (1, 16, 64)]
STEPS = (
    *(Step(f"decode {bucket.decode_rows}", bucket, max_launches=350) for bucket in _DECODE),
    *(Step(f"decode {bucket.decode_rows} drawn", bucket._replace(level=Level.DRAW)) for bucket in _DECODE),
    *(Step(f"verify K3 16 {policy}", _DECODE[1], drafts=3, policy=policy) for policy in ("copy_free", "deferred")),
    *(Step(f"moe decode {bucket.decode_rows}", bucket, QWEN3_5_35B_A3B) for bucket in _DECODE),
    Step("prompts 8192", Bucket(0, 4, 8192, Level.MOST_LIKELY)),
    Step("mixed 64 + 2048", Bucket(64, 4, 2048, Level.MOST_LIKELY)),
    Step("moe prompts 4096", Bucket(0, 4, 4096, Level.MOST_LIKELY), QWEN3_5_35B_A3B),
)


@functools.cache
def _model(config):
    return nnx.eval_shape(lambda: Model(config, nnx.Rngs(0)))


def trace(step, place):
    """Traces a step. `place` says where each array lies. Returns what was traced, and the bytes that a step donates."""
    model, bucket = _model(step.model), step.bucket
    config = EngineConfig(
        prefix_cache="all", policy=step.policy, num_speculative_tokens=step.drafts, block_size=512, kv_page_size=PAGE_SIZE,
        max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=140000,
    )  # fmt: skip
    spec = align_config(config, model)
    graph, params = Graph.split(model)
    sizes = dict(state_blocks=BLOCKS, kv_pages=PAGES, page_size=PAGE_SIZE, history=0)
    state = jax.eval_shape(lambda: DeviceState.create(spec, pages_spec(model), **sizes))
    inputs = pack(Packer(spec, PAGE_SIZE, False, step.model.vocab_size).pack(bucket, [None] * bucket.num_rows))
    static = dict(graph=graph, spec=spec, drafter=None, num_decode_rows=bucket.decode_rows, layout=None)
    donated = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    return run_step.trace(*jax.tree.map(place, (params, inputs, state)), **static), donated


def launches(text):
    """Returns what a compiled program launches: the instruction's name for each launch."""
    entry = text[text.index("\nENTRY ") :]
    found = re.findall(r"^  (?:ROOT )?%\S+ = (.*?) ([a-z][a-z-]*)\(", entry, re.MULTILINE)
    # Empty arrays are copied by nothing.
    return [name for shape, name in found if name not in _FREE and not re.match(r"\w+\[(\d+,)*0[,\]]", shape)]


def faults(step, compiled, donated):
    """Returns what is wrong with a compiled step, and the number of its launches."""
    found, text = [], compiled.as_text()
    names = launches(text)
    if compiled.memory_analysis().alias_size_in_bytes < donated:
        found.append("a pool is copied")
    unwanted = ("while", "conditional", *([] if step.bucket.prefill_rows else ["sort"]))
    found += [f"it has a {name}" for name in unwanted if re.search(rf" {name}\(", text)]
    if step.max_launches is not None and len(names) > step.max_launches:
        found.append(f"it has more than {step.max_launches} launches")
    return found, len(names)
