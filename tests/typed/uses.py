"""How users call the library. Each line that ends with "wrong" must be an error to type checkers, and no other one.

`make lint` checks it by `check.py`. It is never run.
"""

from typing import assert_type

import jax

import mamba_align_jax as ma
from mamba_align_jax import AlignConfig, Engine, EngineConfig, GroupSpec, RecurrentState, RequestOutput, SamplingParams
from pallas_kernels import Run, state_copy


def engines(directory: str) -> tuple[int, ...]:
    config = EngineConfig(max_num_seqs=2, prefix_cache="all")
    engine = Engine.from_pretrained(directory, config, dtype="float32")
    assert_type(engine, Engine)
    (output,) = engine.generate(["a prompt"], SamplingParams(max_tokens=3))
    assert_type(output, RequestOutput)
    EngineConfig(max_num_seq=2)  # wrong
    EngineConfig(max_num_seqs="two")  # wrong
    Engine.from_pretrained(123)  # wrong
    SamplingParams(temprature=0.5)  # wrong
    print(output.num_cached_tokenz)  # wrong
    print(ma.Engin)  # wrong
    print(ma.__version__.upper())
    return output.token_ids[: output.num_cached_tokens]


def own_step(align: AlignConfig, state: ma.AlignState, batch: ma.StepBatch, tables: ma.BlockTables) -> jax.Array:
    state, indices = ma.begin_step(align, state, batch, tables)
    assert_type(indices, ma.StepIndices)
    ma.begin_step(align, batch, state, tables)  # wrong
    print(indices.runing_column)  # wrong
    return indices.recurrent_read


def pools() -> ma.StatePool:
    align = AlignConfig((GroupSpec("delta net", 1, (RecurrentState((1, 4, 4)),)),), 4, max_num_seqs=2)
    AlignConfig((), block_sise=4)  # wrong
    return ma.StatePool.create(align, 8)


def ops(pool: jax.Array, rows: jax.Array) -> jax.Array:
    state_copy(pool, rows, rows, run=Run(implementation="cuda"))  # wrong
    state_copy(pool, rows)  # wrong
    return state_copy(pool, rows, rows, run=Run(implementation="xla"))
