"""The number of threads of a warpgroup, and the layout of a vector over them. It imports nothing of Mosaic GPU."""

THREADS = 128
LANES = 32  # of a warp


def pack_of_spread(length: int) -> int:
    """Return the number of consecutive elements that a thread holds in the layout `spread`."""
    return next(pack for pack in (4, 2, 1) if length % (THREADS * pack) == 0)
