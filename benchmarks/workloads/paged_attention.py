"""Named workloads of paged_attention, shared by tests, tuning and benchmarks."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One call for one layer. Row r has `lengths[r]` tokens after `computed[r]`.

    `value_dim` makes it latent attention. `window` bounds the rows of decode and verify calls; prompts have None. The page
    table is wide enough for `max_model_len` tokens.
    """

    name: str
    lengths: tuple[int, ...]
    computed: tuple[int, ...]
    window: int | None = 1
    heads: int = 16
    kv_heads: int = 4
    key_dim: int = 256
    value_dim: int | None = None
    page_size: int = 64
    dtype: str = "bfloat16"
    max_model_len: int = 40960

    @property
    def out_dim(self) -> int:
        """The dims of a value."""
        return self.value_dim or self.key_dim


def _decode(name: str, rows: int, keys: int, window: int = 1, **dims: Any) -> Case:
    return Case(name, (window,) * rows, (keys - window,) * rows, window, **dims)


def _ragged(rows: int) -> tuple[int, ...]:
    """Return the context lengths of `rows` rows, of which a few are long."""
    return tuple(32767 if r % 16 == 5 else 256 + (977 * r) % 4096 for r in range(rows))


_MLA: dict[str, Any] = dict(heads=32, kv_heads=1, key_dim=576, value_dim=512)
_WIDE_MLA: dict[str, Any] = dict(_MLA, heads=128)
# Qwen3.5-4B's attention: 16 heads over 4 heads of keys of 256. Kimi-Linear's latent attention.
DECODE_CASES = (
    *(_decode(f"attention decode {rows}x4096", rows, 4096) for rows in (1, 16, 64, 256)),
    *(_decode(f"attention decode {rows}x32768", rows, 32768) for rows in (1, 16)),
    Case("attention decode ragged 64", (1,) * 64, _ragged(64)),
    _decode("attention decode page of 16 16x4096", 16, 4096, page_size=16),
    _decode("attention verify K3 16x4096", 16, 4096, window=4),
    _decode("attention verify K7 16x4096", 16, 4096, window=8),
    _decode("attention decode MLA 16x4096", 16, 4096, **_MLA),
    _decode("attention verify MLA K3 16x4096", 16, 4096, window=4, **_MLA),
)
PROMPT_CASES = (
    Case("attention prompt 4096", (4096,), (0,), None),
    Case("attention prompt 512 over 32768", (512,), (32768,), None),
    Case("attention prompt 128 over 4096", (128,), (4096,), None),
    Case("attention prompt ragged", (1, 700, 130, 0, 65), (32768, 0, 4096, 0, 63), None),
    Case("attention prompt page of 16 4096", (4096,), (0,), None, page_size=16),
    Case("attention prompt MLA 2048", (2048,), (0,), None, **_MLA),
)
# Dims, groups, pages and dtypes that other models and users have.
ODD_CASES = (
    _decode("attention decode 64 float32", 4, 300, heads=8, kv_heads=8, key_dim=64, dtype="float32"),
    _decode("attention decode 96 float16", 4, 300, heads=6, kv_heads=2, key_dim=96, dtype="float16", page_size=24),
    _decode("attention verify 192", 4, 300, window=8, heads=16, kv_heads=2, key_dim=192, page_size=512),
    _decode("attention verify 256 float32", 4, 700, window=4, dtype="float32", page_size=16),
    _decode("attention decode MLA float32", 4, 700, **_MLA, dtype="float32"),
    _decode("attention decode MLA of 128 heads", 4, 700, **_WIDE_MLA),
    Case("attention prompt 96", (100, 3), (10, 0), None, heads=6, kv_heads=2, key_dim=96, page_size=24),
    Case("attention prompt 128 float16", (100, 3), (10, 0), None, heads=8, kv_heads=1, key_dim=128, dtype="float16"),
    Case("attention prompt 256 float32", (100, 3), (10, 0), None, dtype="float32"),
    Case("attention prompt MLA float32", (100, 3), (10, 0), None, **_MLA, dtype="float32"),
    Case("attention prompt MLA of 128 heads", (100, 3), (10, 0), None, **_WIDE_MLA),
)
CASES = DECODE_CASES + PROMPT_CASES + ODD_CASES
