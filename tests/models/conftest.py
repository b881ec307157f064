import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """For programs that run a few steps: compiling them well would take longer."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
