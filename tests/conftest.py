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
        # Not its keywords: the name of a directory is one.
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="module")
def quick_compilation():
    """For programs that run a few steps on a CPU: compiling them well would take longer."""
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() != "gpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
