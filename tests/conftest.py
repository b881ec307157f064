import os

# OpenBLAS' threads wait for each other a thousand times longer than the triangular system of a chunk takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest
from hypothesis import Phase, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")

# For --hypothesis-profile: whether something fails, not the smallest example of it.
settings.register_profile("no_shrinking", phases=[Phase.explicit, Phase.generate], database=None)


def pytest_collection_modifyitems(items):
    if jax.default_backend() == "gpu":
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def programs():
    """How a module's programs are compiled, and that they go with it.

    On a CPU compiling them well takes longer than running them. JAX_DISABLE_MOST_OPTIMIZATIONS=0 is how users compile.
    """
    if jax.default_backend() == "cpu" and "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    # A program holds memory maps, of which Linux gives a process 65,530: those of the whole suite are more, and XLA crashes.
    jax.clear_caches()


@pytest.fixture(scope="module")
def optimized_programs(programs):
    """For a module that looks at what a compiler makes of a program, or runs for long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
