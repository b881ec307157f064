"""Runs replicas of the bundled model behind other people's routers: `make replicas`.

Each router has a virtual environment of its own in build/replicas. The environments also see the packages of the project's.
Nothing is skipped: what is missing is a failure.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from checks import a_death_loses_nothing, hits_stay
from fleets import BehindVllmRouter, UnderRay, wait_for

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "replicas"
FLEETS = {"vllm_router": BehindVllmRouter, "ray_serve": UnderRay}


def environment(name):
    """Makes a router's environment unless its requirements are those of the last time. Returns its Python."""
    folder, requirements = BUILD / name, HERE / f"{name}.txt"
    stamp, wanted = folder / "requirements.txt", f"{sys.executable}\n{requirements.read_text()}"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = folder / "bin" / "python"
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        packages = Path(
            subprocess.run([python, "-c", where], check=True, capture_output=True, text=True).stdout.strip()
        )
        # What the project has is not installed again.
        (packages / "project.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "-r", requirements], check=True)
        stamp.write_text(wanted)
    return folder / "bin" / "python"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=FLEETS, help="run this router only")
    parser.add_argument("--install", action="store_true", help="make the environments, and end")
    options = parser.parse_args()
    begin = time.monotonic()
    say = lambda text: print(f"{time.monotonic() - begin:.0f} s: {text}", flush=True)
    BUILD.mkdir(parents=True, exist_ok=True)
    # All replicas have the same programs.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(BUILD / "programs"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    chosen = (options.only,) if options.only else FLEETS
    pythons = {name: environment(name) for name in chosen}
    say("the environments are ready")
    if options.install:
        return
    for name, python in pythons.items():
        fleet = FLEETS[name](python, BUILD / f"{name}.log")
        try:
            wait_for("both replicas", fleet.is_whole)
            say(f"{name}: both replicas are ready")
            for check in (hits_stay, a_death_loses_nothing):
                say(f"{name}: {check.__name__.replace('_', ' ')}: {check(fleet)}")
        except BaseException:
            print(fleet.log.read_text()[-6000:], file=sys.stderr)
            raise
        finally:
            fleet.stop()
    say("all routers did as they should")


if __name__ == "__main__":
    main()
