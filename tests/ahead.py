"""Compiles every Triton kernel, and whole steps, for GPUs that this machine does not have: `make ahead`.

Lowering ends before a kernel's own compiler runs, which alone knows how much shared memory and how many registers a kernel
takes. XLA compiles without a GPU if it is given a description of one, and JAX's CUDA plugin. It runs nothing. Each case of
`tests/kernels/lowered_cases.py` is compiled for each device that is named, or for all of `DEVICES`. A case that the op's
own check refuses runs as XLA's code there, and is listed. Then the steps of `ahead_steps.py` are compiled. A step must not
copy a pool and must have no loop and no conditional, and one of decode rows no sort. The number of its launches is listed.
With `--mosaic-gpu` the cases' Mosaic GPU kernels are compiled instead, for the H200 only. If MOSAIC_GPU_DUMP_PTXAS=1 is in
the environment, JAX then prints the registers of each kernel and what it spills. The exit status is 1 if a case or a step
does not compile, or if a step is not as it must be.
"""

import argparse
import contextlib
import functools
import os
import sys
from typing import NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import ahead_steps
import jax
import jax._src.xla_bridge as xla_bridge
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from kernels import lowered_cases

from pallas_kernels import UnsupportedError, device


class Device(NamedTuple):
    """A GPU: its compute capability, its SMs, and the bytes of shared memory of a program and of an SM."""

    capability: tuple[int, int]
    sms: int
    shared_bytes: int
    shared_bytes_per_sm: int


DEVICES = {
    "NVIDIA A100-SXM4-80GB": Device((8, 0), 108, 166_912, 167_936),
    "NVIDIA GeForce RTX 4090": Device((8, 9), 128, 101_376, 102_400),
    "NVIDIA H200": Device((9, 0), 132, 232_448, 233_472),
    "NVIDIA B200": Device((10, 0), 148, 232_448, 233_472),
}
_CONFIGURATION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  core_count: {device.sms}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {device.shared_bytes}
  shared_memory_per_core: {device.shared_bytes_per_sm}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 2000000000000 l2_cache_size: 41943040 clock_rate_ghz: 1.7 device_memory_size: 150000000000
  cuda_compute_capability {{ major: {device.capability[0]} minor: {device.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def described(name, count):
    """Returns GPUs that are described only. From then on launch configurations take their shared memory and SMs."""
    configuration = _CONFIGURATION.format(name=name, device=DEVICES[name])
    device.shared_bytes = lambda: DEVICES[name].shared_bytes
    lowered_cases.SMS[name] = DEVICES[name].sms
    return topologies.get_topology_desc(platform="cuda", target_config=configuration, topology=f"1x1x{count}").devices


def cases(ops):
    """The function that lowers a case, and the case, for each case of some ops, or of all. Chains have 1 and 16 tokens."""
    for op, (run, named, _) in lowered_cases.EVERY.items():
        for case in named if not ops or op in ops else ():
            yield run, case
            if op == "product_chain":
                yield functools.partial(run, tokens=16), case


def compile_cases(name, ops, **options):
    """Compiles the cases of some ops, or of all, for one device. Returns the number of those that do not compile.

    `options` may name another implementation than "triton".
    """
    (gpu,), failed = described(name, 1), 0
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(gpu))

    def compile_(kind, function, *arguments, donated=(0,)):
        with lowered_cases.on(kind):
            traced = jax.jit(function, donate_argnums=donated).trace(*jax.tree.map(place, arguments))
            return traced.lower(lowering_platforms=("cuda",)).compile()

    lowered_cases.lower = compile_
    for run, case in cases(ops):
        try:
            run(name, case, **options)
            if options:
                print(f"{name}: {case.name}: compiles", flush=True)
        except UnsupportedError as error:
            instead = "no kernel" if options else "XLA's code"
            print(f"{name}: {case.name}: {instead}: {str(error).split(': ')[-1]}", flush=True)
        except jax.errors.JaxRuntimeError as error:
            failed += 1
            print(f"{name}: {case.name}: DOES NOT COMPILE: {str(error).splitlines()[0]}", flush=True)
    return failed


def compile_steps(name):
    """Compiles whole steps for one device. Returns the number of those that do not compile or are not as they must be."""
    failed = 0
    for step in ahead_steps.STEPS:
        try:
            devices = described(name, step.devices)
            with lowered_cases.on(name) if step.devices == 1 else contextlib.nullcontext():
                traced, donated = ahead_steps.trace(step, devices)
                compiled = traced.lower(lowering_platforms=("cuda",)).compile()
            faults, launches = ahead_steps.faults(step, compiled, donated)
            text = "; ".join(f.upper() for f in faults) or f"{launches} launches"
        except jax.errors.JaxRuntimeError as error:
            faults, text = [error], f"DOES NOT COMPILE: {str(error).splitlines()[0]}"
        failed += bool(faults)
        print(f"{name}: step {step.name}: {text}", flush=True)
    return failed


def main():
    """Compiles what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("devices", nargs="*", default=[*DEVICES], help="names of devices; default: all")
    parser.add_argument("--op", action="append", help="compile the cases of this op only, and no step")
    parser.add_argument("--steps", action="store_true", help="compile the steps only")
    parser.add_argument(
        "--mosaic-gpu", action="store_true", help="compile Mosaic GPU kernels, for an H200, and no step"
    )
    options = parser.parse_args()
    if options.mosaic_gpu:
        options.devices, options.op = ["NVIDIA H200"], options.op or [*lowered_cases.EVERY]
    jax.config.update("jax_num_cpu_devices", max(step.devices for step in ahead_steps.STEPS))
    jax.devices()  # loads the plugins
    # JAX turns "gpu" into "cuda" only where there is one: https://github.com/jax-ml/jax/issues/23971
    original = xla_bridge.canonicalize_platform
    xla_bridge.canonicalize_platform = lambda name: "cuda" if name in ("gpu", "cuda") else original(name)
    failed = dict.fromkeys(options.devices, 0)
    implementation = dict(implementation="mosaic_gpu") if options.mosaic_gpu else {}
    for name in options.devices:
        failed[name] += 0 if options.steps else compile_cases(name, options.op, **implementation)
        failed[name] += 0 if options.op else compile_steps(name)
    total = (0 if options.steps else len([*cases(options.op)])) + (0 if options.op else len(ahead_steps.STEPS))
    print("; ".join(f"{name}: {count} of {total} failed" for name, count in failed.items()))
    sys.exit(any(failed.values()))


if __name__ == "__main__":
    main()
