"""Which files may have tests that need a GPU. Importing all others would take a tenth of the time of a run on a GPU.

`tests/conftest.py` refuses a GPU test in a file that is not found here, so that none is left out unseen.
"""

import functools
import re
from pathlib import Path

# Such a file names the marker, a kernel's kind, or a list of implementations that has the marker.
# "--disable-gpu" is an option of a browser.
NAMES = re.compile(r"(?<!-)\bgpu\b|mosaic_gpu|\b(IMPLEMENTATIONS|MOSAIC_GPU|WINDOWS|EVERY)\b")


@functools.cache
def may_have_gpu_tests(file):
    return NAMES.search(Path(file).read_text()) is not None


def in_folder(folder):
    """Returns the files below a folder that may have GPU tests, the longest first, because they take longest."""
    files = [file for file in Path(folder).rglob("test_*.py") if may_have_gpu_tests(file)]
    return sorted(files, key=lambda file: (-file.stat().st_size, file))
