"""How deep the tests search: `make test` runs a part of the long searches, `make test-all` (`--depth=full`) all of them.

A test or a case that only a full run needs is marked `deep`. A search by hypothesis takes its number of examples from
`examples` when it runs, not when its module is imported. A full run may go on as a quick one after some time, and then the
order of the files decides which of them are searched deeply.
"""

import hashlib
import math
import time

# When the full run ends, as `time.monotonic` tells the time. It is in the past for a quick one.
_end = -math.inf


def set_full(value, seconds=math.inf):
    """Sets the depth from now on; `tests/conftest.py` calls it with what the options `--depth` and `--deep-minutes` say."""
    global _end
    _end = time.monotonic() + seconds if value else -math.inf


def is_full():
    return time.monotonic() < _end


def place(file, order):
    """Where a file comes among all files in the order that a text stands for: each text has an order of its own."""
    return hashlib.sha256(f"{order} {file}".encode()).hexdigest()


def examples(quick, full):
    """The number of examples that a search tries at the depth of this run."""
    return full if is_full() else quick
