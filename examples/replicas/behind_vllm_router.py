"""Runs replicas of a server behind vllm-router, and starts again whatever ends.

    pip install "mamba-align-jax[serve,models,text]" "vllm-router==0.1.17"
    python examples/replicas/behind_vllm_router.py --port 8000 -- --model DIR

What follows `--` are options of `mamba-align serve`. Each replica needs a device of its own if the device is a GPU: start
the replicas by hand then, each with its own CUDA_VISIBLE_DEVICES, and the router with the options of this file.
"""

import argparse
import shutil
import signal
import socket
import sys
from collections.abc import Sequence

from supervisor import Supervisor


def free_ports(count: int) -> list[int]:
    """Returns numbers of ports that are free now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def router_command(router: str, port: int, metrics_port: int, replicas: Sequence[str]) -> list[str]:
    """Returns the command that runs vllm-router in front of the replicas at these addresses."""
    return [
        *(router, f"--port={port}", f"--prometheus-port={metrics_port}", "--log-level=warning"),
        *("--worker-urls", *replicas),
        # A call goes where the longest part of its text went before, if that is more than 0.3 of it; a new conversation
        # goes to the replica with the fewest calls.
        *("--policy=cache_aware", "--cache-threshold=0.3"),
        # /health is also 200 while a replica compiles its programs and takes no calls. /ready is not.
        *("--health-check-endpoint=/ready", "--health-check-interval-secs=1", "--health-check-timeout-secs=5"),
        *("--health-failure-threshold=3", "--health-success-threshold=1", "--worker-startup-check-interval=1"),
        # A call that failed before its first byte goes to the same replica again until that one's circuit is open. So
        # there must be more retries than failures that open it.
        *("--cb-failure-threshold=2", "--cb-success-threshold=1", "--cb-timeout-duration-secs=2"),
        *("--retry-max-retries=8", "--retry-initial-backoff-ms=100", "--retry-max-backoff-ms=2000"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000, help="the router's port (default: %(default)s)")
    parser.add_argument("--metrics-port", type=int, default=29000, help="the router's metrics (default: %(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="the number of replicas (default: %(default)s)")
    parser.add_argument("--router", default="vllm-router", help="the program (default: %(default)s)")
    parser.add_argument("options", nargs="*", help="options of `mamba-align serve`")
    options = parser.parse_args()
    if shutil.which(options.router) is None:
        parser.error(f"router must be a program that is installed, got {options.router}")
    ports = free_ports(options.replicas)
    addresses = [f"http://127.0.0.1:{port}" for port in ports]
    serve = [sys.executable, "-m", "mamba_align_jax", "serve", *options.options]
    commands = [[*serve, f"--port={port}"] for port in ports]
    commands.append(router_command(options.router, options.port, options.metrics_port, addresses))
    names = [f"replica {address}" for address in addresses] + [f"router http://127.0.0.1:{options.port}"]

    def say(place: int, process: int) -> None:
        print(f"{names[place]} is process {process}", flush=True)

    supervisor = Supervisor(commands, say)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: supervisor.stop())
    supervisor.run()


if __name__ == "__main__":
    main()
