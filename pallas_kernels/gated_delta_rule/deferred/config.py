"""Launch configuration of the Triton kernel of deferred states."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig


@dataclass(frozen=True)
class DeferredConfig(
    LaunchConfig, op="gated_delta_rule_deferred", positive=("pieces",), block_value=16, tile_value=16, tile_key=16
):
    """How the kernel cuts a head's state [value_dim, key_dim], and how it multiplies. Sizes are powers of two.

    Attributes:
        block_value: The number of value dims per program. It changes no bit.
        tile_value: The number of value dims per tile of a state, at least 16. A program has block_value / tile_value
            tiles of values, which it runs one after the other.
        tile_key: The number of keys per tile of a state, at least 16. A program has all keys of its values.
        num_warps: The number of warps per program.
        pieces: The number of bfloat16 terms into which float32 values are split for products. The relative error is
            2^-8 with one term, 2^-16 with two and 2^-24 with three.
        values_first: Whether the product with the state is computed as [values, vectors] and not as [vectors, values].
            With four warps and 64 values, [values, vectors] uses the tensor cores' wider instruction.
    """

    block_value: int
    tile_value: int
    tile_key: int
    num_warps: int
    pieces: int
    values_first: bool = False

    def __post_init__(self) -> None:
        if self.tile_value < 1 or self.block_value % self.tile_value:
            raise ValueError(
                "DeferredConfig: block_value must be a multiple of tile_value, "
                f"got {self.block_value} and {self.tile_value}"
            )
        super().__post_init__()


def default_config(rows: int, itemsize: int) -> DeferredConfig:
    """Return the configuration for a batch of `rows` rows and states of `itemsize` bytes.

    With few rows, a program has one tile, so that there are more programs. All else depends on the state's dtype alone,
    because it determines the order of sums.
    """
    few = rows <= 16
    if itemsize == 4:
        return DeferredConfig(32 if few else 128, tile_value=32, tile_key=128, num_warps=4, pieces=3)
    return DeferredConfig(64 if few else 128, tile_value=64, tile_key=32, num_warps=4, pieces=2, values_first=True)
