"""Writes what the pages take from measurements and code: `python -m docs.generate`, after new rows in benchmarks/results.

It draws the figures, and fills every part of a page between `<!-- generated: NAME -->` and `<!-- end -->`.
tests/test_docs.py checks that the committed files are what this script writes.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.reading import HOW, Row, loads, of_one_commit, read_rows, usual
from benchmarks.report import TABLES, machines, tables
from docs.figures import models, serving, step
from mamba_align_jax.serve.api import field_table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_PAGES = ("kernels", "own_step", "results", "scaling", "serving")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _PAGES))
NOT_YET = "Not measured yet."
_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(name: str) -> list[Row]:
    """The rows of a file in benchmarks/results, oldest first."""
    return read_rows(RESULTS / f"{name}.jsonl")


def _newest(name: str, **wanted: object) -> Row:
    """The newest row of a file that has the wanted fields and was run as usual in all else."""
    return usual(rows(name), **wanted)[-1]


def _headlines() -> str:
    """Three numbers for the README, each with what it says, and with the commit of the rows that it compares."""
    policies = [("copy_free", "1"), ("pre_copy", "1"), ("none", "0")]
    wanted = [dict(rows=256, drafts=0, policy=policy, crossing=crossing) for policy, crossing in policies]
    steps = of_one_commit(rows("pipeline"), *wanted)
    copy_free, pre_copy, none = (f"{row['us'] / 1e3:.1f} ms" for row in steps)

    wanted = dict(workload="prefix_repetition", loop="closed", drafts=0)
    pairs = [modes for modes in loads(usual(rows("serving"), **wanted)) if {"none", "align/copy_free"} <= modes.keys()]
    served = max(pairs, key=lambda modes: (modes["none"]["date"], modes["none"]["requests"]))
    load = served["none"]
    slow, fast = (f"{served[mode]['ttft_ms_mean']:.0f}" for mode in ("none", "align/copy_free"))
    few, many = (f"{served[mode]['output_tokens_per_s']:.0f}" for mode in ("none", "align/copy_free"))

    decode = _newest("kernels", case="gdn_decode float32 256")
    share = f"{decode['bandwidth_fraction']:.0%}"
    prefill = _newest("prefill", case="gdn_prefill 1x8192")
    us, ratio = f"{prefill['us']:.0f}", f"{prefill['ratio']:.2f}"
    peer = dict(vllm="vLLM", fla="fla-core", jla="jax-linear-attention")[prefill["peer"]]
    prompts, prefix, running = (load[name] for name in ("requests", "prefix", "concurrency"))
    one, two, three, four = (row["commit"] for row in (steps[0], load, decode, prefill))
    return f"""\
- **Crossing a block boundary is free.** When all 256 rows cross one in the same decode step of 30 layers, the step takes
  {copy_free} under "copy_free", {pre_copy} under "pre_copy", and {none} without a prefix cache ({one}).
- **A shared prefix is computed once.** {prompts} prompts share {prefix} tokens, and {running} run at a time: the cache
  cuts the mean time to the first token from {slow} to {fast} ms and lifts throughput from {few} to {many} tokens/s ({two}).
- **Kernels run at the speed of memory.** A gated delta net decode of 256 rows reaches {share} of the copy rate ({three}),
  and a prefill of 8192 tokens takes {us} us, {ratio} of the time of the fastest other kernel, {peer}'s ({four}).
"""


# Calls that a user of the ops makes: what it is, and its row in benchmarks/results.
_COSTS = (
    ("copy of the states and windows of 30 layers, 8 rows", "kernels", dict(case="state_copy 8")),
    ("the same call with nothing to copy", "kernels", dict(case="state_copy idle 64")),
    ("convolution, 64 decode rows", "kernels", dict(case="conv_update 64")),
    ("gated delta net, 64 decode rows", "kernels", dict(case="gdn_decode float32 64")),
    ("the same with bfloat16 states", "kernels", dict(case="gdn_decode bfloat16 64")),
    ("gated delta net, 64 verify rows of 3 tokens", "kernels", dict(case="gdn_verify float32 64")),
    ("Kimi delta attention, 64 decode rows", "kernels", dict(case="kda_decode float32 64")),
    ("Mamba-2, 64 decode rows", "kernels", dict(case="mamba2_update float32 64")),
    ("Mamba-1, 256 decode rows", "kernels", dict(case="mamba1_update float32 256")),
    (
        "deferred gated delta net, 64 rows of 4 tokens",
        "deferred",
        dict(case="gdn 64x4 float32", candidate="mosaic_gpu"),
    ),
    ("deferred Mamba-2, 64 rows of 4 tokens", "deferred", dict(case="mamba2 64x4 float32", candidate="mosaic_gpu")),
    ("gated delta net, prompt of 8192", "prefill", dict(case="gdn_prefill 1x8192")),
    ("Kimi delta attention, prompt of 8192", "prefill", dict(case="kda_prefill 1x8192")),
    ("Mamba-2, prompt of 8192", "prefill", dict(case="ssd_prefill 1x8192")),
    ("Mamba-1, four prompts of 2048", "prefill", dict(case="selective_scan 4x2048")),
    ("attention, 16 decode rows of 4096", "attention", dict(case="attention decode 16x4096", candidate="triton")),
    ("attention, prompt of 4096", "attention", dict(case="attention prompt 4096", candidate="mosaic_gpu")),
    ("product of gate and up, 16 tokens", "linear", dict(case="gate up 16", candidate="triton")),
    (
        "sum over 2 devices and norm, 16 tokens",
        "all_reduce",
        dict(case="all_reduce_rms_norm 16", candidate="triton", devices=2),
    ),
)


def _costs() -> str:
    """Returns a table with a row for each op: its call, its newest time in the results, and the commit."""
    lines = [f"| call | time on one {HOW['gpu'][0]} | commit |", "|---|---|---|"]
    for what, file, wanted in _COSTS:
        row = _newest(file, **wanted)
        lines.append(f"| {what} | {row['us']:.1f} us | {row['commit']} |")
    return "\n".join(lines)


def _code(file: str, *names: str) -> str:
    """Assignments, functions and classes of an example, as they stand there, by their names."""
    source = (ROOT / file).read_text()
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found[node.name] = "\n\n" + _lines(source, first, node.end_lineno)
        elif isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            found |= {each.id: _lines(source, node.lineno, node.end_lineno) for each in targets}
    return "```python\n" + "\n".join(dict.fromkeys(found[name] for name in names)).strip("\n") + "\n```\n"


def _lines(source: str, first: int, last: int | None) -> str:
    return "\n".join(source.splitlines()[first - 1 : last])


def _table(file: str, *words: str) -> str:
    name = " ".join(words)
    if name not in TABLES:
        raise ValueError(f"a table must be one of {', '.join(TABLES)}, got {name}")
    return tables(rows(file)).get(name, NOT_YET)


def part(name: str) -> str:
    """The text of a part: "headlines", "costs", "fields", "machines FILE", "table FILE NAME" or "code FILE NAMES"."""
    kind, *rest = name.split()
    kinds: dict[str, Callable[..., str]] = {
        "headlines": _headlines,
        "costs": _costs,
        "fields": field_table.table,
        "code": _code,
        "machines": lambda file: machines(rows(file)),
        "table": _table,
    }
    return kinds[kind](*rest).rstrip("\n") + "\n"


def page(text: str) -> str:
    """A page with its generated parts written anew."""
    return _PART.sub(lambda found: found[1] + part(found[2]) + found[3], text)


def files() -> dict[Path, str]:
    """Every file that this script writes, and its content."""
    figures = ROOT / "docs" / "figures"
    pages = {path: page(path.read_text()) for path in PAGES}
    drawn = {
        "step": step.draw(),
        "serving": serving.draw(rows("serving")),
        "models": models.draw(rows("model")),
    }
    return {figures / f"{name}.svg": text for name, text in drawn.items()} | pages


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
        print(path.relative_to(ROOT))
