"""Writes what the pages take from measurements and code: `python -m docs.generate`, after new rows in benchmarks/results.

It draws the figures, and fills every part of a page between `<!-- generated: NAME -->` and `<!-- end -->`.
tests/test_docs.py checks that the committed files are what this script writes.
"""

import ast
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Row, machines, read_rows, tables
from docs.figures import serving, step

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "docs" / "own_step.md", ROOT / "docs" / "results.md")
_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rows(name: str) -> list[Row]:
    """The rows of a file in benchmarks/results, oldest first."""
    return list(read_rows(RESULTS / f"{name}.jsonl"))


def _newest(name: str, **wanted: object) -> Row:
    return [row for row in rows(name) if all(row.get(key) == value for key, value in wanted.items())][-1]


def _headlines() -> str:
    """Three numbers for the README."""
    cost = {
        key: _newest("pipeline", rows=256, drafts=0, policy=policy, crossing=share)["us"] / 1e3
        for key, policy, share in (("none", "none", "0"), ("free", "copy_free", "1"), ("pre", "pre_copy", "1"))
    }
    load = dict(workload="prefix_repetition", requests=512, loop="closed", drafts=0)
    without, cached = (_newest("serving", mode=mode, **load) for mode in ("none", "align/copy_free"))
    decode, prefill = _newest("kernels", case="gdn_decode float32 256"), _newest("prefill", case="gdn_prefill 1x8192")
    return f"""\
- **Crossing a block boundary is free.** When all 256 rows cross one in the same decode step of 30 layers, the step takes
  {cost["free"]:.1f} ms under `copy_free`, {cost["pre"]:.1f} ms where states are copied first, and {cost["none"]:.1f} ms without a prefix cache.
- **A shared prefix is computed once.** 512 prompts that share 4096 tokens, 16 at a time: the mean time to the first token
  falls from {without["ttft_ms_mean"]:.0f} to {cached["ttft_ms_mean"]:.0f} ms, and throughput rises from {without["output_tokens_per_s"]:.0f} to {cached["output_tokens_per_s"]:.0f} tokens/s.
- **Kernels run at the speed of memory.** A gated delta net decode of 256 rows reaches {100 * decode["bandwidth_fraction"]:.0f} % of the copy rate; a
  prefill of 8192 tokens takes {prefill["us"]:.0f} us, {prefill["ratio"]:.2f} of the time of the fastest Triton peer ({prefill["peer"]}).
"""


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


def part(name: str) -> str:
    """The generated text of one part of a page: "headlines", "machines FILE", "table FILE NAME", "code FILE NAMES"."""
    kind, *rest = name.split()
    kinds: dict[str, Callable[..., str]] = {
        "headlines": _headlines,
        "code": _code,
        "machines": lambda file: machines(rows(file)),
        "table": lambda file, *words: tables(rows(file))[" ".join(words)],
    }
    return kinds[kind](*rest).rstrip("\n") + "\n"


def page(text: str) -> str:
    """A page with its generated parts written anew."""
    return _PART.sub(lambda found: found[1] + part(found[2]) + found[3], text)


def files() -> dict[Path, str]:
    """Every file that this script writes, and its content."""
    figures = ROOT / "docs" / "figures"
    pages = {path: page(path.read_text()) for path in PAGES}
    return {figures / "step.svg": step.draw(), figures / "serving.svg": serving.draw(rows("serving"))} | pages


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content)
        print(path.relative_to(ROOT))
