"""Times the kernels over their named cases: `python -m benchmarks.kernels --json benchmarks/results/FILE.jsonl`.

Every case is compared with the "xla" implementation first, and isn't timed if they differ. The peers that can be imported
are timed in turn with ours, by the same clock on the same blocks, once their outputs agree with ours; the fastest is `peer`.
Prefill has its error against float64 and its span beside the time.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import peers, prefill, update
from benchmarks.kernel_benchmark import KernelBenchmark
from benchmarks.timing import copy_bandwidth, span_per_turn, time_per_turn
from mamba_align_jax.load.rows import environment

OPS = update.OPS | prefill.OPS
TURNS = 24
REPETITIONS = 5
SPAN_US = 20_000  # what a span is measured over, at least


def time_ours(benchmark: KernelBenchmark, **options: Any) -> Callable[[], float]:
    """A function that measures once: microseconds per turn."""
    launch = _launch(lambda inputs: benchmark.run(TURNS, inputs, implementation="triton", **options), benchmark)
    return lambda: time_per_turn(launch, TURNS, benchmark.kernel)


def _launch(run: Callable[[dict[str, Any]], tuple[jax.Array, ...]], benchmark: KernelBenchmark) -> Callable[[], Any]:
    """Runs a compiled `run` of the benchmark's inputs and waits."""
    compiled = jax.jit(lambda inputs: [x.reshape(-1)[:1] for x in run(inputs)]).lower(benchmark.inputs).compile()
    launch = lambda: jax.block_until_ready(compiled(benchmark.inputs))
    launch()
    return launch


def span_of_ours(benchmark: KernelBenchmark, us: float) -> float:
    """The span of a turn of about `us` microseconds."""
    rounds = _rounds(benchmark, us)
    run = lambda n: _launch(lambda inputs: benchmark.run_sets(n, inputs, implementation="triton"), benchmark)
    launches = {n: run(n) for n in (rounds, 2 * rounds)}
    return span_per_turn(lambda n: launches[n](), rounds, benchmark.span_sets)


def _rounds(benchmark: KernelBenchmark, us: float) -> int:
    return max(2, math.ceil(SPAN_US / (us * benchmark.span_sets)))


class Peer:
    """A peer of a benchmark, after its first turn: `error` is the distance from ours, `rms_error` that from float64."""

    def __init__(self, name: str, adapter: peers.Adapter, benchmark: KernelBenchmark):
        import torch

        self.name, self.benchmark = name, benchmark
        pools = jax.block_until_ready(jax.jit(benchmark.initial)())
        self.launch = adapter(benchmark, pools)
        outputs = [jnp.from_dlpack(x.contiguous()) for x in self.launch(0)]
        torch.cuda.synchronize()
        if len(outputs) == len(pools) > 0:
            given = benchmark.given
            outputs[0] = pools[0].at[0, given["write"][0]].set(outputs[0].astype(pools[0].dtype))
        # What the peer wrote is in the buffers of `pools`, of which the last are outputs' where it made its own.
        theirs = (*pools[: len(pools) - len(outputs)], *outputs)
        self.error = float(benchmark.difference(theirs, benchmark.first_turn(implementation="triton")))
        self.rms_error = benchmark.rms_error(theirs[-1])

    def turns(self, turns: int) -> None:
        """Runs some turns and waits."""
        import torch

        for turn in range(turns):
            self.launch(turn)
        torch.cuda.synchronize()

    def time(self) -> float:
        """Microseconds per turn."""
        return time_per_turn(lambda: self.turns(TURNS), TURNS)

    def span(self, us: float) -> float | None:
        """The span of a turn of about `us` microseconds, from a CUDA graph of the sets; None if it can't be captured."""
        import torch

        sets, graph = self.benchmark.span_sets, torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for turn in range(sets):
                    self.launch(turn)
        except RuntimeError as error:
            print(f"{self.benchmark.case.name}: no graph of {self.name} ({error})")
            return None

        def replay(rounds):
            for _ in range(rounds):
                graph.replay()
            torch.cuda.synchronize()

        return span_per_turn(replay, _rounds(self.benchmark, us), sets)


def find_peers(benchmark: KernelBenchmark) -> list[Peer]:
    """Those that compute the same."""
    found = []
    for name, adapter in peers.find(benchmark).items():
        try:
            peer = Peer(name, adapter, benchmark)
        except Exception as error:  # of any kind: not every peer takes every shape
            print(f"{benchmark.case.name}: {name} fails ({type(error).__name__}: {error})")
            continue
        if benchmark.accepts(peer.error, peer.rms_error):
            found.append(peer)
        else:
            print(f"{benchmark.case.name}: {name} computes something else (differs by {peer.error:.2g})")
    return found


def measure(benchmark: KernelBenchmark) -> dict[str, Any]:
    """One row of results, without the environment; no `us` if the outputs are wrong."""
    row: dict[str, Any] = {"case": benchmark.case.name, "implementation": "triton"}
    first = benchmark.first_turn(implementation="triton")
    row["max_error"] = float(benchmark.difference(first, benchmark.first_turn(implementation="xla")))
    rms_error = benchmark.rms_error(first[-1])
    if rms_error is not None:
        row["rms_error"] = rms_error
    if not benchmark.accepts(row["max_error"], rms_error):
        return row
    del first
    ours, found = time_ours(benchmark), find_peers(benchmark)
    for peer in found:
        peer.turns(TURNS)
    times: list[float] = []
    peer_times: dict[str, list[float]] = {peer.name: [] for peer in found}
    for _ in range(REPETITIONS):
        times.append(ours())
        for peer in found:
            peer_times[peer.name].append(peer.time())
    row |= {"us": statistics.median(times), "bytes": benchmark.bytes, "config": str(benchmark.config)}
    if benchmark.reference is not None:
        row["span_us"] = span_of_ours(benchmark, row["us"])
    if found:
        peer_us = {name: statistics.median(each) for name, each in peer_times.items()}
        peer = min(found, key=lambda peer: peer_us[peer.name])
        row |= {"peer": peer.name, "peer_us": peer_us.pop(peer.name), "peer_error": peer.error}
        row["ratio"] = row["us"] / row["peer_us"]
        if peer_us:
            row["other_peers"] = peer_us
        if benchmark.reference is not None:
            row |= {"peer_span_us": peer.span(row["peer_us"]), "peer_rms_error": peer.rms_error}
    return row


def _pair(row: dict[str, Any], column: str, how: str) -> str:
    """Ours, and the peer's in brackets."""
    ours, theirs = row[column], row.get(f"peer_{column}")
    return f"{ours:{how}}" + ("" if theirs is None else f" ({theirs:{how}})")


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
            benchmark = make(case)
            row = measure(benchmark)
            if "us" not in row:
                print(f"{case.name:40} WRONG: {row}, limit {benchmark.tolerance}")
                continue
            row |= {"bandwidth_fraction": row["bytes"] / row["us"] / rate, "copy_bandwidth_tb_s": rate / 1e6} | header
            line = f"{case.name:32} {row['us']:9.2f} us {row['bandwidth_fraction']:6.3f} of the copy rate"
            if "peer" in row:
                line += f"; {row['ratio']:5.2f} of {row['peer']}'s {row['peer_us']:.2f} us"
                line += f" (differs by {row['peer_error']:.1g})"
            if "span_us" in row:
                line += f"; span {_pair(row, 'span_us', '.2f')} us, rms error {_pair(row, 'rms_error', '.2g')}"
            if "other_peers" in row:
                line += "; also " + ", ".join(f"{name} {us:.2f} us" for name, us in row["other_peers"].items())
            print(line, flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
