"""Installs the wheel into bare environments, as users do, and uses it there. `.ci/run` runs it beside other parts.

Each Python and each extra is in one environment, so not every pair is tried. The extras for CUDA are resolved only.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The Python, the extra, and what `mamba-align` without arguments answers there.
ENVIRONMENTS = [
    ("3.11", "", "needs the extra 'cli'"),
    ("3.12", "cli", "usage: mamba-align"),
    ("3.13", "", "needs the extra 'cli'"),
    ("3.13", "models", "usage: mamba-align"),  # flax needs rich too
    ("3.11", "serve", "usage: mamba-align"),
]
RESOLVED = ("cuda12", "cuda13")
IMPORTS = {
    "": "from mamba_align_jax import StatePool, begin_step",
    "models": "from mamba_align_jax import Engine",
    "cli": "import mamba_align_jax.cli.commands",
    "serve": "from mamba_align_jax.serve.app import create_app",
}


def interpreter(version: str) -> str | None:
    """A Python of this version that runs: on the path, or pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for found in (f"python{version}", *map(str, sorted((root / "versions").glob(f"{version}.*/bin/python{version}")))):
        try:
            subprocess.run([found, "-c", ""], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            continue
        return found
    return None


def run(*command: str | Path, folder: Path, status: int = 0) -> str:
    """Runs a command outside the repository, so that only what is installed is imported. Returns all that it printed."""
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != status:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}, not {status}:\n{done.stdout}")
    return done.stdout


def check_page(wheel: Path) -> None:
    """Checks that the README, as an index page shows it, has no link that leads into the repository but is not absolute."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        page = archive.read(name).decode().split("\n\n", 1)[1]
    targets = re.findall(r"\]\(([^)\s]+)\)", page)
    relative = [target for target in targets if not target.startswith("https://")]
    assert targets, "the page has no link"
    assert not relative, f"links that are not absolute: {relative}"


def use(python: str, wheel: Path, extra: str, answer: str, folder: Path) -> None:
    """Makes an environment in `folder` and installs the wheel with an extra, if it is not empty. Uses it in every way."""
    run(python, "-m", "venv", "environment", folder=folder)
    bin = folder / "environment" / "bin"
    run(bin / "pip", "install", "--quiet", f"{wheel}[{extra}]" if extra else wheel, folder=folder)
    run(bin / "python", "-W", "error::ImportWarning", "-c", IMPORTS[extra], folder=folder)
    run(bin / "python", ROOT / "examples" / "foreign_step.py", folder=folder)
    version = run(bin / "python", "-c", "import mamba_align_jax as ma; print(ma.__version__)", folder=folder).strip()
    for command in ([bin / "mamba-align"], [bin / "python", "-m", "mamba_align_jax"]):
        assert run(*command, "--version", folder=folder) == f"mamba-align {version}\n"
        said = run(*command, folder=folder, status=2)
        assert answer in said, said
        assert f"mamba-align-jax: {version}\n" in run(*command, "env", folder=folder)
    if not extra:
        for name in RESOLVED:
            run(bin / "pip", "install", "--quiet", "--dry-run", f"{wheel}[{name}]", folder=folder)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if an interpreter is missing. Whatever else fails ends the program with its output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheel", type=Path, help="default: it is built")
    options = parser.parse_args(arguments)
    status = 0
    with tempfile.TemporaryDirectory() as name:
        wheel = options.wheel
        if wheel is None:
            run(sys.executable, "-m", "build", "--wheel", "--outdir", name, ROOT, folder=Path(name))
            (wheel,) = Path(name).glob("*.whl")
        check_page(wheel)
        for version, extra, answer in ENVIRONMENTS:
            python = interpreter(version)
            if python is None:
                print(f"Python {version} was not found: the wheel is not tried with it")
                status = 1
                continue
            with tempfile.TemporaryDirectory() as folder:
                use(python, wheel.resolve(), extra, answer, Path(folder))
            print(f"Python {version}, {extra or 'core alone'}: right", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
