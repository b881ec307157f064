"""How deep the tests search: `make test` runs a part of the long searches, `make test-all` (`--depth=full`) all of them.

A test asks when it runs, not when its module is imported. A test or a case that only a full run needs is marked `deep`.
"""

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
