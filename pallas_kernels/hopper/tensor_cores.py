"""The tensor cores' products of a single warp, and the loads and stores of their matrices, 8 x 8 16-bit elements.

Source: NVIDIA's PTX ISA: the fragments of the products in "Matrix fragments" of "mma.m16n8k16" and "mma.m16n8k8", and the
registers of the matrices in "ldmatrix" and "stmatrix".
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels.hopper.control import assembly
from pallas_kernels.hopper.registers import Register, bitcast


def ldmatrix_transposed(address: Register) -> list[Register]:
    """Load four matrices from SMEM, and transpose them.

    Args:
        address: The address of a row: lanes 0 to 7 give the addresses of the first matrix's rows, and so on. It is a
            multiple of 16.

    Returns:
        For each matrix, a word with two neighbouring elements of a row of the transposed one. Lanes 0 to 3 get the words of
        its first row, and so on.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    return assembly(text, "=r,=r,=r,=r,r", [jnp.int32] * 4, [address])


def stmatrix(address: Register, words: Sequence[Register], *, transposed: bool = False) -> None:
    """Store four matrices in SMEM.

    Args:
        address: The address of a row of the stored matrices: lanes 0 to 7 give the addresses of the first matrix's rows, and
            so on. It is a multiple of 16.
        words: For each matrix, a word with two neighbouring elements of a row. Lanes 0 to 3 have the words of its first row,
            and so on.
        transposed: Whether the matrices are transposed as they are stored.
    """
    kind = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    assembly(text, "r,r,r,r,r", None, [address, *words])


def mma(sums: Sequence[Register], left: Sequence[Register], right: Sequence[Register], dtype: Any) -> list[Register]:
    """Add a product of tiles [16, 16] and [16, 8] to a warp's sums.

    A lane has the four sums in the rows `lane // 4` and `lane // 4 + 8` and the columns `lane % 4 * 2` and the next. Its
    operands are words with two neighbouring elements of these rows, and of the column `lane // 4`: the elements from
    `lane % 4 * 2` on of the first eight inputs, and of the last eight.

    Args:
        sums: The four sums.
        left: Words of the first row and of the second one, of the first inputs, and then of the last ones.
        right: Words of the column, of the first inputs and of the last ones.
        dtype: The dtype of the elements in the words, bfloat16 or float16.
    """
    return _mma("m16n8k16", "bf16" if dtype == jnp.bfloat16 else "f16", sums, left, right)


def mma_tf32(sums: Sequence[Register], left: Sequence[Register], right: Sequence[Register]) -> list[Register]:
    """Add a product of tiles [16, 8] and [8, 8] to a warp's sums, which are as in `mma`.

    Args:
        sums: The four sums.
        left: Float32 values, whose last 13 bits are ignored, of the first row and of the second one: of the input
            `lane % 4`, and then of the fourth one after it.
        right: The same two inputs of the column.
    """
    bits = lambda values: [bitcast(x, jnp.int32) for x in values]
    return _mma("m16n8k8", "tf32", sums, bits(left), bits(right))


def _mma(sizes: str, name: str, sums: Sequence[Register], left: Sequence[Register], right: Sequence[Register]) -> Any:
    """Write a product, given the tiles' sizes and the type of the elements in the words."""
    text = f"mma.sync.aligned.{sizes}.row.col.f32.{name}.{name}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
    text += "{$8, $9}, {$10, $11, $12, $13};"
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    return assembly(text, constraints, [jnp.float32] * 4, [*left, *right, *sums], has_effects=False)
