"""Compiles the programs that a benchmark's steps need, and no others: a program of a large model takes long to compile."""

import time

from mamba_align_jax import Engine
from mamba_align_jax.engine.scheduling.levels import Level


def compile_programs(engine: Engine, *sizes: tuple[int, int]) -> float:
    """Compiles the programs of steps whose rows take their most likely tokens, on a GPU all at a time, and runs each once.

    Steps of other sizes may run, too: each program is then compiled by the first step that needs it.

    Args:
        engine: The engine, which nobody else uses.
        *sizes: For each program the number of rows that decode and the number of prompt tokens.

    Returns:
        The seconds that it took to compile them.
    """
    begin = time.perf_counter()
    needed = [
        bucket
        for bucket in engine.runner.buckets
        if bucket.level == Level.MOST_LIKELY and (bucket.decode_rows, bucket.prefill_tokens) in sizes
    ]
    for _ in engine.runner.compile(needed):
        pass
    seconds = time.perf_counter() - begin
    for bucket in needed:
        engine.runner.warm(bucket)
    return seconds
