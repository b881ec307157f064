"""Launch configuration of mixture_of_experts' kernels."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig


@dataclass(frozen=True)
class Product(LaunchConfig, op="mixture_of_experts", columns=1, depth=16):
    """How one of the two products is tiled. Sizes are powers of two, and at least 16 unless there is a single token.

    Attributes:
        columns: The number of an expert's outputs per program.
        depth: The number of inputs of a tile.
        num_warps: Warps of a program.
        num_stages: The software-pipelining depth of the loop over inputs. The kernels of a single token load
            `num_stages` blocks of `depth` inputs per iteration.
    """

    columns: int
    depth: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Config(LaunchConfig, op="mixture_of_experts"):
    """How the kernels cut pairs of a token and one of its experts, and the products.

    Attributes:
        rows: The most pairs of a tile, all of one expert. A power of two, at least 16; or 1 for the kernels of a single
            token.
        up: The first product. With "swiglu", a program has `columns` outputs of the gate and of the up projection each.
        down: The second product.
        searched_pairs: The most pairs of a call in which programs find their tiles themselves. More pairs are sorted first,
            which takes two launches.
        short_rows: The most pairs of a sorted tile that is multiplied as a smaller one, because rows of padding take as
            long as others. None has no smaller tiles. An instruction of Hopper's tensor cores has 64 rows, in both sizes
            of tiles, so a pair has the same bits in both.
    """

    rows: int
    up: Product
    down: Product
    searched_pairs: int = 1024
    short_rows: int | None = None

    def __post_init__(self) -> None:
        least = 1 if self.rows == 1 else 16
        self.require_power("rows", least)
        if self.short_rows is not None:
            self.require_power("short_rows", 16)
        for product in (self.up, self.down):
            product.require_power("columns", least)


def config_of_one_token(itemsize: int, projections: int) -> Config:
    """Return the configuration for a single token, `itemsize` bytes per element and `projections` of the first product.

    A program is one warp, whose threads load 16 bytes at a time.
    """
    depth = 512 // itemsize
    return Config(1, Product(1, depth, 1, 16 // projections), Product(1, depth, 1, 18))


def default_config(num_pairs: int, experts: int, itemsize: int) -> Config:
    """Return the configuration for `num_pairs` pairs over `experts` experts, with elements of `itemsize` bytes.

    Decode rows give an expert few pairs, so its products are bound by reading weights. Prompts give it many, so its tiles
    are as large as tensor cores need them. For two-byte elements, the sizes are among the fastest of
    `benchmarks.experts --tune` for 16, 64, 2048 and 8192 tokens of Qwen3.5-35B-A3B on an H200 with JAX 0.11.2.
    """
    each = num_pairs / experts
    if itemsize == 4:
        rows = 16 if each <= 8 else 32
        return Config(rows, Product(32, 64, 4, 3), Product(32, 64, 4, 3))
    if each <= 16:
        down = Product(64, 128, 4, 4) if num_pairs <= 256 else Product(128, 64, 4, 4)
        return Config(16, Product(32, 128, 4, 4), down)
    if each <= 96:
        return Config(64, Product(64, 64, 4, 4), Product(128, 64, 4, 4))
    return Config(128, Product(128, 64, 8, 3), Product(128, 64, 8, 3), short_rows=64)
