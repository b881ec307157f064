"""Named cases of gated_delta_rule, which tests, tuning and benchmarks share."""

from dataclasses import dataclass

from pallas_kernels import StateLayout


@dataclass(frozen=True)
class Case:
    """One call of the op: the lengths of its rows, and the sizes and dtypes of one layer.

    `packed` cases call `gated_delta_rule_update`, the others `gated_delta_rule_recurrent`. `kda` means a decay per key
    channel, as in Kimi delta attention. `allow_neg_eigval` lets beta go up to 2. `layout` is the pool's layout.
    """

    name: str
    lengths: tuple[int, ...]
    key_heads: int = 16
    value_heads: int = 32
    key_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    state_dtype: str = "float32"
    packed: bool = True
    kda: bool = False
    allow_neg_eigval: bool = False
    layout: StateLayout = "VK"

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """The shape of a block, in the order of `layout`."""
        dims = (self.value_dim, self.key_dim) if self.layout == "VK" else (self.key_dim, self.value_dim)
        return (self.value_heads, *dims)


# The linear attention of Qwen3.5-35B-A3B and of Kimi-Linear, and OLMo-Hybrid's heads of 96 key and 192 value dims.
UPDATE_CASES = (
    *(Case(f"gdn_decode float32 {rows}", (1,) * rows) for rows in (1, 8, 64, 256)),
    *(Case(f"gdn_decode bfloat16 {rows}", (1,) * rows, state_dtype="bfloat16") for rows in (1, 8, 64, 256)),
    *(Case(f"gdn_verify float32 {rows}", (3,) * rows) for rows in (8, 64)),
    Case("gdn_verify bfloat16 64", (3,) * 64, state_dtype="bfloat16"),
    *(Case(f"kda_decode float32 {rows}", (1,) * rows, key_heads=32, packed=False, kda=True) for rows in (8, 64)),
    Case("gdn_decode float16 8", (1,) * 8, state_dtype="float16"),
    Case("gdn_verify olmo 8", (1, 4, 0, 2, 3, 4, 1, 0), key_heads=30, value_heads=30, key_dim=96, value_dim=192),
    *(Case(f"gdn_decode_kv float32 {rows}", (1,) * rows, layout="KV") for rows in (1, 64)),
    Case("gdn_decode_kv bfloat16 64", (1,) * 64, state_dtype="bfloat16", layout="KV"),
    Case("gdn_verify_kv float32 64", (3,) * 64, layout="KV"),
    Case("kda_decode_kv float32 64", (1,) * 64, key_heads=32, packed=False, kda=True, layout="KV"),
)
PREFILL_CASES = (
    Case("gdn_prefill 1x8192", (8192,)),
    Case("gdn_prefill 4x2048", (2048,) * 4),
    Case("gdn_prefill 16x128", (128,) * 16),
    Case("gdn_prefill 1x512", (512,)),
    Case("gdn_prefill 1x2048", (2048,)),
    Case("gdn_prefill 1x65536", (65536,)),
    Case("kda_prefill 1x8192", (8192,), key_heads=32, kda=True),
    Case("kda_prefill 4x2048", (2048,) * 4, key_heads=32, kda=True),
    Case("kda_prefill 16x128", (128,) * 16, key_heads=32, kda=True),
    Case(
        "gdn_prefill olmo",
        (1, 130, 0, 700, 63),
        key_heads=30,
        value_heads=30,
        key_dim=96,
        value_dim=192,
        allow_neg_eigval=True,
    ),
    Case("gdn_prefill_kv 1x8192", (8192,), layout="KV"),
    Case("gdn_prefill_kv 16x128", (128,) * 16, layout="KV"),
    Case("kda_prefill_kv 1x8192", (8192,), key_heads=32, kda=True, layout="KV"),
)
