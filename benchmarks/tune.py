"""Times launch configurations of an op's Triton kernel over its cases: `python -m benchmarks.tune --op NAME`.

The configurations of a case are compiled at the same time, and timed one after the other. The fastest ones are written into
the op's `config.py` by hand, with the machine that measured them.
"""

import argparse
import ast
import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from benchmarks.cases import cases_named
from benchmarks.kernels import OPS, time_ours
from pallas_kernels.causal_conv1d.config import Config as ConvConfig
from pallas_kernels.causal_conv1d.config import PrefillConfig as ConvPrefillConfig
from pallas_kernels.gated_delta_rule.config import Config as DeltaRuleConfig
from pallas_kernels.gated_delta_rule.config import PrefillConfig as DeltaRulePrefillConfig
from pallas_kernels.selective_scan.config import Config as ScanConfig
from pallas_kernels.selective_state_update.config import Config as StateSpaceConfig
from pallas_kernels.ssd.config import Config as SsdConfig
from pallas_kernels.state_copy.config import Config as CopyConfig


def sweep(config: type, **values: tuple[Any, ...]) -> list[Any]:
    """Returns every combination of the values. Values must be given for each field of the configuration."""
    names = [field.name for field in dataclasses.fields(config)]
    return [config(*chosen) for chosen in itertools.product(*(values[name] for name in names))]


# (rows per tile, tiles per program, elements per segment)
_TILES = list(itertools.product((2, 4, 8), (1, 2, 4), (64, 128)))
_MAMBA1_TILES = list(itertools.product((8, 16, 32), (1, 2, 4), (8, 16)))
# For each op, the configurations that are tried if no --config is given.
CONFIGS: dict[str, list[Any]] = {
    "state_copy": sweep(CopyConfig, tile=(8192, 16384), programs=(528, 1056, 2112), num_warps=(4, 8)),
    "causal_conv1d_update": [
        ConvConfig(*c) for c in ((128, 1), (256, 1), (256, 2), (512, 2), (512, 4), (1024, 4), (1024, 8))
    ],
    "causal_conv1d_prefill": [
        ConvPrefillConfig(128 * n * warps, block, warps)
        for n, block, warps in (
            (2, 8, 1),
            (2, 16, 1),
            (2, 24, 1),
            (2, 16, 2),
            (2, 16, 4),
            (1, 16, 1),
            (1, 32, 1),
            (1, 32, 2),
        )
    ],
    "gated_delta_rule_update": [DeltaRuleConfig(rows * n, rows, s, 1) for rows, n, s in _TILES],
    "gated_delta_rule_prefill": sweep(
        DeltaRulePrefillConfig,
        tile_value=(16, 32, 64),
        num_warps=(4,),
        num_stages=(1, 2, 3),
        products_warps=(2, 4, 8),
        pieces=(2,),
    ),
    "ssd": [
        SsdConfig(*c)
        for c in (
            (32, 4, 1),
            (32, 4, 2),
            (32, 4, 3),
            (32, 8, 2),
            (64, 4, 2),
            (64, 4, 3),
            (64, 8, 2),
            (64, 8, 3),
            (16, 4, 2),
        )
    ],
    "selective_state_update": [StateSpaceConfig(rows * n, rows, s, 1) for rows, n, s in _TILES + _MAMBA1_TILES],
    # One, two or four threads share the state of a channel.
    "selective_scan": [
        ScanConfig(*c)
        for c in itertools.chain(
            ((32, 4, 2, 1), (32, 4, 3, 1), (32, 4, 4, 1), (64, 4, 2, 1), (64, 4, 4, 2), (128, 4, 4, 4)),
            ((16, 8, 2, 1), (16, 8, 4, 1), (32, 8, 4, 2), (8, 16, 4, 1)),
        )
    ],
}


def time_each(benchmark: Any, configs: list[Any]) -> list[tuple[float, Any]]:
    """Returns (microseconds, configuration) of the configurations that compile, the fastest first. None is the default."""
    with ThreadPoolExecutor() as pool:
        compiled = [pool.submit(time_ours, benchmark, implementation="triton", config=config) for config in configs]
    timed = []
    for config, each in zip(configs, compiled, strict=True):
        try:
            timed.append((each.result()(), config))
        except jax.errors.JaxRuntimeError as error:
            print(f"{config}: {str(error).splitlines()[0]}", flush=True)
    return sorted(timed, key=lambda entry: entry[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(CONFIGS), required=True)
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    parser.add_argument("--config", action="append", help="fields of a configuration, as 8,4,64,1; default: a sweep")
    options = parser.parse_args()
    cases, make = OPS[options.op]
    configs = CONFIGS[options.op]
    if options.config:
        configs = [type(configs[0])(*ast.literal_eval(f"({text},)")) for text in options.config]
    for case in cases_named(cases, options.case):
        benchmark = make(case)
        widest = getattr(case, "key_dim", getattr(case, "state_dim", 0))
        fitting = [c for c in configs if options.config or getattr(c, "segment", 0) <= widest]
        timed = time_each(benchmark, [None, *fitting])
        now = "; ".join(f"{us:.2f} us" for us, config in timed if config is None)
        best = [(us, config) for us, config in timed if config is not None][:5]
        assert float(benchmark.error(implementation="triton", config=best[0][1])) <= benchmark.tolerance, best[0]
        print(f"{case.name}: now {now}; " + "; ".join(f"{us:.2f} {config}" for us, config in best), flush=True)


if __name__ == "__main__":
    main()
