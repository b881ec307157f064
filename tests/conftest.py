import os

# OpenBLAS' threads wait for each other a thousand times longer than the triangular system of a chunk takes.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import numpy as np
import pytest
from hypothesis import Phase, settings

jax.config.update("jax_numpy_dtype_promotion", "strict")

# On a CPU compiling programs well takes longer than running them. JAX_DISABLE_MOST_OPTIMIZATIONS=0 compiles as users do.
QUICK = "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ
if QUICK and jax.__version_info__ < (0, 11):
    # A third less to do for this compiler; later ones don't know the flag.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"

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


@pytest.fixture(scope="module", autouse=True)
def programs():
    """How a module's programs are compiled, and that they go with it."""
    if QUICK and jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
    yield
    # A program holds memory maps, of which Linux gives a process 65,530: those of the whole suite are more, and XLA crashes.
    jax.clear_caches()


@pytest.fixture
def optimized_programs():
    """For tests that look at what a compiler makes of a program, or run for long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def one_program():
    """One program for all steps of an engine, whatever rows they have: compiling takes longer than padding."""
    from mamba_align_jax.engine.runner import Bucket, StepRunner

    with pytest.MonkeyPatch.context() as patch:
        every = lambda runner: [
            Bucket(runner.spec.max_num_seqs, runner.max_prefill_rows, runner.max_num_batched_tokens)
        ]
        patch.setattr(StepRunner, "buckets", property(every))
        yield


@pytest.fixture
def rng():
    return np.random.default_rng(0)
