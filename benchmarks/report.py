"""Prints the README's table of measurements: `python -m benchmarks.report benchmarks/results/kernels.jsonl`."""

import json
import sys
from pathlib import Path


def table(file: Path) -> str:
    """Markdown of the newest row of each case."""
    rows = {row["case"]: row for row in map(json.loads, file.read_text().splitlines())}
    lines = ["| case | time | of the copy rate | peer | ratio |", "|---|---|---|---|---|"]
    for case, row in rows.items():
        # A launch with nothing to move, or next to nothing, has no bandwidth to speak of.
        share = f"{row['bandwidth_fraction']:.2f}" if row["bandwidth_fraction"] >= 0.05 else "-"
        peer = f"{row['peer']} {row['peer_us']:.1f} us | {row['ratio']:.2f}" if "peer" in row else "- | -"
        lines.append(f"| {case} | {row['us']:.1f} us | {share} | {peer} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
