"""`mamba-align env` says what a bug report needs, whatever is installed."""

import json
import subprocess
from importlib import metadata

import jax
import pytest
from packaging.requirements import Requirement

import mamba_align_jax
from mamba_align_jax.__main__ import main
from mamba_align_jax.cli import env


def test_versions_and_devices_are_in_a_line_each(capsys):
    assert main(["env"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["mamba-align-jax"] == mamba_align_jax.__version__
    assert f"jaxlib {metadata.version('jaxlib')}, " in lines["packages"]
    assert lines["devices of JAX"].startswith(f"kind {jax.devices()[0].device_kind}, bytes of memory ")
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["packages"]["jax"] == metadata.version("jax")


def test_an_extra_is_installed_if_all_that_it_needs_is(monkeypatch):
    needs = ["numpy>=2", "a>=1; extra == 'one'", "b_c; extra == 'one'", "a; extra == 'two'", "no; extra == 'two'"]
    needs += ["jax[cuda12]<1; extra == 'cuda12'", "jax[cuda13]<1; extra == 'cuda13'"]
    assert all(map(Requirement, needs))
    monkeypatch.setattr(metadata, "requires", lambda name: needs)
    assert env._extras({"a": "1", "b-c": "2", "jax": "3", "jax-cuda13-plugin": "3"}) == ["cuda13", "one"]

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert env._extras({"a": "1"}) == []


def test_gpus_are_those_of_the_driver(monkeypatch):
    output = "NVIDIA H200, 580.159.04, 143771 MiB, 4 MiB\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=2 * output))
    gpu = dict(name="NVIDIA H200", driver_version="580.159.04") | {"memory.total": "143771 MiB", "memory.used": "4 MiB"}
    assert env.environment()["GPUs by nvidia-smi"] == [gpu, gpu]


@pytest.mark.parametrize("error", [OSError("no such command"), subprocess.TimeoutExpired("nvidia-smi", 60)])
def test_what_is_not_there_is_said(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(jax, "local_devices", fail)
    found = env.environment()
    assert (found["GPUs by nvidia-smi"], found["devices of JAX"]) == (f"none: {error}", f"none: {error!r}")
