"""Inverts triangular systems on Hopper GPUs by forward substitution. Four neighbouring threads share four columns.

All products and sums are in float32, in a fixed order, so the error is only rounding, whatever the systems hold. Rows are
found in groups of eight, of which each of the four threads has two, in all of its columns. So a thread loads a quarter of a
system's elements and multiplies each of them four times. The threads tell each other the rows that they find.

A column has no elements above its own row. The four columns of a thread are 16 apart, so all warps have equal work, and
columns take part one after the other. The code is in loops, because cores take long to fetch instructions that run once.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import _pallas_mosaic as pm

SIZE = 64  # the rows of a system
_GROUP = (
    8  # rows that are found one after the other, and then taken out of all rows below them: those of a tile's piece
)
_GROUPS = SIZE // _GROUP
_VECTOR = 4  # elements that are loaded at once
_TEAM = 4  # threads that share as many columns
_SLOTS = range(_GROUP // _TEAM)  # the rows of a group that a thread has: they follow each other
_APART = SIZE // _TEAM  # columns between two of a thread's columns

Row = list[Any]  # a row's elements in a thread's columns
Rows = list[Row]  # those of a thread's rows in a group


def substitute(system: Any, beta: Any, solution: Any, *, transposed: bool = False) -> None:
    """Writes (I + L)^-1 beta for two systems L, by one warpgroup. All arguments are in shared memory.

    Args:
        system: -L below its diagonal, which is all that is used. float32 [2, 64, 64], `tiled`.
        beta: The factors of the columns. float32 [2, 64].
        solution: Receives the results in pieces of bfloat16, the largest first. bfloat16 [2, pieces, 64, 64], `tiled`. It
            may take the place of `system`.
        transposed: Whether the results are stored transposed, two elements of a column at a time.
    """

    def body(_: Any, system: Any, beta: Any, solution: Any) -> None:
        float32, thread = pm.ir.F32Type.get(), pm.arith.index_cast(pm.ir.IndexType.get(), pm.thread_index_again())
        member, team = _remainder(thread, _TEAM), _remainder(_quotient(thread, _TEAM), _APART)
        half, zero = _quotient(thread, _TEAM * _APART), pm.arith.constant(float32, 0.0)
        own = [pm.arith.addi(_scaled(member, len(_SLOTS)), _index(slot)) for slot in _SLOTS]  # rows of every group
        columns = [pm.arith.addi(team, _index(n * _APART)) for n in range(_TEAM)]
        betas = [pm.memref.load(beta, [half, column]) for column in columns]

        def start(group: int, n: int) -> list[Any]:
            """Returns a column's elements in a thread's rows of a group, before anything is taken out of them."""
            row = [pm.arith.addi(each, _index(group * _GROUP)) for each in own]
            reached = 0 <= group * _GROUP - n * _APART < _APART
            return [pm.arith.select(_equal(each, columns[n]), betas[n], zero) if reached else zero for each in row]

        rows: list[Rows] = [[[] for _ in _SLOTS] for _ in range(_GROUPS)]
        for n in range(_TEAM):
            first, last = n * _APART // _GROUP, (n + 1) * _APART // _GROUP
            for group in range(_GROUPS):
                for slot, element in enumerate(start(group, n)):
                    rows[group][slot].append(element)
            found = _find_groups(system, half, member, own, first, last, rows[first:])
            rows = rows[:first] + found
        pm.warpgroup_barrier()  # all threads have read the systems
        (_store_transposed if transposed else _store)(rows, solution, half, own, columns)

    pm.inline(body, (system, pm.tiling(jnp.float32)), (beta, ()), (solution, pm.tiling(jnp.bfloat16)))


def _find_groups(
    system: Any, half: Any, member: Any, own: Sequence[Any], first: int, last: int, rows: Sequence[Rows]
) -> list[Rows]:
    """Finds the rows of some groups, and takes what they give out of all rows below.

    Args:
        system: The systems.
        half: The number of the thread's system.
        member: The thread's place in its team.
        own: The thread's rows of every group.
        first: The first group.
        last: The group after the last one.
        rows: The thread's rows from the first group on.

    Returns:
        `rows`, of which those of the groups have been found.
    """
    columns, of_tile = len(rows[0][0]), pm.SWIZZLE // 4 // _GROUP  # groups of elements in a row of a tile

    def find(group: Any, values: Sequence[Any]) -> list[Any]:
        """Finds a group's rows. `values` are the rows from this group on, and then those that have been found."""
        rest = _in_rows(values, columns)
        at_tile, in_tile = _quotient(group, of_tile), _remainder(group, of_tile)
        parts = [pm.arith.addi(_scaled(in_tile, _GROUP // _VECTOR), _index(n)) for n in range(_GROUP // _VECTOR)]

        def elements(below: int, slot: int) -> list[Any]:
            """Loads what a thread's row of the group that comes so many groups later has in this group's columns."""
            vector, found = pm.ir.VectorType.get([_VECTOR], pm.ir.F32Type.get()), []
            for part in parts:  # the swizzle changes the places of a row's parts
                place = _scaled(pm.arith.xori(part, own[slot]), _VECTOR)
                at = [half, pm.arith.addi(group, _index(below)), at_tile, own[slot], place]
                loaded = pm.vector.load(vector, system, at, alignment=16)
                found += [pm.vector.extract(loaded, [], [i]) for i in range(_VECTOR)]
            return found

        found, here = _find_rows(rest[0], [elements(0, slot) for slot in _SLOTS], member)
        after = []
        for below in range(1, len(rest)):
            take_out = lambda below=below: [_take_out(rest[below][n], elements(below, n), found) for n in _SLOTS]
            if last + below <= _GROUPS:
                after.append(take_out())
                continue
            exists = pm.arith.cmpi(pm.arith.CmpIPredicate.ult, group, _index(_GROUPS - below))
            held = _values([rest[below]])
            branch: Any = pm.scf.IfOp(exists, [pm.ir.F32Type.get()] * len(held), has_else=True)
            with pm.ir.InsertionPoint(branch.then_block):
                pm.scf.yield_(_values([take_out()]))
            with pm.ir.InsertionPoint(branch.else_block):
                pm.scf.yield_(held)
            after += _in_rows(branch.results, columns)
        return _values([*after, here])

    turned = _in_rows(pm.repeated(_index(first), _index(last), find, _values(rows)), columns)
    return turned[first - last :] + turned[: first - last]


def _find_rows(rows: Rows, elements: Sequence[Sequence[Any]], member: Any) -> tuple[list[Row], Rows]:
    """Finds the rows of a group. Returns all of them, and this thread's own ones.

    Args:
        rows: The thread's rows.
        elements: The elements of the system in these rows and in the columns of this group.
        member: The thread's place in its team.
    """
    found: list[Row] = []
    for turn in range(_TEAM):
        # A thread's two rows depend on those of the threads before it, and the second one on the first one.
        own, later = _equal(member, _index(turn)), pm.arith.cmpi(pm.arith.CmpIPredicate.ugt, member, _index(turn))
        first, second = rows
        second = _if(own, _take_out(second, elements[1][len(found) : len(found) + 1], [first]), second)
        pair = [[pm.from_lane(x, turn, of=_TEAM) for x in row] for row in (first, second)]
        of_pair = [of_row[len(found) : len(found) + 2] for of_row in elements]
        taken = [_take_out(row, of_row, pair) for row, of_row in zip((first, second), of_pair, strict=True)]
        rows = [_if(later, new, old) for new, old in zip(taken, (first, second), strict=True)]
        found += pair
    return found, rows


def _take_out(row: Row, elements: Sequence[Any], found: Sequence[Row]) -> Row:
    """Takes found rows out of a row, which has these elements of the system in their columns."""
    for element, values in zip(elements, found, strict=True):
        row = [pm.math.fma(element, value, x) for value, x in zip(values, row, strict=True)]
    return row


def _if(condition: Any, row: Row, other: Row) -> Row:
    """Returns one row where a condition is met, and else the other one."""
    return [pm.arith.select(condition, x, y) for x, y in zip(row, other, strict=True)]


def _values(rows: Sequence[Rows]) -> list[Any]:
    """Returns the elements of all groups' rows."""
    return [x for group in rows for row in group for x in row]


def _in_rows(values: Sequence[Any], columns: int) -> list[Rows]:
    """Returns as rows of groups what `_values` made of them."""
    rows = [list(values[n : n + columns]) for n in range(0, len(values), columns)]
    return [rows[n : n + len(_SLOTS)] for n in range(0, len(rows), len(_SLOTS))]


def _pieces(values: Sequence[Any], count: int) -> list[list[Any]]:
    """Returns the pieces of float32 numbers, the largest first, cut as in `_dot.pieces` but not yet rounded."""
    float32, int32 = pm.ir.F32Type.get(), pm.ir.IntegerType.get_signless(32)
    upper, found = pm.arith.constant(int32, -65536), []
    for _ in range(count - 1):
        bits = [pm.arith.andi(pm.arith.bitcast(int32, x), upper) for x in values]
        found.append([pm.arith.bitcast(float32, x) for x in bits])
        values = [pm.arith.subf(x, part) for x, part in zip(values, found[-1], strict=True)]
    return [*found, list(values)]


def _store(rows: Sequence[Rows], solution: Any, half: Any, own: Sequence[Any], columns: Sequence[Any]) -> None:
    """Stores a thread's elements, one at a time, where the swizzle puts them."""
    for group, of_group in enumerate(rows):
        for row, values in zip(own, of_group, strict=True):
            for piece, parts in enumerate(_pieces(values, solution.type.shape[1])):
                for column, part in zip(columns, parts, strict=True):
                    at = pm.arith.xori(_quotient(column, 8), row)
                    place = pm.arith.addi(_scaled(at, 8), _remainder(column, 8))
                    narrow = pm.arith.truncf(pm.ir.BF16Type.get(), part)
                    pm.memref.store(narrow, solution, [half, _index(piece), _index(group), _index(0), row, place])


def _store_transposed(
    rows: Sequence[Rows], solution: Any, half: Any, own: Sequence[Any], columns: Sequence[Any]
) -> None:
    """Stores the transpose of a thread's elements, two of a column at a time, where the swizzle puts them."""
    vector = lambda dtype: pm.ir.VectorType.get([len(_SLOTS)], dtype)
    for n, column in enumerate(columns):
        tile, row = _quotient(column, 8), _remainder(column, 8)
        for group, of_group in enumerate(rows):
            at = pm.arith.xori(row, _index(group))
            place = pm.arith.addi(_scaled(at, 8), own[0])
            for piece, parts in enumerate(_pieces([of_row[n] for of_row in of_group], solution.type.shape[1])):
                wide = pm.vector.from_elements(vector(pm.ir.F32Type.get()), parts)
                narrow = pm.arith.truncf(vector(pm.ir.BF16Type.get()), wide)
                pm.vector.store(narrow, solution, [half, _index(piece), tile, _index(0), row, place], alignment=4)


def _index(number: int) -> Any:
    """Returns a number as an index."""
    return pm.arith.constant(pm.ir.IndexType.get(), number)


def _scaled(x: Any, factor: int) -> Any:
    """Returns an index times a constant."""
    return pm.arith.muli(x, _index(factor))


def _quotient(x: Any, divisor: int) -> Any:
    """Returns an index divided by a constant, without the remainder."""
    return pm.arith.divui(x, _index(divisor))


def _remainder(x: Any, divisor: int) -> Any:
    """Returns what is left of an index if it is divided by a constant."""
    return pm.arith.remui(x, _index(divisor))


def _equal(x: Any, y: Any) -> Any:
    """Returns whether two indices are equal."""
    return pm.arith.cmpi(pm.arith.CmpIPredicate.eq, x, y)
