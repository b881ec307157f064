"""The language of Hopper kernels: its page in `pallas_kernels/hopper/__init__.py`, and what its operators write."""

import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.lowered_cases import array, lower
from kernels.threads_in_numpy import Ref, Threads, fake

from pallas_kernels import hopper


def smallest_kernel():
    """The kernel that the language's page shows, as text."""
    return textwrap.dedent(re.search(r"\n(    def body\(.*?)\n\n\w", hopper.__doc__, re.DOTALL)[1])


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2")
def test_the_smallest_kernel_of_the_page_lowers():
    def run(x):
        names = dict(hp=hopper, jax=jax, jnp=jnp, x=x)
        exec(smallest_kernel(), names)
        return names["out"]

    assert lower("NVIDIA H200", run, array(jnp.float32, 128), donated=()).count("@mosaic_gpu_v2(") == 1


def test_the_smallest_kernel_of_the_page_adds_a_constant(monkeypatch):
    threads = Threads()
    monkeypatch.setattr(Ref, "threads", threads)
    names = dict(hp=fake(threads))
    exec(smallest_kernel().partition("\nout =")[0], names)
    x, out = np.arange(128, dtype=np.float32), np.full(128, np.nan, np.float32)
    names["body"](Ref(x), Ref(out))
    np.testing.assert_array_equal(out, x + 1)
