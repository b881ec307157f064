"""A quick run keeps the cases that its rules say, and still runs every op, mode, policy, family and way of stepping."""

import fnmatch
import itertools
import re
from pathlib import Path

import pytest
import quick

import pallas_kernels
from mamba_align_jax.align.policy import POLICIES
from mamba_align_jax.models import ARCHITECTURES

TESTS = Path(quick.__file__).parent


class Case:
    """A case of a test as pytest collects it."""

    def __init__(self, **values):
        self.callspec, self.values = self, tuple(values.values())
        self.params = values


CHOICES = {"op": ["a", "b", "c"], "how": ["xla", "interpret"], "size": [1, 2]}


def cases():
    return [Case(**dict(zip(CHOICES, values, strict=True))) for values in itertools.product(*CHOICES.values())]


@pytest.mark.parametrize(("keep", "size", "count"), [(quick.once, 1, 3), (quick.pairs, 2, 6)])
def test_every_value_or_pair_of_values_is_kept(keep, size, count):
    of = lambda some: {pair for case in some for pair in itertools.combinations(case.params.items(), size)}
    kept = keep(cases())
    assert of(kept) == of(cases())
    assert len(kept) == count


@pytest.mark.parametrize("how", ["xla", "interpret"])
@pytest.mark.parametrize("op", ["a", "b", "c"])
def test_cases_that_pytest_collects_share_their_values(request, op, how):
    """If they did not, every case would have values of its own."""
    others = [item for item in request.session.items if item.originalname == request.node.originalname]
    assert len(quick.once(others)) == max(
        len({item.callspec.params[name] for item in others}) for name in ("op", "how")
    )


def test_the_first_cases_are_kept():
    assert [case.values for case in quick.first(1)(cases())] == [("a", "xla", 1)]
    assert [case.values for case in quick.first(1, per="op")(cases())] == [(op, "xla", 1) for op in "abc"]
    # A rule for many tests leaves those alone that do not have the parameter.
    assert len(quick.first(1, per="another")(cases())) == 12


def test_cases_of_some_values_are_kept_if_there_are_any():
    assert {case.values[0] for case in quick.only("b", "c")(cases())} == {"b", "c"}
    assert len(quick.only("another")(cases())) == 12
    assert [case.values[0] for case in quick.only("dir")([Case(make=dir), Case(make=len)])] == [dir]
    assert quick.nothing(cases()) == []


class Item(Case):
    path, originalname, name, marked = TESTS / "a/test_a.py", "test_a", "test_a", False
    get_closest_marker = lambda self, name: None

    def add_marker(self, marker):
        self.marked = True


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ([("a/test_a.py::test_a", quick.nothing), ("a/*", quick.once)], 0),
        ([("a/*", quick.once), ("b/*", quick.nothing)], 2),
        ([("a/*", quick.nothing, "b/*", "*::test_a"), ("a/*", quick.first(1), "*::test_b")], 1),
    ],
)
def test_a_test_follows_all_rules_that_are_for_it(monkeypatch, rules, kept):
    items = [Item(op=op, size=size) for op, size in itertools.product("ab", (1, 2))]
    monkeypatch.setattr(quick, "RULES", rules)
    for item in items:
        item.indices = dict.fromkeys(item.params, 0)
    quick.mark(items)
    assert sum(not item.marked for item in items) == kept


def test_every_rule_is_for_a_test():
    names = [
        f"{path.relative_to(TESTS).as_posix()}::{name}"
        for path in TESTS.rglob("*.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
    ]
    # A rule keeps a test by name from what the others lose, so a name that no test has would be one that has changed.
    named = [name for pattern, _, *others in quick.RULES for name in (pattern, *others)]
    assert [pattern for pattern in named if not fnmatch.filter(names, pattern)] == []


OPS = {name for name, value in vars(pallas_kernels).items() if callable(value)}
# Files, and the words of which each needs a case that runs, if it has any.
NEEDED = {
    "tests/kernels/test_(?!lowering|check|dispatch)": {*OPS, "xla", "interpret"},
    "tests/kernels/test_lowering": OPS,
    "tests/engine/": {*POLICIES, "none", "align", "all", "sync", "async", "drafts", "ahead"},
    "tests/align/": {*POLICIES, "none", "align", "all"},
}


def words(items):
    """The words in the names of cases that run here."""
    here = (item for item in items if not item.get_closest_marker("gpu") and not quick.is_skipped(item))
    names = (item.nodeid.partition("::")[2] for item in here)
    return {word for name in names for word in re.findall(r"\w+", name)}


def implementations(items):
    """The implementations of ops among the cases, of those that a CPU runs."""
    values = (item.callspec.params.get("implementation") for item in items if hasattr(item, "callspec"))
    return {value for value in values if value in ("xla", "interpret")}


def test_every_op_mode_policy_family_and_way_of_stepping_still_runs(request):
    """The check needs all tests, so it says nothing in a run of some."""
    kept, left_out = request.session.items, request.config.stash[quick.LEFT_OUT]
    collected = {item.path for item in (*kept, *left_out)}
    if {path for path in TESTS.rglob("test_*.py")} <= collected:
        for files, needed in NEEDED.items():
            there = lambda items, files=files: [item for item in items if re.search(files, item.nodeid)]
            assert needed & words(there(left_out)) <= words(there(kept)), files
        # The file of an op runs each implementation that it has. Others have the same ops again.
        for path in sorted(TESTS.glob("kernels/test_*.py")):
            of = lambda items, path=path: implementations(item for item in items if item.path == path)
            assert path.stem.endswith(("_layout", "_bits", "_calls")) or of(left_out) <= of(kept), path
        logits = [item for item in kept if re.match(r"tests/models/test_\w+\.py::test_(logits|prompt)_", item.nodeid)]
        families = {ARCHITECTURES[word] for word in words(logits) & ARCHITECTURES.keys()}
        assert families == set(ARCHITECTURES.values())
        assert {path.parent for path in collected} == {item.path.parent for item in kept}
