"""The launch of a kernel whose arrays, SMEM and barriers have names."""

from collections.abc import Callable, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import jax

from pallas_kernels.hopper.barriers import WARPGROUP
from pallas_kernels.hopper.lowering import fast_math, kernel

_NONE: Mapping[str, Any] = MappingProxyType({})


def launch(
    body: Callable[[SimpleNamespace], None],
    *,
    name: str,
    grid: Mapping[str, int],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    updates: Mapping[str, jax.Array] = _NONE,
    scratch: Mapping[str, Any] = _NONE,
    warpgroups: int = 1,
    is_fast: bool = False,
) -> dict[str, jax.Array]:
    """Launch a kernel on references to whole arrays. Return its outputs and the updated arrays, by name.

    Args:
        body: The code of a CTA. Its argument has an attribute for each name in `inputs`, `updates`, `outputs`, `scratch`.
        name: The name of the launch in a profile.
        grid: The names of the grid's axes, and the number of CTAs along each.
        inputs: Arrays that are read. None stands for an array that is left out.
        outputs: Arrays that are written.
        updates: Arrays that are read and written in place.
        scratch: A CTA's SMEM and barriers.
        warpgroups: The number of a CTA's warpgroups.
        is_fast: Whether exponentials and quotients are approximations: see `fast_math`.
    """
    given = {key: x for key, x in inputs.items() if x is not None}
    updated = {key: jax.new_ref(x) for key, x in updates.items()}
    names = [*given, *updated, *outputs, *scratch]

    def run(*arrays: Any) -> None:
        body(SimpleNamespace(**(dict.fromkeys(inputs) | dict(zip(names, arrays, strict=True)))))

    options = dict(num_threads=warpgroups, thread_name=WARPGROUP) if warpgroups > 1 else {}
    results = kernel(
        run,
        out_type=tuple(outputs.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=list(scratch.values()),
        kernel_name=name,
        **(options | dict(compiler_params=fast_math()) if is_fast else options),
    )(*given.values(), *updated.values())
    return dict(zip(outputs, results, strict=True)) | {key: jax.freeze(x) for key, x in updated.items()}
