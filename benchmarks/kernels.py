"""Times the kernels over their named cases: `python -m benchmarks.kernels --json benchmarks/results/FILE.jsonl`.

Every case is compared with the "xla" implementation first, and isn't timed if they differ. A peer that can be imported is
timed in turn with ours, by the same clock on the same blocks, once its outputs agree with ours.
"""

import argparse
import json
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import peers
from benchmarks.timing import copy_bandwidth, environment, time_per_turn
from benchmarks.workloads import OPS, Workload

TURNS = 24
REPETITIONS = 5


def time_ours(workload: Workload, repetitions: int = REPETITIONS, **options: Any):
    """A function that measures once: microseconds per turn."""
    run = jax.jit(lambda: [x.reshape(-1)[:1] for x in workload.run(TURNS, implementation="triton", **options)])
    jax.block_until_ready(run())
    return lambda: time_per_turn(lambda: jax.block_until_ready(run()), TURNS, workload.kernel)


def time_peer(workload: Workload):
    """What `peers.find` has that computes the same: name, distance of its first turn from ours, and a function as above."""
    pools = jax.block_until_ready(jax.jit(workload.initial)())
    found = peers.find(workload, pools)
    if found is None:
        return None
    import torch

    name, launch = found
    outputs = [jnp.from_dlpack(x) for x in launch(0)]
    torch.cuda.synchronize()
    # What the peer wrote is in the buffers of `pools`, of which the last are outputs' where it made its own.
    theirs = (*pools[: len(pools) - len(outputs)], *outputs)
    error = float(workload.difference(theirs, jax.jit(lambda: workload.run(1, implementation="triton"))()))
    if error > workload.tolerance:
        print(f"{workload.case.name}: {name} computes something else (differs by {error:.2g})")
        return None

    def turns():
        for turn in range(TURNS):
            launch(turn)
        torch.cuda.synchronize()

    turns()
    return name, error, lambda: time_per_turn(turns, TURNS)


def measure(workload: Workload) -> dict[str, Any]:
    """One row of results, without the environment; only `case` and `max_error` if the outputs are wrong."""
    row: dict[str, Any] = {"case": workload.case.name, "implementation": "triton"}
    row["max_error"] = float(workload.error(implementation="triton"))
    if not row["max_error"] <= workload.tolerance:
        return row
    ours, peer = time_ours(workload), time_peer(workload)
    times, peer_times = [], []
    for _ in range(REPETITIONS):
        times.append(ours())
        if peer is not None:
            peer_times.append(peer[2]())
    row |= {"us": statistics.median(times), "bytes": workload.bytes, "config": str(workload.config)}
    if peer is not None:
        name, error, _ = peer
        row |= {"peer": name, "peer_us": statistics.median(peer_times), "peer_error": error}
        row["ratio"] = row["us"] / row["peer_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(OPS), action="append", help="default: all")
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    parser.add_argument("--json", help="append one JSON row per case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    rate, header = copy_bandwidth(), environment(options.commit)
    print(f"{header}\ncopy bandwidth {rate / 1e6:.2f} TB/s")
    for op in options.op or OPS:
        cases, make = OPS[op]
        for case in cases:
            if options.case and case.name not in options.case:
                continue
            workload = make(case)
            row = measure(workload)
            if "us" not in row:
                print(f"{case.name:40} WRONG: max error {row['max_error']}, limit {workload.tolerance}")
                continue
            row |= {"bandwidth_fraction": row["bytes"] / row["us"] / rate, "copy_bandwidth_tb_s": rate / 1e6} | header
            line = f"{case.name:32} {row['us']:9.2f} us {row['bandwidth_fraction']:6.3f} of the copy rate"
            if "peer" in row:
                line += f"; {row['ratio']:5.2f} of {row['peer']}'s {row['peer_us']:.2f} us"
                line += f" (differs by {row['peer_error']:.1g})"
            print(line, flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
