"""Times every launch configuration of an op over its cases: `python -m benchmarks.tune --op NAME`.

Winners go into the op's `config.py` by hand, with where they were measured.
"""

import argparse
import itertools

from benchmarks.kernels import OPS
from pallas_kernels.gated_delta_rule.config import Config as UpdateConfig
from pallas_kernels.state_copy.config import Config as CopyConfig

CONFIGS = {
    "state_copy": [CopyConfig(*c) for c in itertools.product((1024, 2048, 4096, 8192), (2, 4, 8))],
    "gated_delta_rule_update": [UpdateConfig(*c) for c in itertools.product((4, 8, 16, 32), (1, 2, 4))],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=sorted(OPS), required=True)
    parser.add_argument("--case", action="append", help="names of cases; default: all")
    options = parser.parse_args()
    cases, measure, limit = OPS[options.op]
    for case in cases:
        if options.case and case.name not in options.case:
            continue
        timed = []
        for config in [None, *CONFIGS[options.op]]:
            row = measure(case, config)
            if row["max_error"] <= limit(case):
                timed.append((row["us"], config))
        best = sorted(timed, key=lambda entry: entry[0])[:4]
        now = next(us for us, config in timed if config is None)
        print(f"{case.name}: now {now:.2f} us; " + "; ".join(f"{us:.2f} {config}" for us, config in best), flush=True)


if __name__ == "__main__":
    main()
