"""Adapters that run other projects' kernels (peers) on our benchmarks. None of the projects' code is here.

An adapter is a function of (benchmark, buffers). It returns launch(turn), which runs one turn over torch views of the
JAX buffers.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

# A launch overwrites the pools and returns the outputs. A peer that does not store the rows' new states returns
# (states, outputs). It starts from states that were gathered before, so that neither gathering nor storing them is
# timed.
Launch = Callable[[int], tuple[Any, ...]]
Adapter = Callable[[Any, tuple[jax.Array, ...]], Launch]


def view(array: jax.Array) -> Any:
    """Returns a torch tensor of the same memory. What torch writes there changes the JAX array."""
    import torch

    return torch.from_dlpack(array)


def views(benchmark: Any) -> dict[str, Any]:
    """Returns torch tensors of the arrays that a benchmark gives to peers, by name."""
    arrays = {name: x for name, x in (benchmark.inputs | benchmark.given).items() if isinstance(x, jax.Array)}
    return {name: view(array).contiguous() for name, array in arrays.items()}


def gathered(benchmark: Any, pool: jax.Array) -> list[Any]:
    """Returns a copy of the rows' states for each set of blocks."""
    states = view(pool)[0]
    return [states[blocks.long()].contiguous() for blocks in views(benchmark)["write"]]


def find(benchmark: Any) -> dict[str, Adapter]:
    """Returns the adapters for a benchmark whose projects this machine can import, by the project's name."""
    found: dict[str, Adapter] = {}
    for name in ("vllm", "fla"):
        if any(importlib.util.find_spec(package) is None for package in ("torch", "triton", name)):
            continue
        try:
            module = importlib.import_module(f"benchmarks.peers.{name}")
        except ImportError as error:
            print(f"{name} cannot be imported: {error}")
            continue
        adapter = module.ADAPTERS.get(benchmark.case.name.split()[0])
        if adapter is not None:
            found[name] = adapter
    return found
