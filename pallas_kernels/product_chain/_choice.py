"""How a warpgroup of product_chain's launch chooses a token's experts.

Every warp has all logits, some in each lane, and finds the largest one after the other, so no warp waits for another one.
All warps write the same numbers.
"""

from typing import Any

from pallas_kernels import _pallas_mosaic as pm
from pallas_kernels._pallas_mosaic import arith, ir, math, memref
from pallas_kernels.product_chain._schedule import LANES
from pallas_kernels.product_chain._steps import Experts

_TAKEN = -(2**31)  # the key of an expert that has been chosen, or that does not exist
_FLIP = 2**31 - 1
_LOG2_E = 1.4426950408889634


def choose(logits: Any, chosen: Any, factors: Any, experts: Experts) -> None:
    """Chooses a token's experts by their logits, and weighs them.

    Args:
        logits: The router's outputs, in shared memory. float32 [at least the router's outputs]
        chosen: Gets the experts, shared ones first and then the best one, in shared memory. int32 [32]
        factors: Gets their weights, in the same order, in shared memory. float32 [32]
        experts: The mixture.
    """
    write = lambda _, logits, chosen, factors: _choose(logits, chosen, factors, experts)
    pm.inline(write, (logits, ()), (chosen, ()), (factors, ()))


def _choose(logits: Any, chosen: Any, factors: Any, experts: Experts) -> None:
    f32 = ir.F32Type.get()
    number = lambda value: arith.constant(f32, value)
    is_equal = lambda x, y: arith.cmpi(arith.CmpIPredicate.eq, x, y)
    lane = arith.andi(pm.thread_index(), pm.constant(LANES - 1))
    load = lambda index: memref.load(logits, [arith.index_cast(ir.IndexType.get(), index)])
    exp = lambda x: math.exp2(arith.mulf(x, number(_LOG2_E)))

    names = [arith.addi(lane, pm.constant(first)) for first in range(0, experts.routed, LANES)]
    exists = [arith.cmpi(arith.CmpIPredicate.slt, name, pm.constant(experts.routed)) for name in names]
    keys = [arith.select(real, _key(load(name)), pm.constant(_TAKEN)) for name, real in zip(names, exists, strict=True)]
    left, best, best_key, found = keys, lane, pm.constant(0), []
    for turn in range(experts.top_k):
        key = _of_warp("max", _reduced(arith.maxsi, left))
        found.append(key)
        pairs = [*zip(names, left, strict=True)]
        candidates = [arith.select(is_equal(own, key), name, pm.constant(_FLIP)) for name, own in pairs]
        expert = _of_warp("min", _reduced(arith.minsi, candidates))
        left = [arith.select(is_equal(name, expert), pm.constant(_TAKEN), own) for name, own in pairs]
        is_here = is_equal(lane, pm.constant(turn))
        best, best_key = arith.select(is_here, expert, best), arith.select(is_here, key, best_key)

    largest = _logit(found[0])
    is_routed = arith.cmpi(arith.CmpIPredicate.slt, lane, pm.constant(experts.top_k))
    weight = arith.select(is_routed, exp(arith.subf(_logit(best_key), largest)), number(0.0))
    if experts.renormalise:
        total = weight
    else:
        each = [exp(arith.subf(_logit(key), largest)) for key in keys]
        each = [arith.select(real, one, number(0.0)) for real, one in zip(exists, each, strict=True)]
        total = _reduced(arith.addf, each)
    total = pm.sum_over(total, (16, 8, 4, 2, 1))
    gate = number(1.0)
    if experts.shared_gate:
        odds = exp(arith.negf(load(pm.constant(experts.routed))))
        gate = arith.divf(number(1.0), arith.addf(number(1.0), odds))
    shared = arith.addi(lane, pm.constant(experts.routed - experts.top_k))
    after_shared = arith.addi(lane, pm.constant(experts.shared))
    place = arith.select(is_routed, after_shared, arith.subi(lane, pm.constant(experts.top_k)))
    place = arith.index_cast(ir.IndexType.get(), place)
    with pm.only_if(arith.cmpi(arith.CmpIPredicate.slt, lane, pm.constant(experts.chosen))):
        memref.store(arith.select(is_routed, best, shared), chosen, [place])
        memref.store(arith.select(is_routed, arith.divf(weight, total), gate), factors, [place])


def _reduced(combine: Any, values: Any) -> Any:
    result = values[0]
    for value in values[1:]:
        result = combine(result, value)
    return result


def _of_warp(operation: str, value: Any) -> Any:
    """Returns the largest ("max") or the smallest ("min") of the warp's int32 numbers."""
    kind = ir.IntegerType.get_signless(32)
    return pm.assembly(f"redux.sync.{operation}.s32 $0, $1, 0xffffffff;", "=r,r", kind, [value])


def _key(logit: Any) -> Any:
    """Returns an int32 number in whose order logits are."""
    bits = arith.bitcast(ir.IntegerType.get_signless(32), logit)
    is_negative = arith.cmpi(arith.CmpIPredicate.slt, bits, pm.constant(0))
    return arith.select(is_negative, arith.xori(bits, pm.constant(_FLIP)), bits)


def _logit(key: Any) -> Any:
    """Returns the logit of a key."""
    is_negative = arith.cmpi(arith.CmpIPredicate.slt, key, pm.constant(0))
    return arith.bitcast(ir.F32Type.get(), arith.select(is_negative, arith.xori(key, pm.constant(_FLIP)), key))
