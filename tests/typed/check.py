"""Checks `uses.py` with pyrefly and with mypy, as users of the installed package do: `make lint` runs it.

Every line that is marked as wrong must be an error to each of them, and no other line.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

USES = Path(__file__).with_name("uses.py")
BIN = Path(sys.executable).parent


def by_mypy(folder: Path) -> set[int]:
    """The lines in which mypy finds errors."""
    options = ["--python-executable", sys.executable, "--output", "json", "--cache-dir", str(folder / "cache")]
    found = run(folder, [BIN / "mypy", *options, USES.name])
    return {error["line"] for error in map(json.loads, found.splitlines()) if error["severity"] == "error"}


def by_pyrefly(folder: Path) -> set[int]:
    """The lines in which pyrefly finds errors."""
    # Without a file of its own pyrefly leaves out most kinds of errors.
    (folder / "pyrefly.toml").write_text(f'project-includes = ["{USES.name}"]\n')
    options = ["--python-interpreter-path", sys.executable, "--output-format", "json"]
    found = run(folder, [BIN / "pyrefly", "check", *options])
    return {error["line"] for error in json.loads(found)["errors"]}


def run(folder: Path, command: list) -> str:
    """Runs a checker in a folder that has the file alone, so that it finds the package where it is installed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 1:  # 0 would mean that it finds no error at all
        raise SystemExit(f"{command[0].name} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def main() -> int:
    """Returns 1 if a checker finds other lines than those that are marked."""
    lines = enumerate(USES.read_text().splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    status = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(USES, folder)
        for check in (by_pyrefly, by_mypy):
            found = check(folder)
            for number in sorted(found ^ wrong):
                what = "an error that it should not be" if number in found else "no error"
                print(f"{USES.name}:{number}: {what}, {check.__name__.replace('_', ' ')}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
