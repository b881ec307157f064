"""How deep the tests search: `make test` runs a part of the long searches, `make test-all` (`--depth=full`) all of them.

A test or a case that only a full run needs is marked `deep`. A search by hypothesis takes its number of examples from
`examples` when it runs, not when its module is imported. A full run may go on as a quick one after some time.
"""

import itertools
import math
import time

import pytest

# When the full run ends, as `time.monotonic` tells the time. It is in the past for a quick one.
_end = -math.inf


def set_full(value, seconds=math.inf):
    """Sets the depth from now on; `tests/conftest.py` calls it with what the options `--depth` and `--deep-minutes` say."""
    global _end
    _end = time.monotonic() + seconds if value else -math.inf


def is_full():
    return time.monotonic() < _end


def examples(quick, full):
    """The number of examples that a search tries at the depth of this run."""
    return full if is_full() else quick


def case(item, parameter):
    """The value of a parameter of a collected test, None if it has no such parameter."""
    return item.callspec.params.get(parameter) if hasattr(item, "callspec") else None


def keep_first(items, per=None, count=1):
    """Keeps the first `count` cases of each test, and of each value of the parameter `per`. It marks the others `deep`."""
    groups = {}
    for item in items:
        groups.setdefault((item.path, item.originalname, case(item, per)), []).append(item)
    for group in groups.values():
        # Plugins may have changed the order of the items.
        group.sort(key=lambda item: tuple(item.callspec.indices.values()))
        for item in group[count:]:
            item.add_marker(pytest.mark.deep)


def keep_tuples(items, names, size=1):
    """Keeps cases in which every `size` values of different parameters of a test occur together. It marks others `deep`.

    With `size` 1 every value of every parameter is in a case, with 2 every pair of values that a case has. `names` are the
    tests whose cases are chosen; other tests keep all cases. Compiled kernels, which a CPU does not run, are not counted.
    """
    tests = {}
    for item in items:
        if item.originalname in names and not any(item.iter_markers("gpu")) and not any(item.iter_markers("deep")):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        # Plugins may have changed the order of the items.
        cases.sort(key=lambda item: tuple(item.callspec.indices.values()))
        tuples = {
            item: set(itertools.combinations(item.callspec.indices.items(), min(size, len(item.callspec.indices))))
            for item in cases
        }
        missing = set().union(*tuples.values())
        while missing:
            best = max(cases, key=lambda item: len(tuples[item] & missing))
            missing -= tuples[best]
            cases.remove(best)
        for item in cases:
            item.add_marker(pytest.mark.deep)


def keep_values(items, values, *parameters):
    """Keeps the cases in which one of the parameters has one of its test's `values`. It marks the others `deep`.

    `values` maps the names of tests to the values that they keep. Other tests keep all cases.
    """
    for item in items:
        kept = values.get(item.originalname)
        if kept and not any(case(item, parameter) in kept for parameter in parameters):
            item.add_marker(pytest.mark.deep)
