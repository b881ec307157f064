"""Addresses, and loads and stores of 4 to 16 bytes at an address by single threads.

A word has 32 bits. Four words are at a multiple of 16 bytes, and `first` is a constant byte offset from an address.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir.dialects import arith
from jaxlib.mlir.dialects import llvm

from pallas_kernels.hopper.control import assembly
from pallas_kernels.hopper.registers import (
    Memory,
    Register,
    bitcast_vector,
    load_vector,
    of_python,
    select,
    type_of,
    unpack,
)

_WORDS = [jnp.int32] * 4


def address(memory: Memory, offset: Any) -> Register:
    """Return the address of an element, given its offset in elements from the memory's first one."""
    kind, offset = type_of(memory.dtype), of_python(offset)
    return Register(utils.getelementptr(utils.memref_ptr(memory.value), [offset.value], kind))


def smem_address(memory: Memory, offset: Any) -> Register:
    """Return the address of an element in SMEM, given its offset from the memory's first one. It has 32 bits."""
    return Register(llvm.ptrtoint(type_of(jnp.int32), address(memory, offset).value))


def row_address(memory: Memory, row: Register, column: Any) -> Register:
    """Return the address of an element of an array of two axes, or of a view of one."""
    return address(memory, row * memory.strides[0] + column)


def long_row_address(memory: Memory, row: Register, length: int, column: Register) -> Register:
    """Return the address of an element of rows of `length` elements, also beyond the 2^31st element."""
    start = _long(row) * Register(arith.constant(type_of(jnp.int64), length))
    return address(memory, start + _long(column))


def word_address(memory: Memory, start: int, index: Register) -> Register:
    """Return the address of the word with the 16-bit elements `index` and `index + 1`, after `start` words."""
    return address(memory, (index >> 1) + start)


def load_address(halves: Memory, index: int) -> Register:
    """Load the 64-bit address `index`, whose lower and upper half are neighbours in memory, int32."""
    pair = load_vector(halves, 2 * index, count=2)
    return unpack(bitcast_vector(pair, jnp.int64))[0]


def advance(address: Register, offset: Register) -> Register:
    """Return the address `offset` bytes after another one. Both are integers, the address of 64 bits."""
    return address + _long(offset)


def _long(x: Register) -> Register:
    return Register(arith.extsi(type_of(jnp.int64), x.value))


def load_words(address: Register, first: int = 0) -> list[Register]:
    """Load four words of GMEM."""
    return assembly(f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{first}];", "=r,=r,=r,=r,l", _WORDS, [address])


def store_words(address: Register, words: Sequence[Register], first: int = 0, *, passes_cache: bool = False) -> None:
    """Store four words to GMEM.

    `passes_cache` makes the L2 cache evict these words before others (`.cs`).
    """
    kind = "global.cs" if passes_cache else "global"
    assembly(f"st.{kind}.v4.b32 [$0+{first}], {{$1, $2, $3, $4}};", "l,r,r,r,r", None, [address, *words])


def load_words_if(
    condition: Register, address: Register, first: int = 0, *, passes_cache: bool = False
) -> list[Register]:
    """Load four words of GMEM where a condition is met, and return zeros elsewhere.

    A thread's loads keep the order in which they are written. With `passes_cache`, the L1 cache keeps no copy of the words.
    """
    clear = " ".join(f"mov.b32 ${n}, 0;" for n in range(4))
    # The compiler changes the order of loads that are not "relaxed".
    kind = "relaxed.cta.global.L1::no_allocate" if passes_cache else "relaxed.cta.global"
    load = f"@p ld.{kind}.v4.b32 {{$0, $1, $2, $3}}, [$4+{first}];"
    text = f"{{.reg .pred p; setp.ne.s32 p, $5, 0; {clear} {load}}}"
    return assembly(text, "=&r,=&r,=&r,=&r,l,r", _WORDS, [address, _integer(condition)])


def store_words_if(condition: Register, address: Register, words: Sequence[Register], first: int = 0) -> None:
    """Store four words to GMEM where a condition is met."""
    store = f"@p st.global.v4.b32 [$0+{first}], {{$1, $2, $3, $4}};"
    text = f"{{.reg .pred p; setp.ne.s32 p, $5, 0; {store}}}"
    assembly(text, "l,r,r,r,r,r", None, [address, *words, _integer(condition)])


def load_smem_words(address: Register) -> list[Register]:
    """Load four words of SMEM."""
    return assembly("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", _WORDS, [address])


def clear_smem_words_if(condition: Register, address: Register) -> None:
    """Set four words of SMEM to zero where a condition is met."""
    text = "{.reg .pred p; .reg .b32 z; setp.ne.s32 p, $1, 0; mov.b32 z, 0; @p st.shared.v4.b32 [$0], {z, z, z, z};}"
    assembly(text, "r,r", None, [address, _integer(condition)])


def load_if(condition: Register, address: Register, bits: int) -> Register:
    """Load 16 or 32 bits of GMEM as a word where a condition is met, and return 0 elsewhere."""
    text = f"{{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u{bits} $0, [$1];}}"
    return assembly(text, "=&r,l,r", jnp.int32, [address, _integer(condition)])


def store_if(condition: Register, address: Register, word: Register, bits: int) -> None:
    """Store a word, or its lower 16 bits, to GMEM where a condition is met."""
    text = f"{{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.u{bits} [$0], $1;}}"
    assembly(text, "l,r,r", None, [address, word, _integer(condition)])


def _integer(condition: Register) -> Register:
    """Return 1 where a condition is met, and else 0."""
    return select(condition, 1, 0)
