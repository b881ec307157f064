"""Programs set JAX as they like: ops, an engine and the README's step compute the same under each setting.

Each setting has a process of its own, `under_settings.py`. One with JAX's defaults says what is right. Bits are equal,
except those of log-probabilities: sums over the vocabulary, which XLA may add in another order.
"""

import functools
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import under_settings

from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level

ROOT = Path(__file__).parents[1]
PARTS = "ops", "engine none", "foreign step"
# What drafts has no code that depends on the other settings.
DRAFTS, CHANGE_TYPES = ("engine prompt_lookup", "engine mtp"), ("64-bit types", "no promotion", "transfer guard")
# Sums of 256 numbers, in float32.
LOGPROB_ERROR = 256 * 2.0**-24
SETTINGS = {
    "64-bit types": dict(jax_enable_x64=True),
    "no promotion": dict(jax_numpy_rank_promotion="raise", jax_numpy_dtype_promotion="strict"),
    "transfer guard": dict(jax_transfer_guard="disallow"),
    "NaN check": dict(jax_debug_nans=True),
    "leak check": dict(jax_check_tracer_leaks=True),
    "rbg keys": dict(jax_default_prng_impl="rbg"),
    "unsafe rbg keys": dict(jax_default_prng_impl="unsafe_rbg"),
    "bfloat16 products": dict(jax_default_matmul_precision="bfloat16"),
    "float32 products": dict(jax_default_matmul_precision="highest"),
}


@pytest.fixture(scope="module")
def compute(tmp_path_factory):
    """Runs parts in a process with settings, and returns what they compute by name."""
    found = {}

    def compute(settings, *parts):
        given = json.dumps(settings), *parts
        if given in found:
            return found[given]
        file = tmp_path_factory.mktemp("settings") / "found.npz"
        command = [sys.executable, str(ROOT / "tests" / "under_settings.py"), given[0], str(file), *parts]
        quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(jax.config.read("jax_disable_most_optimizations")))}
        paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
        done = subprocess.run(command, env=os.environ | quick | paths, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        with np.load(file) as arrays:
            found[given] = dict(arrays)
        return found[given]

    return compute


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        if "scores" in name:
            numbers = (x[name].view(np.float32) for x in (found, wanted))
            np.testing.assert_allclose(*numbers, rtol=0, atol=LOGPROB_ERROR, err_msg=name)
        else:
            assert np.array_equal(found[name], wanted[name]), name


@pytest.mark.deep
@pytest.mark.parametrize(
    ("setting", "part"),
    [*itertools.product(SETTINGS, PARTS), *itertools.product(CHANGE_TYPES, DRAFTS)],
)
def test_a_setting_of_jax_changes_nothing(compute, setting, part):
    assert_same(compute(SETTINGS[setting], part), compute({}, part))


def test_64_bit_types_reach_no_op_and_no_rank_is_promoted():
    """Kernels are traced on a CPU too, and tracing them takes a part of the time of compiling them."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        found = jax.eval_shape(functools.partial(under_settings.run_ops, None))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found)} == {"int32", "float32", "bfloat16"}


@pytest.mark.parametrize("speculation", ["prompt_lookup", pytest.param("mtp", marks=pytest.mark.deep)])
def test_64_bit_types_reach_no_step_and_no_rank_is_promoted(speculation):
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
        engine, _ = under_settings.make_engine(speculation)
        traced = engine.runner.trace(Bucket(*engine.runner.buckets[0][:3], Level.FULL))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(traced.out_info)} == {"int32", "float32"}
