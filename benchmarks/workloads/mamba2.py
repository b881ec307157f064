"""What the named cases of Mamba-2's ops share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mamba2Case:
    """One call of an op: the lengths of its rows, and the sizes and dtypes of one layer, which are Nemotron-H-8B's."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 128
    head_dim: int = 64
    state_dim: int = 128
    groups: int = 8
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
