"""Prints how long the GPU waits between steps: `python -m benchmarks.idle FILE.xplane.pb --steps N`.

The trace must hold N equal steps and nothing else; see `mamba_align_jax.load.idle`.
"""

import argparse
from pathlib import Path

from mamba_align_jax.load import idle

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "trace", type=Path, help="a trace of JAX's profiler, as `--idle` of the serving benchmark makes it"
    )
    parser.add_argument("--steps", type=int, required=True, help="the number of steps in the trace")
    options = parser.parse_args()
    print(idle.read(options.trace, options.steps))
