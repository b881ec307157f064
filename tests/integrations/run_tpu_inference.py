"""Runs this library's backend beside the reference of tpu-inference, in an environment of its own.

It compares the recorded signatures with those of the package, and runs `tpu_inference_beside.py` there.
"""

import argparse
import os
import subprocess
from pathlib import Path

import run
import tpu_inference_signatures


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tpu_inference", type=Path, help="the unpacked wheel of tpu-inference")
    parser.add_argument("--python", help="the Python of an environment that has what tpu_inference.txt lists")
    options = parser.parse_args()
    folder = options.tpu_inference.resolve()
    (wheel,) = folder.glob("tpu_inference-*.dist-info")
    print(f"{wheel.stem.replace('-', ' ')}", flush=True)
    if tpu_inference_signatures.signatures(folder) != tpu_inference_signatures.recorded():
        raise SystemExit(f"integrations: {tpu_inference_signatures.RECORDED} has other signatures than {folder}")
    print("the recorded signatures are those of the package", flush=True)
    python = options.python or run.environment("tpu_inference")
    env = os.environ | {"PYTHONPATH": str(run.ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run([python, run.HERE / "tpu_inference_beside.py", folder], env=env, check=True)


if __name__ == "__main__":
    main()
