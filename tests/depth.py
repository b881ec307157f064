"""How deep the tests search: `make test` runs a part of the long searches, `make test-all` (`--depth=full`) all of them.

A test or a case that only a full run needs is marked `deep`. A search by hypothesis takes its number of examples from
`examples` when it runs, not when its module is imported. A full run may go on as a quick one after some time.
"""

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


def keep_values(items, values, *parameters):
    """Keeps the cases in which one of the parameters has one of its test's `values`. It marks the others `deep`.

    `values` maps the names of tests to the values that they keep. Other tests keep all cases.
    """
    for item in items:
        kept = values.get(item.originalname)
        if kept and not any(case(item, parameter) in kept for parameter in parameters):
            item.add_marker(pytest.mark.deep)
