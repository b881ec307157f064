"""The tile sizes of deferred states' kernels, and the layout of the array of their factors."""

from typing import NamedTuple

from pallas_kernels._pallas_triton import power_of_two
from pallas_kernels._tiles import BLOCK


def sizes(max_query_tokens: int, length: int) -> tuple[int, int]:
    """Return the number of vectors and of a group's slots in tiles, for groups of `length` tokens.

    Half of the vectors are keys, the others are queries. Up to eight tokens have the same number of vectors, so that decode
    and verify rows run the same instructions.
    """
    return max(2 * power_of_two(max_query_tokens), BLOCK), max(power_of_two(length), BLOCK)


class Factors(NamedTuple):
    """The index at which each kind of factor begins in the array `factors`.

    Attributes:
        of_state: The factors of the state, [groups, vectors].
        of_key: For keys the factors of the token's own correction, [groups, vectors].
        fold: The factors of the corrections in a fold of group 0, [group_slots].
        decay: The factor of the state in this fold.
        size: The length of the array, a multiple of 16 bytes.
    """

    of_state: int
    of_key: int
    fold: int
    decay: int
    size: int

    @staticmethod
    def of(vectors: int, group_slots: int) -> "Factors":
        """The layout for `sizes` of tiles."""
        return Factors(0, 2 * vectors, 4 * vectors, 4 * vectors + group_slots, 4 * vectors + group_slots + 4)
