"""Times the kernels over their named cases: `python -m benchmarks.kernels --json benchmarks/results/FILE.jsonl`.

Each case is first compared with the "xla" implementation, and is not timed if the results differ. Other projects'
kernels (peers) that can be imported are timed alternately with ours, by the same clock and on the same blocks, if their
outputs agree with ours. A row's `peer` is the fastest of them. Rows of prefill ops also have the error relative to
float64 and the span, which is the wall-clock time from the start of a turn to the start of the next.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import peers, prefill, update
from benchmarks.cases import cases_named
from benchmarks.kernel_benchmark import KernelBenchmark
from benchmarks.rows import append, environment
from benchmarks.timing import copy_bandwidth, span_per_turn, time_per_turn

OPS = update.OPS | prefill.OPS
TURNS = 24
REPETITIONS = 5
MIN_SPAN_US = 20_000  # the shortest time over which a span is measured


def time_ours(benchmark: KernelBenchmark, **options: Any) -> Callable[[], float]:
    """Compiles, and returns a function that measures once and returns microseconds per turn.

    `options` are the op's, by default the implementation that the op selects.
    """
    options = options or dict(implementation=benchmark.implementation)
    launch = _launch(lambda inputs: benchmark.run(TURNS, inputs, **options), benchmark)
    return lambda: time_per_turn(launch, TURNS, benchmark.kernel)


def _launch(run: Callable[[dict[str, Any]], tuple[jax.Array, ...]], benchmark: KernelBenchmark) -> Callable[[], Any]:
    """Compiles `run` and returns a function that runs it on the benchmark's inputs and waits."""
    compiled = jax.jit(lambda inputs: [x.reshape(-1)[:1] for x in run(inputs)]).lower(benchmark.inputs).compile()

    def launch():
        return jax.block_until_ready(compiled(benchmark.inputs))

    launch()
    return launch


def span_of_ours(benchmark: KernelBenchmark, us: float) -> float:
    """Measures the span of a turn that takes about `us` microseconds."""
    rounds = _rounds(benchmark, us)

    def launch(n):
        return _launch(lambda inputs: benchmark.run_sets(n, inputs, implementation=benchmark.implementation), benchmark)

    launches = {n: launch(n) for n in (rounds, 2 * rounds)}
    return span_per_turn(lambda n: launches[n](), rounds, benchmark.span_sets)


def _rounds(benchmark: KernelBenchmark, us: float) -> int:
    return max(2, math.ceil(MIN_SPAN_US / (us * benchmark.span_sets)))


class Peer:
    """Another project's kernel for a benchmark, after its first turn.

    Attributes:
        name: The project's name.
        benchmark: The benchmark.
        launch: Starts the turn with a given number, without waiting for it.
        error: The largest difference of its first turn from ours.
        rms_error: The error of its first turn's outputs relative to float64, or None without a reference.
    """

    def __init__(self, name: str, adapter: peers.Adapter, benchmark: KernelBenchmark):
        self.name, self.benchmark = name, benchmark
        pools = jax.block_until_ready(jax.jit(benchmark.initial)())
        self.launch = adapter(benchmark, pools)
        launched = self.launch(0)
        peers.wait(launched)
        self.is_of_jax = peers.is_of_jax(launched)
        outputs = [peers.array(x) for x in launched]
        if len(outputs) == len(pools) > 0:
            given = benchmark.given
            outputs[0] = pools[0].at[0, given["write"][0]].set(outputs[0].astype(pools[0].dtype))
        # The peer has written into the buffers of `pools`. If it made its own outputs, they replace the last buffers.
        theirs = (*pools[: len(pools) - len(outputs)], *outputs)
        self.error = float(benchmark.difference(theirs, benchmark.first_turn(implementation=benchmark.implementation)))
        self.rms_error = benchmark.rms_error(theirs[-1])

    def turns(self, turns: int) -> None:
        """Runs some turns and waits."""
        outputs: tuple[Any, ...] = ()
        for turn in range(turns):
            outputs = self.launch(turn)  # those of the turn before are no longer needed
        peers.wait(outputs)

    def time(self) -> float:
        """Microseconds per turn."""
        return time_per_turn(lambda: self.turns(TURNS), TURNS)

    def span(self, us: float) -> float | None:
        """Measures the span of a turn that takes about `us` microseconds, from a CUDA graph of the sets.

        Returns None if the graph cannot be captured, or if the peer is written in JAX.
        """
        if self.is_of_jax:
            return None
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
    """Returns the peers whose results agree with ours."""
    found = []
    for name, adapter in peers.find(benchmark).items():
        try:
            peer = Peer(name, adapter, benchmark)
        except Exception as error:  # a peer may raise anything for a shape that it cannot run
            print(f"{benchmark.case.name}: {name} fails ({type(error).__name__}: {error})")
            continue
        if benchmark.accepts(peer.error, peer.rms_error):
            found.append(peer)
        else:
            print(f"{benchmark.case.name}: {name} computes something else (differs by {peer.error:.2g})")
    return found


def measure(benchmark: KernelBenchmark) -> dict[str, Any]:
    """Measures one case and returns its row of results, without the environment.

    The row has no `us` if the outputs are wrong.
    """
    row: dict[str, Any] = {"case": benchmark.case.name, "implementation": benchmark.implementation}
    first = benchmark.first_turn(implementation=benchmark.implementation)
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
    row |= {"us": statistics.median(times), "bytes": benchmark.bytes}
    if benchmark.implementation == "triton":
        row["config"] = str(benchmark.config)
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
    """Formats our value, and the peer's in parentheses."""
    ours, theirs = row[column], row.get(f"peer_{column}")
    return f"{ours:{how}}" + ("" if theirs is None else f" ({theirs:{how}})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(OPS), action="append", help="default: all")
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    parser.add_argument("--json", help="append one JSON row per case to this file")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args()
    every = [case for op in options.op or OPS for case in OPS[op][0]]
    chosen = {case.name for case in cases_named(every, options.case)}
    rate, header = copy_bandwidth(), environment(options.commit)
    print(f"{header}\ncopy bandwidth {rate / 1e6:.2f} TB/s")
    for op in options.op or OPS:
        cases, make = OPS[op]
        for case in cases:
            if case.name not in chosen:
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
            append(options.json, row)


if __name__ == "__main__":
    main()
