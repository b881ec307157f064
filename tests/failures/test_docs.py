"""docs/failures.md lists every failure once, and names only tests that exist."""

import ast
import collections
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "failures.md").read_text().splitlines() if re.match(r"\| [FNT]\d", line)]
TESTS = [test for row in ROWS for test in re.findall(r"`(tests/[^`]+)`", row)]
IDS = [f"F{n:02}" for n in range(1, 108)] + [f"N{n}" for n in range(1, 13)] + [f"T{n}" for n in range(1, 51)]


@functools.cache
def names(path):
    """The functions, classes and variables that a file defines at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


def test_every_failure_has_one_row():
    found = collections.Counter(name for row in ROWS for name in row.split("|")[1].split())
    assert found == collections.Counter(IDS)


def test_every_test_exists():
    split = [test.split("::") for test in TESTS]
    assert [name for file, name in split if name not in names(ROOT / file)] == []


# Files whose failures are injected here, instead of having been seen elsewhere.
INJECTED = "test_errors", "test_events", "test_fuzz", "test_fuzz_parts", "test_interrupts", "test_locks", "test_owners"
INJECTED += ("test_panics",)


def test_every_row_has_a_test_or_a_reason():
    for row in ROWS:
        _, ids, wrong, here, tests, _ = (cell.strip() for cell in row.split("|"))
        assert wrong, ids
        assert here, ids
        assert re.fullmatch(r"(`tests/(\w+/)?test_\w+\.py::[tT]est\w+` ?)*", tests), ids
        assert tests or here.startswith("not here: "), ids


def test_every_test_of_this_folder_is_in_a_row():
    here = Path(__file__).parent
    written = {
        f"{file.relative_to(ROOT)}::{name}"
        for file in here.glob("test_*.py")
        for name in names(file)
        if name.startswith("test_") and file != Path(__file__) and file.stem not in INJECTED
    }
    assert written <= set(TESTS)
