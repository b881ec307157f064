"""The public function of paged_attention: its contract, checks and dispatch.

Token i of row r is at position P = num_computed_tokens[r] + i of its sequence. Position p of row r is entry p % page_size of
page page_table[r, p // page_size], or of page page_table[slots[r], p // page_size] if `slots` is given. For one query head q
with its key head's keys k and values v:

    out = sum_{p <= P} softmax_p(scale * (q . k_p)) v_p

With gates, out is multiplied by sigmoid(gate), dim by dim.

Sources: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), for pages;
Dao, "FlashAttention-2" (2023), for the softmax in one pass; Dao et al., "Flash-Decoding" (2023), for splits of the keys.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels._check import checked, require
from pallas_kernels._run_op import run_op
from pallas_kernels.dispatch import Run
from pallas_kernels.paged_attention import pallas_triton, xla
from pallas_kernels.paged_attention._arguments import Attention
from pallas_kernels.paged_attention.config import Config
from pallas_kernels.rows import Rows


@checked
def paged_attention(
    q: Float[Array, "tokens heads key_dim"],
    keys: Float[Array, "layers pages page_size kv_heads key_dim"],
    values: Float[Array, "layers pages page_size kv_heads value_dim"] | None,
    rows: Rows,
    page_table: Int32[Array, "tables pages_per_row"],
    *,
    slots: Int32[Array, " rows"] | None = None,
    gates: Float[Array, "tokens gate_heads gate_dim"] | None = None,
    value_dim: int | None = None,
    scale: float | None = None,
    run: Run = Run(),
) -> Float[Array, "tokens heads value_dim"]:
    """Attend every token to its row's keys up to its own position.

    The equation is at the top of this file. The keys and values of the rows' own tokens must be in the pages already. What
    the pages hold after a row's end, NaN included, never reaches a result. Entries of `page_table` after a row's end are not
    read. Time and traffic follow the lengths of the rows ("xla": the length of the longest row), not the table's width.

    A token's result does not depend on other rows, to the bit, nor on later tokens of its row, as long as those are finite.
    With `rows.max_query_tokens`, it has the same bits whether the token came as a decode row or in a verify row. Without,
    it has the same bits however the row's tokens were cut into calls. Calls of the two kinds agree up to rounding ("xla":
    to the bit).

    Numerics: scores, softmax, sums and gates are float32, and the result is rounded once. Softmax probabilities are rounded
    to q's dtype before they are multiplied with values. float32 products are three products of tf32 in "triton" and
    Precision.HIGHEST in "xla". There is no derivative.

    Args:
        q: Queries of all rows, packed.
        keys: Keys of all layers and pages.
        values: Values of all layers and pages. None for latent attention, where a value is the first `value_dim` dims of
            its key.
        rows: The rows, with `num_computed_tokens`, the position of each row's first token. `layer` is the layer whose pages
            are read. `max_query_tokens` is a bound on the number of tokens of each decode or verify row; None stands for
            prompts, whose rows may have any length.
        page_table: The pages of each row, in the order of their positions; with `slots`, the pages of each slot.
        slots: The row of `page_table` that lists each row's pages. A row without tokens may have any slot. None if
            `page_table` has a row for each row.
        gates: Gates of the attended values: each head's last dims, as many as a value has. Dims before them, such as a
            query's, are not read, and neither are heads after q's. None multiplies nothing.
        value_dim: The dims of a value, if and only if `values` is None.
        scale: Positive factor of the scores; key_dim ** -0.5 if None.
        run: How it runs: by "xla", "triton" or "mosaic_gpu", with a `Config` for the Triton kernels. Mosaic GPU is for
            prompts, and needs a Hopper GPU.

    Returns:
        The attended values in q's dtype, which are 0 for tokens after the last row.

    Raises:
        ValueError: if a shape or dtype breaks the contract.
        UnsupportedError: if `run` names "triton" and the kernel cannot run these arguments, because a head is so
            wide that a tile of keys does not fit into a GPU's shared memory. If it is "mosaic_gpu", because the rows are not
            prompts, attention is latent, q, keys, values and gates are not all bfloat16 or all float16, keys and values
            have other than 64, 128, 192 or 256 dims each, the dims before a gate are no multiple of 64, the pages have
            a size that blocks of 64 or 128 keys do not fit, `run` has a configuration or interprets, or JAX is older than
            0.11.2.
    """
    rows = rows.having("paged_attention", "num_computed_tokens", optional=("max_query_tokens",))
    run = run.checked("paged_attention", Config)
    kv_heads, key_dim = keys.shape[3:]
    require(
        q.shape[1] > 0 and q.shape[1] % kv_heads == 0,
        f"paged_attention: the number of heads of keys must divide q's {q.shape[1]} heads, got {kv_heads}",
    )
    require(
        slots is not None or page_table.shape[0] == rows.num_rows,
        f"paged_attention: page_table must have {rows.num_rows} rows if slots is None, got {page_table.shape[0]}",
    )
    require(
        (values is None) != (value_dim is None),
        f"paged_attention: value_dim must be given if and only if values is None, got {value_dim}",
    )
    require(
        value_dim is None or 1 <= value_dim <= key_dim,
        f"paged_attention: value_dim must be from 1 to key_dim = {key_dim}, got {value_dim}",
    )
    require(
        rows.max_query_tokens is None or rows.max_query_tokens >= 1,
        f"paged_attention: rows.max_query_tokens must be None or at least 1, got {rows.max_query_tokens}",
    )
    require(scale is None or scale > 0, f"paged_attention: scale must be None or positive, got {scale}")
    dims = values.shape[4] if values is not None else value_dim or 0
    require(
        gates is None or gates.shape[2] >= dims,
        f"paged_attention: gates must have at least {dims} dims per head, got {0 if gates is None else gates.shape[2]}",
    )
    require(
        gates is None or gates.shape[1] >= q.shape[1],
        f"paged_attention: gates must have at least q's {q.shape[1]} heads, got {0 if gates is None else gates.shape[1]}",
    )
    if 0 in (q.shape[0], rows.num_rows, *page_table.shape):
        return jnp.zeros((*q.shape[:2], dims), q.dtype)
    inputs = Attention(q, keys, values, page_table, slots, gates)
    return run_op(
        "paged_attention",
        (inputs, rows),
        run,
        xla=xla.paged_attention,
        triton=pallas_triton.paged_attention,
        unsupported=pallas_triton.unsupported(inputs, rows, dims, run.config),
        sm90="pallas_kernels.paged_attention.sm90",
        value_dim=dims,
        scale=float(scale or key_dim**-0.5),
    )
