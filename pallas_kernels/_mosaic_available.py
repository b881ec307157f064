"""The check whether Mosaic GPU kernels can be built, before any module of Mosaic GPU is imported.

An op imports its kernels, and with them `hopper`, if `unavailable` returns None. Mosaic GPU may
need packages that are not installed with JAX (in JAX 0.10 absl), and takes time to import.
"""

import importlib

import jax

from pallas_kernels.dispatch import Run, warn_once

HOPPER = "9.0"  # the compute capability for which the tensor cores' instructions are written
OLDEST_JAX = (0, 11, 2)


def unavailable(run: Run) -> str | None:
    """Return why Mosaic GPU kernels cannot run, or None if they can. It may start JAX's backends.

    If there is no other reason, it imports Mosaic GPU. A failed import is a reason as well, and is logged once if no
    implementation is named.

    Args:
        run: How the caller wants the op to run. A named kernel may be lowered for another device than JAX's default.
            Only Triton kernels have configurations, and only they can run as plain JAX.
    """
    if run.implementation in ("xla", "triton"):
        return "another implementation is named"
    if jax.__version_info__ < OLDEST_JAX:
        return f"Mosaic GPU kernels need JAX {'.'.join(map(str, OLDEST_JAX))} or newer, got {jax.__version__}"
    if run.config is not None:
        return "a configuration of the Triton kernel is given"
    if run.interpret:
        return "the kernels cannot be interpreted"
    if run.implementation is None:
        if jax.default_backend() != "gpu":
            return "there is no GPU"
        found = getattr(jax.devices()[0], "compute_capability", None)
        if found != HOPPER:
            return f"the kernels need a GPU of compute capability {HOPPER}, got {found}"
    try:
        importlib.import_module("pallas_kernels.hopper")
    except (ImportError, AttributeError) as error:
        reason = f"JAX's Mosaic GPU cannot be imported: {error}"
        if run.implementation is None:
            warn_once(f"no Mosaic GPU kernel can run, and Triton's run instead: {reason}")
        return reason
    return None
