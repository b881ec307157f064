"""Values of wrong types, ranges and shapes, and what an error that refuses them must say."""

import math

import numpy as np
from hypothesis import HealthCheck
from hypothesis import strategies as st

from mamba_align_jax import ConvState, GroupSpec, RecurrentState

QUIET = dict(deadline=None, suppress_health_check=list(HealthCheck))
NUMBERS = st.one_of(
    st.integers(-3, 70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63, 10**30, -(10**30)]),
    st.sampled_from([0.0, -0.0, 1.0, 1.5, 0.5, math.nan, math.inf, -math.inf, 1e-39, 5e-324, 1e39]),
    st.sampled_from([np.int64(3), np.int8(-1), np.uint64(2**63), np.float32(0.5), np.float64("nan"), np.bool_(True)]),
)
OTHERS = st.one_of(
    st.sampled_from([None, True, False, "", "a", "1", "\ud800", b"", b"x", (), [], {}, frozenset(), 1j, object(), int]),
    st.sampled_from([np.zeros(0), np.zeros((2, 2)), np.arange(3), np.array(2), np.array(["a"]), np.array([None])]),
    st.sampled_from(["align", "none", "all", "copy_free", "pre_copy", "float32", "bfloat16", "int8", "mtp", "SD"]),
    st.text(max_size=3),
)
VALUES = st.one_of(
    NUMBERS, OTHERS, st.lists(st.one_of(NUMBERS, OTHERS), max_size=3), st.sets(st.integers(), max_size=2)
)

GROUP = GroupSpec("a", 1, (ConvState(4, 8), RecurrentState((1, 2, 3))))
SMALL = 1 << 20


def assert_clear(error, *names):
    """Asserts that an error says what was wanted, and names an argument."""
    text = str(error)
    assert "must" in text or "wanted" in text or "no step in flight" in text, text
    assert not names or any(name in text for name in names), text


def contents(cache):
    """Everything that a cache keeps account of, as text."""
    pools = [sorted((key, repr(value)) for key, value in vars(m.pool).items() if key != "on_lost") for m in cache]
    requests = [repr(vars(m)["_requests"]) for m in cache]
    return pools, requests
