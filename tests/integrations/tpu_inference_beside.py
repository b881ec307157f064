"""Runs tpu-inference's tests of its kernel on ours, and compares ours with the eager references of these tests.

It runs in an environment with the JAX of tpu-inference, where neither vLLM nor a TPU is installed. The package's
`__init__` needs both, so its folder is made importable without running that file. All modules below it are its own.
"""

import importlib
import importlib.util
import sys
import time
import unittest
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from mamba_align_jax.integrations.tpu_inference import conv1d_gdn

SIZES = dict(n_kq=2, n_v=4, d_k=64, d_v=64, kernel_size=4)
CHANNELS, SLOTS = (2 * SIZES["n_kq"] + SIZES["n_v"]) * 64, 24
# Both sides compute in float32, one by chunks and one token by token.
TOLERANCE = 2e-5


def load(folder):
    """Imports the kernel's module and the module of its tests."""
    package = ModuleType("tpu_inference")
    package.__path__ = [str(folder / "tpu_inference")]
    sys.modules["tpu_inference"] = package
    wrapper = importlib.import_module("tpu_inference.kernels.gdn.v3.wrapper")
    spec = importlib.util.spec_from_file_location("its_tests", folder / "tests/kernels/gdn_attention_v3_test.py")
    tests = importlib.util.module_from_spec(spec)
    sys.modules["its_tests"] = tests
    spec.loader.exec_module(tests)
    return wrapper, tests


def draw(lengths, read, write, computed, early):
    """Draws the arguments of a step in the order of the kernel, all pools full of numbers."""
    rng, tokens = np.random.default_rng(1), sum(lengths)
    normal = lambda *shape: jnp.array(rng.normal(size=shape), jnp.float32)
    ints = lambda x: jnp.array(x, jnp.int32)
    heads, key_dim, value_dim = SIZES["n_v"], SIZES["d_k"], SIZES["d_v"]
    return dict(
        qkv=normal(tokens, CHANNELS), b=normal(tokens, heads), a=normal(tokens, heads),
        conv_state=normal(SLOTS, 3, CHANNELS), recurrent_state=normal(SLOTS, heads, key_dim, value_dim),
        conv_weight=normal(CHANNELS, 1, 4), conv_bias=normal(CHANNELS), a_log=normal(heads), dt_bias=normal(heads),
        query_start_loc=ints(np.concatenate([[0], np.cumsum(lengths)])), state_indices=ints(write),
        distribution=ints([early, early, len(lengths)]), seq_lens=ints(lengths) + ints(computed),
        read_state_indices=ints(read),
    )  # fmt: skip


def steps(tests):
    """Yields the name, our results and those of the eager reference, for several steps."""
    # There are two references: one reads and writes different slots, the other writes a slot per draft token.
    for name, lengths, read, write, computed, early in (
        ("decode rows", [1] * 5, [1, 2, 3, 4, 5], [1, 2, 6, 4, 7], [9, 0, 64, 3, 128], 5),
        ("decode and prefill rows", [1, 1, 70, 130, 3], [1, 2, 3, 4, 5], [1, 6, 3, 7, 8], [9, 64, 0, 64, 5], 2),
    ):
        step = draw(lengths, read, write, computed, early)
        right = tests.gdn_attention_ref(**step, **SIZES)
        yield name, conv1d_gdn(**jax.tree.map(jnp.copy, step), **SIZES), right
    group = [1, 6, 11, 16]
    step = draw([5, 3, 1, 2], group, group, [16, 64, 5, 0], 4)
    offsets = jnp.array([2, 0, 4, 0], jnp.int32)
    given = {name: x for name, x in step.items() if name not in ("distribution", "read_state_indices")}
    right = tests.gdn_attention_spec_ref(**given, read_offsets=offsets, num_spec_seqs=4, **SIZES)
    ours = conv1d_gdn(**jax.tree.map(jnp.copy, step), read_offsets=offsets, **SIZES, num_spec_tokens=4)
    yield "verify rows", ours, right


def main():
    folder, begin = Path(sys.argv[1]), time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begin:4.0f} s: {text}", flush=True)
    say(f"Python, JAX, NumPy: {sys.version.split()[0]} {jax.__version__} {np.__version__}, on a CPU")
    wrapper, tests = load(folder)
    failed = False
    for name, ours, right in steps(tests):
        errors = jax.tree.leaves(jax.tree.map(lambda x, y: float(jnp.abs(x - y).max() / jnp.abs(y).max()), ours, right))
        failed |= not max(errors) < TOLERANCE
        text = "windows {:.0e}, states {:.0e}, outputs {:.0e}".format(*errors)
        say(f"{name}: largest errors relative to the eager reference: {text}")
    assert tests.wrapper is wrapper
    wrapper.fused_conv1d_gdn = conv1d_gdn
    result = unittest.TextTestRunner(stream=sys.stderr).run(unittest.defaultTestLoader.loadTestsFromModule(tests))
    if failed or not result.wasSuccessful() or not result.testsRun:
        raise SystemExit("integrations: failed")
    say(f"tests/kernels/gdn_attention_v3_test.py: {result.testsRun} tests of tpu-inference pass on our kernel")


if __name__ == "__main__":
    main()
