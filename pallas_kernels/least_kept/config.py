"""Launch configuration of least_kept's kernel."""

from dataclasses import dataclass

from pallas_kernels._check import LaunchConfig

_PROGRAMS = 512  # about four per SM of an H200


@dataclass(frozen=True)
class Config(LaunchConfig, op="least_kept", chunk=1, lanes=1):
    """How the kernel is launched. Sizes are powers of two.

    Attributes:
        bits: Bits of the result that a pass finds; divides 30. A program keeps 2^bits sums for each of its lanes.
        chunk: Tokens of a program.
        lanes: Tokens that are compared at a time; divides `chunk`.
        num_warps: Warps of a program.
    """

    bits: int
    chunk: int
    lanes: int
    num_warps: int

    def __post_init__(self) -> None:
        if self.bits < 1 or 30 % self.bits:
            raise ValueError(f"least_kept: config.bits must divide 30, got {self.bits}")
        if self.lanes < 1 or self.chunk % self.lanes:
            raise ValueError(f"least_kept: config.lanes must divide config.chunk = {self.chunk}, got {self.lanes}")
        super().__post_init__()


def default_config(num_rows: int, num_tokens: int) -> Config:
    """Return the configuration for probabilities [rows, tokens].

    For 1, 16 and 64 rows of 248,320 tokens it is among the fastest of `benchmarks.drawing --tune` on an H200, JAX 0.11.2.
    The passes of few rows wait for each other's launches, so they find more bits each. Many rows are bound by arithmetic,
    which doubles with every bit more.
    """
    wanted = max(num_rows * num_tokens // _PROGRAMS, 1)
    chunk = min(8192, max(1024, 1 << (wanted - 1).bit_length()))
    if num_rows <= 8:
        return Config(5, chunk, lanes=256, num_warps=8)
    return Config(3, chunk, lanes=1024, num_warps=8) if num_rows <= 32 else Config(3, chunk, lanes=512, num_warps=4)
