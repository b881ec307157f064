"""`mamba-align env`: what a bug report has to say of a machine. Needs no extra and no GPU."""

import argparse
import json
import platform
import re
import subprocess
from importlib import metadata
from typing import Any

from mamba_align_jax import __version__

ABOUT = "show versions, GPUs and extras, for a bug report"
_NAMES = ("jax", "jaxlib", "flax", "numpy")
_GPU_FIELDS = ("name", "driver_version", "memory.total", "memory.used")
# As `flax>=0.12.8; extra == 'models'` and `jax[cuda13]>=0.10.2; extra == 'cuda13'`.
_OF_EXTRA = re.compile(r"([\w.-]+)(?:\[(\w+)\])?.*extra == ['\"](\w+)['\"]")


def environment() -> dict[str, Any]:
    """Returns versions, the extras that are installed, and GPUs as their driver and as JAX has them.

    It starts JAX's backend, which takes as much of a GPU's memory as it takes for a server.
    """
    versions = {
        (each.metadata["Name"] or "").lower().replace("_", "-"): each.version for each in metadata.distributions()
    }
    # JAX's plugin and CUDA's libraries, whose names have CUDA's version.
    of_cuda = sorted(name for name in versions if name.startswith(("jax-cuda", "nvidia-cu")))
    return {
        "mamba-align-jax": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: versions.get(name, "not installed") for name in (*_NAMES, *of_cuda)},
        "extras": _extras(versions),
        "GPUs by nvidia-smi": _gpus(),
        "devices of JAX": _devices(),
    }


def _extras(versions: dict[str, str]) -> list[str]:
    """Returns the extras whose packages are all installed. A package that is run without an installation has none."""
    try:
        found = map(_OF_EXTRA.match, metadata.requires("mamba-align-jax") or ())
    except metadata.PackageNotFoundError:
        return []
    needs: dict[str, list[str]] = {}
    for name, plugin, extra in (each.groups() for each in found if each):
        needs.setdefault(extra, []).append(f"{name}-{plugin}-plugin" if plugin else name.lower().replace("_", "-"))
    return sorted(extra for extra, names in needs.items() if versions.keys() >= {*names})


def _gpus() -> list[dict[str, str]] | str:
    command = ["nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    except (OSError, subprocess.SubprocessError) as error:
        return f"none: {error}"
    return [dict(zip(_GPU_FIELDS, line.split(", "), strict=False)) for line in lines]


def _devices() -> list[dict[str, Any]] | str:
    try:
        import jax

        devices = jax.local_devices()
    except Exception as error:  # a plugin that doesn't fit its driver raises errors of many types
        return f"none: {error!r}"
    # A CPU reports no memory.
    memory = [(device.memory_stats() or {}).get("bytes_limit", "unknown") for device in devices]
    return [
        {"kind": one.device_kind, "bytes of memory by JAX's own share": size}
        for one, size in zip(devices, memory, strict=True)
    ]


def main(arguments: list[str]) -> int:
    """Prints the environment, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="mamba-align env", description=ABOUT)
    parser.add_argument("--json", action="store_true", help="write JSON")
    options, found = parser.parse_args(arguments), environment()
    print(json.dumps(found, indent=2) if options.json else "\n".join(f"{name}: {_text(found[name])}" for name in found))
    return 0


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items())
    return "; ".join(map(_text, value)) if isinstance(value, list) else str(value)
