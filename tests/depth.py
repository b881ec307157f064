"""How deep the tests search: `make test` runs a part of the long searches, `make test-all` (`--depth=full`) all of them.

A test or a case that only a full run needs is marked `deep`. A search by hypothesis takes its number of examples from
`examples` when it runs, not when its module is imported.
"""

import pytest

_full = False


def set_full(value):
    """Sets the depth; `tests/conftest.py` calls it with what the option `--depth` says."""
    global _full
    _full = value


def is_full():
    return _full


def examples(quick, full):
    """The number of examples that a search tries at the depth of this run."""
    return full if _full else quick


def case(item, parameter):
    """The value of a parameter of a collected test, None if it has no such parameter."""
    return item.callspec.params.get(parameter) if hasattr(item, "callspec") else None


def keep_first(items, per=None):
    """Marks cases `deep`, all but the first of each test and of each value of the parameter `per`."""
    groups = {}
    for item in items:
        groups.setdefault((item.path, item.originalname, case(item, per)), []).append(item)
    for group in groups.values():
        # Plugins may have changed the order of the items.
        group.sort(key=lambda item: tuple(item.callspec.indices.values()))
        for item in group[1:]:
            item.add_marker(pytest.mark.deep)
