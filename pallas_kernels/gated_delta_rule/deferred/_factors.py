"""The sizes of what the values of deferred states are multiplied by, and the order of its factors."""

from typing import NamedTuple

from pallas_kernels._pallas_triton import power_of_two
from pallas_kernels._tiles import BLOCK


def sizes(max_query_tokens: int, length: int) -> tuple[int, int]:
    """Returns the number of vectors and of places in tiles, for groups of `length` tokens.

    Half of the vectors are keys, the others are queries. Their number does not follow the number of tokens up to eight, so
    that decode and verify rows run the same instructions.
    """
    return max(2 * power_of_two(max_query_tokens), BLOCK), max(power_of_two(length), BLOCK)


class Factors(NamedTuple):
    """The index at which each kind of factor begins in the array `factors`.

    Attributes:
        of_state: The factors of the state, [groups, vectors].
        of_key: For keys those of the token's own correction, [groups, vectors].
        fold: Those of the corrections in a fold of group 0, [places].
        decay: That of the state in this fold.
        size: The length of the array, a multiple of 16 bytes.
    """

    of_state: int
    of_key: int
    fold: int
    decay: int
    size: int

    @staticmethod
    def of(vectors: int, places: int) -> "Factors":
        """The factors of so many vectors and places."""
        return Factors(0, 2 * vectors, 4 * vectors, 4 * vectors + places, 4 * vectors + places + 4)
