"""Adapters that run other projects' kernels (peers) on our benchmarks. None of the projects' code is here.

An adapter is a function of (benchmark, buffers). It returns launch(turn), which runs one turn: over torch views of the JAX
buffers, or over the buffers themselves if the project is written in JAX.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A launch overwrites the pools and returns the outputs. A peer that does not store the rows' new states returns
# (states, outputs). It starts from states that were gathered before, so that neither gathering nor storing them is
# timed.
Launch = Callable[[int], tuple[Any, ...]]
Adapter = Callable[[Any, tuple[jax.Array, ...]], Launch]
# What must be importable besides a project itself.
PROJECTS: dict[str, tuple[str, ...]] = {"vllm": ("torch", "triton"), "fla": ("torch", "triton"), "jla": ()}


class Transposed(NamedTuple):
    """States of a peer in JAX whose last two axes are the other way round. To turn them is not timed."""

    states: jax.Array


def array(output: Any) -> jax.Array:
    """Returns an output of a launch as a JAX array."""
    if isinstance(output, Transposed):
        return output.states.swapaxes(-1, -2)
    return output if isinstance(output, jax.Array) else jnp.from_dlpack(output.contiguous())


def is_of_jax(outputs: tuple[Any, ...]) -> bool:
    """Returns whether outputs of a launch are JAX's, and not torch's."""
    return all(isinstance(output, jax.Array | Transposed) for output in outputs)


def wait(outputs: tuple[Any, ...]) -> None:
    """Waits until the launch that returned these outputs, and all before it, are done."""
    if is_of_jax(outputs):
        jax.block_until_ready(outputs)
    else:
        import torch

        torch.cuda.synchronize()


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
    for name, others in PROJECTS.items():
        if any(importlib.util.find_spec(package) is None for package in (name, *others)):
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
