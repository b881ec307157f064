"""Whole steps of an engine, compiled without their arrays: the second half of `make ahead`."""

import functools
import math
import re
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from benchmarks.random_model import QWEN3_5_4B, QWEN3_5_35B_A3B
from mamba_align_jax import EngineConfig
from mamba_align_jax.engine.device.device_inputs import EXCHANGED_TOKENS
from mamba_align_jax.engine.device.packed import pack
from mamba_align_jax.engine.device.packing import Packer
from mamba_align_jax.engine.device.program import DeviceState, Graph, device_specs, run_step
from mamba_align_jax.engine.device.sizing import align_config, pages_spec
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.models.config import ModelConfig
from mamba_align_jax.models.mamba2 import Config as Mamba2Config
from mamba_align_jax.models.tensor_parallel import shard_model, share
from mamba_align_jax.sharding import AXIS
from pallas_kernels import Mailboxes

BLOCKS, PAGES, PAGE_SIZE = 300, 2000, 64
# Instructions of a compiled program that launch nothing.
_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}
# A split model's weights are made, so it has few layers.
_FEW_LAYERS = replace(QWEN3_5_4B, num_hidden_layers=4, layer_types=QWEN3_5_4B.layer_types[:4])
_MAMBA2_2_7B = Mamba2Config(
    vocab_size=50288, hidden_size=2560, intermediate_size=5120, num_hidden_layers=64, num_heads=80, n_groups=1,
    dtype="bfloat16", max_position_embeddings=2**20,
)  # fmt: skip


class Step(NamedTuple):
    """A program of an engine.

    Attributes:
        name: Its name.
        bucket: Its sizes.
        model: Its model.
        drafts: The most drafts of a row.
        policy: How a step finds the states of the last one.
        devices: The number of devices among which the model is split.
        max_launches: The most launches that it may have; None for any number.
    """

    name: str
    bucket: Bucket
    model: ModelConfig = QWEN3_5_4B
    drafts: int = 0
    policy: str = "copy_free"
    devices: int = 1
    max_launches: int | None = None


_DECODE = [Bucket(rows, 0, 0, Level.MOST_LIKELY) for rows in (1, 16, 64)]
STEPS = (
    *(Step(f"decode {bucket.decode_rows}", bucket, max_launches=350) for bucket in _DECODE),
    *(Step(f"decode {bucket.decode_rows} drawn", bucket._replace(level=Level.DRAW)) for bucket in _DECODE),
    *(Step(f"verify K3 16 {policy}", _DECODE[1], drafts=3, policy=policy) for policy in ("copy_free", "deferred")),
    *(Step(f"moe decode {bucket.decode_rows}", bucket, QWEN3_5_35B_A3B) for bucket in _DECODE),
    Step("mamba2 decode 16", _DECODE[1], _MAMBA2_2_7B, max_launches=544),
    Step("prompts 8192", Bucket(0, 4, 8192, Level.MOST_LIKELY)),
    Step("mixed 64 + 2048", Bucket(64, 4, 2048, Level.MOST_LIKELY)),
    Step("moe prompts 4096", Bucket(0, 4, 4096, Level.MOST_LIKELY), QWEN3_5_35B_A3B),
    *(Step(f"4 layers on {n}, decode 16", _DECODE[1], _FEW_LAYERS, devices=n) for n in (2, 4)),
    Step("4 layers on 2, prompts 2048", Bucket(0, 4, 2048, Level.MOST_LIKELY), _FEW_LAYERS, devices=2),
)


@functools.cache
def _model(config, devices):
    """A model, the same for one device, and how it lies on simulated devices. A model for one device has no arrays."""
    make = import_module(type(config).__module__).Model
    whole = nnx.eval_shape(lambda: make(config, nnx.Rngs(0)))
    if devices == 1:
        return whole, whole, None
    graph, state = nnx.split(whole)
    weights = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
    model, layout = shard_model(nnx.merge(graph, weights), Mesh(np.array(jax.devices()[:devices]), (AXIS,)))
    return model, share(model), layout


def trace(step, devices):
    """Traces a step for described devices. Returns what was traced, and the bytes that a device's step donates."""
    bucket, (model, of_one, layout) = step.bucket, _model(step.model, step.devices)
    config = EngineConfig(
        prefix_cache="all", policy=step.policy, num_speculative_tokens=step.drafts, block_size=512, kv_page_size=PAGE_SIZE,
        max_num_batched_tokens=8192, max_num_seqs=256, max_model_len=140000,
    )  # fmt: skip
    align = align_config(config, of_one)
    graph, params = Graph.split(model)
    sizes = dict(state_blocks=BLOCKS, kv_pages=PAGES, page_size=PAGE_SIZE, history=0)
    create = functools.partial(DeviceState.create, align, pages_spec(of_one), **sizes)
    donated = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(create)))
    state = jax.eval_shape(functools.partial(create, layout=layout))
    inputs = pack(Packer(align, PAGE_SIZE, False, step.model.vocab_size).pack(bucket, [None] * bucket.num_rows))
    mailboxes = None
    if layout is None:
        one = SingleDeviceSharding(devices[0])
        params, inputs, state = jax.tree.map(lambda x: _lying(x, one), (params, inputs, state))
    else:
        layout = replace(layout, mesh=Mesh(np.array(devices), (AXIS,)))
        split = functools.partial(_split, layout.mesh)
        params, inputs = split(list(layout.params), params), split(P(), inputs)
        state, mailboxes = split(device_specs(layout, align), state), _mailboxes(layout.mesh, step.model.hidden_size)
    static = dict(graph=graph, align=align, drafter=None, num_decode_rows=bucket.decode_rows, layout=layout)
    return run_step.trace(params, inputs, state, None, mailboxes, **static), donated


def _lying(x, sharding):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _split(mesh, specs, arrays):
    """Shapes of arrays that lie on a mesh. A spec counts for all arrays below its place in the tree."""
    lie = lambda spec, below: jax.tree.map(lambda x: _lying(x, NamedSharding(mesh, spec)), below)
    return jax.tree.map(lie, specs, arrays, is_leaf=lambda x: isinstance(x, P))


def _mailboxes(mesh, hidden_size):
    """Mailboxes without arrays, of the sizes that an engine's have."""
    capacity = EXCHANGED_TOKENS * hidden_size
    boxes = Mailboxes.create(Mesh(np.array(jax.devices()[: mesh.size]), (AXIS,)), AXIS, capacity)
    return _split(mesh, boxes.partition(), boxes)


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
    unwanted = ["while", "conditional"]
    if not step.bucket.prefill_rows:
        # Devices send each other what they have by mailboxes.
        unwanted += ["sort", "all-reduce", "all-reduce-start", "all-gather", "all-gather-start"]
    found += [f"it has a {name}" for name in unwanted if re.search(rf" {name}\(", text)]
    if step.max_launches is not None and len(names) > step.max_launches:
        found.append(f"it has more than {step.max_launches} launches")
    return found, len(names)
