"""Tests of which columns a device has; and a process that simulates four devices for the tests that need them."""

import os
import subprocess
import sys
from pathlib import Path

import depth
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.sharding import Part, columns, devices, repeats

ROOT = Path(__file__).parents[2]
LIMIT = 1000  # seconds, a few times what it takes on two cores


@given(st.data(), st.sampled_from([1, 2, 3, 4, 8]))
def test_device_has_its_heads_of_every_part(data, devices):
    parts, wanted, start = [], [[] for _ in range(devices)], 0
    for _ in range(data.draw(st.integers(1, 4))):
        heads, dim = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
        copies = repeats(heads, devices)
        parts.append(Part(heads, dim, copies))
        for place in range(heads * copies):
            head = start + place // copies * dim
            wanted[place * devices // (heads * copies)] += range(head, head + dim)
        start += heads * dim
    assert columns(parts, devices).reshape(devices, -1).tolist() == wanted


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_queries_find_their_key_heads(key_heads, devices, ratio):
    """Key heads are repeated as often as is needed to divide them, and a device has those of its queries, in order."""
    heads = np.lcm(key_heads, devices) * ratio
    copies = repeats(key_heads, devices)
    assert key_heads * copies % devices == 0
    assert all(key_heads * fewer % devices for fewer in range(1, copies))
    key_of = np.arange(heads) * key_heads // heads
    for device, (own, keys) in enumerate(
        zip(
            np.split(np.arange(heads), devices),
            np.split(columns([Part(key_heads, 1, copies)], devices), devices),
            strict=True,
        )
    ):
        found = [keys[n * len(keys) // len(own)] for n in range(len(own))]
        assert found == key_of[own].tolist(), device


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="must be a multiple of 4 devices, got 6"):
        columns([Part(6, 8)], 4)


@pytest.mark.parametrize("mesh", [5, "tensor", None, (1, 2)])
def test_what_is_no_mesh_is_refused_by_name(mesh):
    with pytest.raises(ValueError, match=r"mesh must be a jax\.sharding\.Mesh, got "):
        devices(mesh)


@pytest.mark.parametrize("name", ["four_devices.py", "layouts_on_devices.py"])
def test_on_several_devices(name, pytestconfig):
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # XLA on a CPU needs more threads than devices: a triangular solve waits in one thread for others.
    environment = {**os.environ, "PYTHONPATH": path, "NPROC": "16", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "pytest", "-v", "--durations=9", "-p", "no:cacheprovider"]
    asked = pytestconfig.getoption("depth")
    command += [f"--depth={'quick' if asked == 'full' and not depth.is_full() else asked}"]
    # A process that hangs first says where, and then ends: it must not stop the whole suite.
    command += ["-o", f"faulthandler_timeout={LIMIT // 2}", str(Path(__file__).with_name(name))]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT
        )
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{name} took more than {LIMIT} s, so far:\n{(late.stdout or b'').decode()}")
    assert done.returncode == 0, done.stdout.decode()
    print(done.stdout.decode())
