"""Times sums over devices: `python -m benchmarks.all_reduce --devices 2 --json benchmarks/results/all_reduce.jsonl`.

A turn calls `all_reduce_rms_norm` or `all_reduce` many times, each on what the call before returned, as the layers of a
model do. `us` is the time from the start of a call to the start of the next one, because CUPTI does not see how long one
waits for another. Beside the kernel stands XLA's all-reduce, with the norm as a kernel of its own. `error` is the
largest difference between the two after one call, and must be 0 on two devices. `--tune` times several configurations.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cases import implementations, options_parser, run_cases
from benchmarks.rows import Row
from benchmarks.timing import span_per_turn
from benchmarks.workloads.all_reduce import CASES, Case
from mamba_align_jax.sharding import AXIS
from pallas_kernels import Mailboxes, Run, all_reduce, all_reduce_rms_norm
from pallas_kernels.all_reduce.config import Config

CALLS = 64
ROUNDS = 20
MAX_TOKENS = 512


def tuned(case: Case) -> dict[str, dict[str, Any]]:
    """The configurations that `--tune` tries."""
    tile = 1 << (case.channels - 1).bit_length()
    found = {}
    for num_warps, pack in itertools.product((4, 8, 16, 32), (1, 2, 4, 8, 16)):
        if tile % (32 * num_warps * pack) == 0 and tile // (32 * num_warps * pack) <= 2:
            options = dict(run=Run(implementation="triton", config=Config(num_warps, pack)))
            found[f"w{num_warps}_p{pack}"] = options
    return found


def measure(case: Case, devices: int, candidates: dict[str, dict[str, Any]]) -> list[Row]:
    """One row per candidate, the fastest first."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
    capacity = 2 * MAX_TOKENS * case.channels
    boxes = Mailboxes.create(mesh, AXIS, capacity)
    place = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (devices, case.splits, case.tokens, case.channels)
    addend = place(jax.random.normal(keys[0], shape).astype(case.addend_dtype), P(AXIS))
    x = place(jax.random.normal(keys[1], shape[2:]).astype(case.dtype), P())
    weight, epoch = place(jnp.zeros(case.channels), P()), place(jnp.int32(1), P())

    def run(calls, options, boxes, epoch, x, addend, weight):
        addend = addend[0]
        for _ in range(calls):
            # What a call adds up follows from the call before. XLA would otherwise make one call of all.
            if case.is_normed:
                x, normed, epoch = all_reduce_rms_norm(
                    x, addend, weight, boxes, epoch, epsilon=1e-6, scale=0.1, **options
                )
                addend = normed[None]
            else:
                x, epoch = all_reduce(addend, boxes, epoch, **options)
                addend = x[None].astype(addend.dtype)
        return x, epoch

    specs = boxes.partition(), P(), P(), P(AXIS), P()
    rows = []
    for name, options in candidates.items():
        row: Row = {"case": case.name, "devices": devices, "candidate": name}
        rows.append(row)
        try:
            build = lambda calls, options: jax.jit(jax.shard_map(
                functools.partial(run, calls, options), mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False
            ))  # fmt: skip
            one, many = build(1, options), build(CALLS, options)
            exact, _ = build(1, dict(run=Run(implementation="xla")))(boxes, epoch, x, addend, weight)
            found, epoch = one(boxes, epoch, x, addend, weight)
            bits = [np.asarray(shard.data.astype(jnp.float32)) for shard in found.addressable_shards]
            row["same_on_all"] = all(bool((each == bits[0]).all()) for each in bits)
            row["error"] = float(np.abs(bits[0] - np.asarray(exact.astype(jnp.float32))).max())

            def launch(rounds, many=many):
                nonlocal epoch
                for _ in range(rounds):
                    _, epoch = many(boxes, epoch, x, addend, weight)
                jax.block_until_ready(epoch)

            row["us"] = round(span_per_turn(launch, ROUNDS, CALLS), 2)
        except Exception as error:  # of any kind: a configuration may not compile
            row["failed"] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def main() -> None:
    parser = options_parser(__doc__, budget=120)
    parser.add_argument("--devices", type=int, default=2, help="the first devices of this machine")
    options = parser.parse_args()

    def run(case: Case) -> list[Row]:
        return measure(case, options.devices, implementations(tuned(case) if options.tune else None))

    run_cases(options, CASES, run)


if __name__ == "__main__":
    main()
