"""How many threads a warpgroup has, and how they share a vector. It imports nothing of Mosaic GPU."""

THREADS = 128
LANES = 32  # of a warp


def pack_of_spread(length: int) -> int:
    """Returns how many elements that follow each other a thread has in the layout `spread`."""
    return next(pack for pack in (4, 2, 1) if length % (THREADS * pack) == 0)
