"""Arithmetic of single threads, as operations of MLIR, and the tensor core's product of a warp.

All functions are for `pm.inline`.

Source: the registers of the products are those of "mma.m16n8k16" and "mma.m16n8k8" in NVIDIA's PTX ISA, in the sections
"Matrix fragments". Those of transposed matrices are in the section "ldmatrix".
"""

from collections.abc import Sequence
from typing import Any

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_mosaic import arith, ir, math, memref, vector

_LOG2_E = 1.4426950408889634
LANES = 32  # of a warp


def word_address(ref: Any, start: Any, place: Any) -> Any:
    """Returns the address of the word that has the numbers `place` and `place + 1`."""
    return pm.address(ref, total(arith.shrui(place, pm.constant(1)), pm.constant(start)))


def load_address(halves: Any, number: int) -> Any:
    """Loads an address, whose lower and upper half are neighbours in memory, int32. It is a number of 64 bits."""
    pair = vector.load(vector_type(2, pm.integer()), halves, [index(pm.constant(2 * number))], alignment=8)
    return vector.extract(vector.bitcast(vector_type(1, pm.long()), pair), [], [0])


def moved(address: Any, offset: Any) -> Any:
    """Returns the address so many bytes after another one. Both are numbers, and the offset has 32 bits."""
    return arith.addi(address, arith.extsi(pm.long(), offset))


def load_words(place: Any, first: int = 0) -> list[Any]:
    """Loads four words of the GPU's memory, from `first` bytes after an address on, which are a multiple of 16."""
    return _four_words(f"ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4+{first}];", "=r,=r,=r,=r,l", [place])


def store_words(place: Any, words: Sequence[Any], first: int = 0, *, passes_cache: bool = False) -> None:
    """Stores four words to the GPU's memory, from `first` bytes after an address on, which are a multiple of 16.

    `passes_cache` says that the L2 cache gives up these words before others when it needs room.
    """
    kind = "global.cs" if passes_cache else "global"
    pm.assembly(f"st.{kind}.v4.b32 [$0+{first}], {{$1, $2, $3, $4}};", "l,r,r,r,r", None, [place, *words])


def load_transposed_matrices(place: Any) -> list[Any]:
    """Loads four matrices of 8 x 8 numbers of 16 bits from shared memory, and transposes them, by a warp.

    Args:
        place: The address of a row: the first eight threads give those of the first matrix, and so on. It is a multiple of
            16.

    Returns:
        For each matrix, a word with two numbers that follow each other in a row of the transposed one. The first four
        threads get those of its first row, and so on.
    """
    text = "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];"
    return _four_words(text, "=r,=r,=r,=r,r", [place])


def store_matrices(place: Any, words: Sequence[Any], *, transposed: bool = False) -> None:
    """Stores four matrices of 8 x 8 numbers of 16 bits in shared memory, by a warp.

    Args:
        place: The address of a row of what is stored: the first eight threads give those of the first matrix, and so on. It
            is a multiple of 16.
        words: For each matrix, a word with two numbers that follow each other in a row. The first four threads have those of
            its first row, and so on.
        transposed: Whether the matrices are transposed as they are stored.
    """
    kind = ".trans" if transposed else ""
    text = f"stmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 [$0], {{$1, $2, $3, $4}};"
    pm.assembly(text, "r,r,r,r,r", None, [place, *words])


def load_shared_words(place: Any) -> list[Any]:
    """Loads four words of shared memory from an address on, which is a multiple of 16."""
    return _four_words("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [place])


def clear_shared_words_if(condition: Any, place: Any) -> None:
    """Sets four words of shared memory to zero, from an address on that is a multiple of 16, where a condition is met."""
    text = "{.reg .pred p; .reg .b32 z; setp.ne.s32 p, $1, 0; mov.b32 z, 0; @p st.shared.v4.b32 [$0], {z, z, z, z};}"
    pm.assembly(text, "r,r", None, [place, as_integer(condition)])


def load_words_if(condition: Any, place: Any, first: int = 0, *, passes_cache: bool = False) -> list[Any]:
    """Does what `load_words` does where a condition is met, and returns zeros elsewhere.

    A thread's loads keep the order in which they are written. `passes_cache` says that the L1 cache keeps no copy of the
    words.
    """
    clear = " ".join(f"mov.b32 ${n}, 0;" for n in range(4))
    # The compiler changes the order of loads that are not "relaxed".
    kind = "relaxed.cta.global.L1::no_allocate" if passes_cache else "relaxed.cta.global"
    load = f"@p ld.{kind}.v4.b32 {{$0, $1, $2, $3}}, [$4+{first}];"
    text = f"{{.reg .pred p; setp.ne.s32 p, $5, 0; {clear} {load}}}"
    return _four_words(text, "=&r,=&r,=&r,=&r,l,r", [place, as_integer(condition)])


def _four_words(text: str, constraints: str, operands: Sequence[Any]) -> list[Any]:
    """Writes instructions that return four words."""
    result = ir.Type.parse("!llvm.struct<(i32, i32, i32, i32)>")
    found = pm.assembly(text, constraints, result, operands)
    return [pm.element_of_struct(found, n, pm.integer()) for n in range(4)]


def store_words_if(condition: Any, place: Any, words: Sequence[Any], first: int = 0) -> None:
    """Does what `store_words` does where a condition is met."""
    store = f"@p st.global.v4.b32 [$0+{first}], {{$1, $2, $3, $4}};"
    text = f"{{.reg .pred p; setp.ne.s32 p, $5, 0; {store}}}"
    pm.assembly(text, "l,r,r,r,r,r", None, [place, *words, as_integer(condition)])


def address_in_rows(ref: Any, row: Any, length: int, column: Any) -> Any:
    """Returns the address of an element of rows that follow each other, also beyond the 2^31st element."""
    long = lambda x: arith.extsi(pm.long(), x)
    start = arith.muli(long(row), arith.constant(pm.long(), length))
    return pm.address(ref, arith.addi(start, long(column)))


def load_if(condition: Any, place: Any, bits: int) -> Any:
    """Loads 16 or 32 bits of the GPU's memory as a word where a condition is met, and returns 0 elsewhere."""
    text = f"{{.reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u{bits} $0, [$1];}}"
    return pm.assembly(text, "=&r,l,r", pm.integer(), [place, as_integer(condition)])


def store_if(condition: Any, place: Any, word: Any, bits: int) -> None:
    """Stores a word, or its lower 16 bits, to the GPU's memory where a condition is met."""
    text = f"{{.reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.u{bits} [$0], $1;}}"
    pm.assembly(text, "l,r,r", None, [place, word, as_integer(condition)])


def as_integer(condition: Any) -> Any:
    """Returns 1 where a condition is met, and else 0."""
    return arith.select(condition, pm.constant(1), pm.constant(0))


def load(ref: Any, place: Any, count: int) -> Any:
    """Loads 2 or 8 neighbours from memory with one axis, as a vector. Their place is a multiple of their number."""
    kind = ir.MemRefType(ref.type).element_type
    return vector.load(vector_type(count, kind), ref, [index(place)], alignment=min(16, count * pm.bytes_of(kind)))


def load_number(ref: Any, *at: Any) -> Any:
    """Loads a number as float32. `at` is its place, an integer for each axis of the array."""
    x = memref.load(ref, [index(each) for each in at])
    return x if x.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), x)


def wide(values: Any) -> Any:
    """Returns a vector's numbers as float32."""
    wanted = vector_type(ir.VectorType(values.type).shape[0], ir.F32Type.get())
    return values if values.type == wanted else arith.extf(wanted, values)


def words(values: Any) -> Any:
    """Returns eight numbers of 16 bits as four words."""
    return vector.bitcast(vector_type(4, pm.integer()), values)


def numbers(words: Sequence[Any], kind: Any) -> Any:
    """Returns four words as a vector of eight numbers of 16 bits."""
    return vector.bitcast(vector_type(8, kind), from_parts(words))


def word(pair: Any) -> Any:
    """Returns two numbers of 16 bits as a word."""
    return vector.extract(vector.bitcast(vector_type(1, pm.integer()), pair), [], [0])


def pair(word: Any, kind: Any) -> Any:
    """Returns a word as a vector of two numbers of 16 bits."""
    return vector.bitcast(vector_type(2, kind), from_parts([word]))


def rounded_pair(values: Sequence[Any], dtype: Any) -> Any:
    """Returns a vector of two float32 numbers, rounded to a dtype."""
    return arith.truncf(vector_type(2, pm.type_of(dtype)), from_parts(values))


def parts(x: Any) -> list[Any]:
    """Returns the elements of a vector."""
    return [vector.extract(x, [], [n]) for n in range(ir.VectorType(x.type).shape[0])]


def from_parts(parts: Sequence[Any]) -> Any:
    """Makes a vector of its elements."""
    return vector.from_elements(vector_type(len(parts), parts[0].type), parts)


def elements(x: Any) -> list[Any]:
    """Returns what a thread has of an array in the layout `pm.spread`."""
    return [element for held in x.registers.flat for element in parts(held)]


def array(numbers: Sequence[Any]) -> Any:
    """Makes an array in the layout `pm.spread` of what a thread has of it."""
    length = 128 * len(numbers)
    pack = pm.pack_of_spread(length)
    kind = vector_type(pack, numbers[0].type)
    held = [vector.from_elements(kind, numbers[n : n + pack]) for n in range(0, len(numbers), pack)]
    return pm.fragments_of_spread(held, length)


def vector_type(length: int, kind: Any) -> Any:
    """Returns the type of vectors."""
    return ir.VectorType.get((length,), kind)


def number(value: float) -> Any:
    """Returns a float32 number."""
    return arith.constant(ir.F32Type.get(), float(value))


def splat(value: float) -> Any:
    """Returns a vector of eight times the same float32 number."""
    return vector.broadcast(vector_type(8, ir.F32Type.get()), number(value))


def index(x: Any) -> Any:
    """Returns an integer as an index of memory."""
    return arith.index_cast(ir.IndexType.get(), x)


def indices(*numbers: Any) -> list[Any]:
    """Returns integers as the place of an element in memory with several axes."""
    return [index(x) for x in numbers]


def lane_and_warp(thread: Any) -> tuple[Any, Any]:
    """Returns a thread's place in its warp, and the place of the warp, given that of the thread."""
    return arith.andi(thread, pm.constant(LANES - 1)), arith.shrui(thread, pm.constant(LANES.bit_length() - 1))


def swizzled(group: Any, row: Any, length: int) -> Any:
    """Returns where the swizzle puts a group of numbers: the place of the first one in its row of a tile's piece.

    Args:
        group: The place of the group in the row.
        row: The place of the row in its piece, which has eight.
        length: How many numbers 16 bytes hold. That many are a group.
    """
    return scaled(arith.xori(group, row), length)


def total(first: Any, *others: Any) -> Any:
    """Returns the sum of integers."""
    for other in others:
        first = arith.addi(first, other)
    return first


def scaled(x: Any, factor: int) -> Any:
    """Returns the product of an integer and a constant."""
    return arith.muli(x, pm.constant(factor))


def added(values: Sequence[Any]) -> Any:
    """Returns the sum of floats, or of vectors of them, in their order."""
    result = values[0]
    for value in values[1:]:
        result = arith.addf(result, value)
    return result


def over(x: Any, count: int) -> Any:
    """Returns a float32 number divided by a constant."""
    return arith.mulf(x, number(1.0 / count))


def is_less(x: Any, limit: int) -> Any:
    """Returns whether an integer is less than a constant."""
    return arith.cmpi(arith.CmpIPredicate.slt, x, pm.constant(limit))


def is_equal(x: Any, number: int) -> Any:
    """Returns whether an integer is a constant."""
    return arith.cmpi(arith.CmpIPredicate.eq, x, pm.constant(number))


def differs(x: Any, number: int) -> Any:
    """Returns whether an integer is not a constant."""
    return arith.cmpi(arith.CmpIPredicate.ne, x, pm.constant(number))


def either(condition: Any, x: Any, y: Any) -> Any:
    """Returns x where the condition is met, and else y. They are numbers or addresses."""
    return arith.select(condition, x, y)


def is_between(x: Any, low: Any, high: Any) -> Any:
    """Returns whether low <= x < high."""
    return arith.andi(arith.cmpi(arith.CmpIPredicate.sge, x, low), arith.cmpi(arith.CmpIPredicate.slt, x, high))


def clamped(x: Any, low: Any, high: Any) -> Any:
    """Returns the integer from `low` to `high` that is nearest to x."""
    return arith.minsi(arith.maxsi(x, low), high)


def multiply_tile(sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any], kind: Any) -> list[Any]:
    """Adds a product of tiles [16, 16] and [16, 8] to a warp's sums, on tensor cores.

    A lane has four sums: those of the rows `lane // 4` and `lane // 4 + 8`, in the columns `lane % 4 * 2` and the one after.
    It gives words with two neighbours of these rows, and of the column `lane // 4`: of the first eight inputs the two from
    `lane % 4 * 2` on, and the same of the last eight.

    Args:
        sums: The four sums.
        left: Words of the first row and of the second one, of the first inputs, and then of the last ones.
        right: Words of the column, of the first inputs and of the last ones.
        kind: The type of the numbers in the words, bfloat16 or float16.
    """
    return _multiply(f"m16n8k16 {'bf16' if isinstance(kind, ir.BF16Type) else 'f16'}", sums, left, right)


def multiply_tile_of_tf32(sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Adds a product of tiles [16, 8] and [8, 8] to a warp's sums, which are as in `multiply_tile`, on tensor cores.

    Args:
        sums: The four sums.
        left: Float32 numbers, of which the last 13 bits are ignored, of the first row and of the second one: of the input
            `lane % 4`, and then of the fourth one after it.
        right: The same two inputs of the column.
    """
    bits = lambda numbers: [arith.bitcast(pm.integer(), x) for x in numbers]
    return _multiply("m16n8k8 tf32", sums, bits(left), bits(right))


def _multiply(kind: str, sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
    """Writes a product of a warp. `kind` has the tiles' sizes and the type of the numbers in the words."""
    f32, (sizes, name) = ir.F32Type.get(), kind.split()
    text = f"mma.sync.aligned.{sizes}.row.col.f32.{name}.{name}.f32 {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, "
    text += "{$8, $9}, {$10, $11, $12, $13};"
    result = ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>")
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    found = pm.assembly(text, constraints, result, [*left, *right, *sums], has_effects=False)
    return [pm.element_of_struct(found, place, f32) for place in range(4)]


def softplus(x: Any) -> Any:
    """Returns log(1 + exp(x)) of a float32 number."""
    large = arith.maximumf(x, number(0.0))
    return arith.addf(large, math.log1p(math.exp(arith.negf(math.absf(x)))))


def sigmoid(x: Any) -> Any:
    """Returns 1 / (1 + exp(-x)) of a float32 number."""
    odds = approximate("ex2", arith.mulf(x, number(-_LOG2_E)))
    return approximate("rcp", arith.addf(number(1.0), odds))


def silu(x: Any) -> Any:
    """Returns x / (1 + exp(-x)) of a float32 number."""
    return arith.mulf(x, sigmoid(x))


def approximate(function: str, x: Any) -> Any:
    """Returns the GPU's approximation of "ex2", "rcp" or "rsqrt", which is right to about 2e-7."""
    text = f"{function}.approx.ftz.f32 $0, $1;"
    return pm.assembly(text, "=f,f", ir.F32Type.get(), [x], has_effects=False)
