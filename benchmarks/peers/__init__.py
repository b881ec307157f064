"""Other projects' kernels on the same cases, where they can be imported. None of their code is here.

A peer is a function of (benchmark, buffers) that returns launch(turn): one turn over torch views of the JAX buffers.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax

# Overwrites the pools and returns the outputs. A peer that returns the rows' new states instead of storing them returns
# (states, outputs); it starts from states gathered beforehand, so that neither gathering nor storing is timed.
Launch = Callable[[int], tuple[Any, ...]]
Adapter = Callable[[Any, tuple[jax.Array, ...]], Launch]


def view(array: jax.Array) -> Any:
    """A torch tensor of the same memory: what torch writes there, JAX's array holds."""
    import torch

    return torch.from_dlpack(array)


def views(benchmark: Any) -> dict[str, Any]:
    """What a benchmark gives to a peer, by name."""
    arrays = {name: x for name, x in (benchmark.inputs | benchmark.given).items() if isinstance(x, jax.Array)}
    return {name: view(array).contiguous() for name, array in arrays.items()}


def gathered(benchmark: Any, pool: jax.Array) -> list[Any]:
    """Per set of blocks, a copy of the rows' states."""
    states = view(pool)[0]
    return [states[blocks.long()].contiguous() for blocks in views(benchmark)["write"]]


def find(benchmark: Any) -> dict[str, Adapter]:
    """The peers that this machine has for a benchmark, by name."""
    found: dict[str, Adapter] = {}
    for name in ("vllm", "fla"):
        if any(importlib.util.find_spec(package) is None for package in ("torch", "triton", name)):
            continue
        try:
            module = importlib.import_module(f"benchmarks.peers.{name}")
        except ImportError as error:
            print(f"{name} can't be imported: {error}")
            continue
        adapter = module.ADAPTERS.get(benchmark.case.name.split()[0])
        if adapter is not None:
            found[name] = adapter
    return found
