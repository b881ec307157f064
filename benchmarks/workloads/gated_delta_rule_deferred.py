"""Named cases of deferred states, which tests, tuning and benchmarks share."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One call of the op: the lengths of its rows, the tokens of a group, and the sizes and dtypes of one layer.

    `ring_dtype` is the dtype of the corrections.
    """

    name: str
    lengths: tuple[int, ...]
    group: int = 16
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    ring_dtype: str = "float32"

    @property
    def channels(self) -> int:
        """The channels of a token's queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def pool_shapes(self, layers: int, blocks: int, slots: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """The shapes and dtypes of the pool and the ring, by the names of the op's arguments."""
        ring_slots = 2 * self.group
        return dict(
            pool=((layers, blocks, self.value_heads, self.value_dim, self.key_dim), self.state_dtype),
            ring_k=((layers, slots, self.key_heads, ring_slots, self.key_dim), self.dtype),
            ring_u=((layers, slots, self.value_heads, ring_slots, self.value_dim), self.ring_dtype),
            ring_g=((layers, slots, self.value_heads, ring_slots), "float32"),
        )


# The linear attention of Qwen3.5-35B-A3B, and OLMo-Hybrid's heads of 96 key and 192 value dims.
CASES = (
    *(
        Case(f"gdn {rows}x{tokens} {state}", (tokens,) * rows, state_dtype=state)
        for state in ("float32", "bfloat16")
        for rows in (8, 64, 256)
        for tokens in (1, 4)
    ),
    Case("gdn 8x4 float16", (4,) * 8, state_dtype="float16"),
    Case("gdn 64x4 bfloat16, corrections bfloat16", (4,) * 64, state_dtype="bfloat16", ring_dtype="bfloat16"),
    Case("gdn olmo", (1, 4, 0, 2, 3, 4, 1, 0), key_heads=30, value_heads=30, key_dim=96, value_dim=192),
    Case("gdn float32 inputs", (4,) * 8, dtype="float32"),
    Case("gdn groups of 8", (4,) * 8, group=8),
    Case("gdn groups of 32", (12,) * 8, group=32),
)
