"""Prints the README's table of measurements: `python -m benchmarks.report benchmarks/results/kernels.jsonl`."""

import json
import sys
from pathlib import Path


def table(file: Path) -> str:
    """Markdown of the newest row of each case: one table, and one of prefill's spans and errors where there are any."""
    rows = {row["case"]: row for row in map(json.loads, file.read_text().splitlines())}
    lines = ["| case | time | of the copy rate | peer | ratio |", "|---|---|---|---|---|"]
    for case, row in rows.items():
        # A launch with nothing to move, or next to nothing, has no bandwidth to speak of.
        share = f"{row['bandwidth_fraction']:.2f}" if row["bandwidth_fraction"] >= 0.05 else "-"
        peer = f"{row['peer']} {row['peer_us']:.1f} us | {row['ratio']:.2f}" if "peer" in row else "- | -"
        lines.append(f"| {case} | {row['us']:.1f} us | {share} | {peer} |")
    if any("span_us" in row for row in rows.values()):
        lines += ["", "| case | span | peer's span | rms error | peer's rms error |", "|---|---|---|---|---|"]
        us, error = (lambda value: f"{value:.1f} us"), (lambda value: f"{value:.1e}")
        columns = dict(span_us=us, peer_span_us=us, rms_error=error, peer_rms_error=error)
        for case, row in rows.items():
            if "span_us" in row:
                cells = ["-" if row.get(name) is None else show(row[name]) for name, show in columns.items()]
                lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))
