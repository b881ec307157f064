"""Other projects' kernels on the same cases, where they can be imported. None of their code is here.

A peer is a function of (workload, buffers) that returns launch(turn): one turn over torch views of the JAX buffers.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax

Launch = Callable[[int], Any]


def find(workload: Any, pools: tuple[jax.Array, ...]) -> tuple[str, Launch] | None:
    """The peer's name and launch for a workload; None if there is no such peer on this machine.

    The launch overwrites `pools` and returns its outputs.
    """
    if any(importlib.util.find_spec(package) is None for package in ("torch", "triton", "vllm")):
        return None
    from benchmarks.peers import vllm

    adapter = vllm.ADAPTERS.get(workload.case.name.split()[0])
    return None if adapter is None else ("vllm", adapter(workload, pools))
