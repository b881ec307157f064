"""The top-k choice of a token's experts by a warpgroup of product_chain's launch (SM90).

Every warp has all logits, some in each lane, and finds the largest logits one after the other by warp-wide reductions, so
no warp waits for another one. All warps store the same values.
"""

import functools
from typing import Any

import jax.numpy as jnp

from pallas_kernels import hopper as hp
from pallas_kernels.product_chain._schedule import LANES
from pallas_kernels.product_chain._steps import Experts

_TAKEN = -(2**31)  # the key of an expert that has been chosen, or that does not exist
_FLIP = 2**31 - 1
_LOG2_E = 1.4426950408889634


def choose(logits: Any, chosen: Any, factors: Any, experts: Experts) -> None:
    """Choose a token's experts by their logits, and compute their routing weights. The whole warpgroup runs it.

    Args:
        logits: The router's outputs, in SMEM. float32 [at least the router's outputs]
        chosen: Receives the experts' indices, shared experts first, then the best expert, and so on, in SMEM. int32 [32]
        factors: Receives their routing weights, in the same order, in SMEM. float32 [32]
        experts: The mixture.
    """
    hp.inline(functools.partial(_choose, experts=experts), (logits, ()), (chosen, ()), (factors, ()))


def _choose(logits: Any, chosen: Any, factors: Any, experts: Experts) -> None:
    lane = hp.thread_index() & (LANES - 1)
    exp = lambda x: hp.exp2(x * _LOG2_E)

    names = [lane + first for first in range(0, experts.routed, LANES)]
    exists = [name < experts.routed for name in names]
    keys = [hp.select(real, _key(logits[name]), _TAKEN) for name, real in zip(names, exists, strict=True)]
    left, best, best_key, found = keys, lane, hp.i32(0), []
    for rank in range(experts.top_k):
        key = hp.reduce_warp("max", functools.reduce(hp.maximum, left))
        found.append(key)
        pairs = [*zip(names, left, strict=True)]
        candidates = [hp.select(own == key, name, _FLIP) for name, own in pairs]
        expert = hp.reduce_warp("min", functools.reduce(hp.minimum, candidates))
        left = [hp.select(name == expert, _TAKEN, own) for name, own in pairs]
        is_here = lane == rank
        best, best_key = hp.select(is_here, expert, best), hp.select(is_here, key, best_key)

    largest = _logit(found[0])
    is_routed = lane < experts.top_k
    weight = hp.select(is_routed, exp(_logit(best_key) - largest), 0.0)
    if experts.renormalise:
        total = weight
    else:
        each = [exp(_logit(key) - largest) for key in keys]
        each = [hp.select(real, one, 0.0) for real, one in zip(exists, each, strict=True)]
        total = hp.add(*each)
    total = hp.sum_over_lanes(total, (16, 8, 4, 2, 1))
    gate = hp.f32(1.0)
    if experts.shared_gate:
        odds = exp(-logits[experts.routed])
        gate = hp.f32(1.0) / (hp.f32(1.0) + odds)
    shared = lane + (experts.routed - experts.top_k)
    after_shared = lane + experts.shared
    slot = hp.index(hp.select(is_routed, after_shared, lane - experts.top_k))
    with hp.predicated(lane < experts.chosen):
        chosen[slot] = hp.select(is_routed, best, shared)
        factors[slot] = hp.select(is_routed, weight / total, gate)


def _key(logit: Any) -> Any:
    """Return an int32 key per logit, float32, with the order of the logits."""
    bits = hp.bitcast(logit, jnp.int32)
    is_negative = bits < 0
    return hp.select(is_negative, bits ^ _FLIP, bits)


def _logit(key: Any) -> Any:
    """Return the logit, float32, of a key, int32: the inverse of `_key`."""
    is_negative = key < 0
    return hp.bitcast(hp.select(is_negative, key ^ _FLIP, key), jnp.float32)
