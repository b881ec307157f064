"""The benchmarks' float64 equations are those of the tests."""

import numpy as np
import pytest
from oracles import ops as oracles

from benchmarks import (
    reference,
)


class TestReference:
    rng = np.random.default_rng(0)

    def test_conv(self):
        x, history, weight = (self.rng.normal(size=(n, 5)) for n in (7, 3, 4))
        wanted, _ = oracles.causal_conv1d(x, history, weight, None, silu=True)
        np.testing.assert_allclose(reference.causal_conv1d(x, history, weight), wanted, rtol=1e-12)

    @pytest.mark.parametrize("gates", [(4,), (4, 6)])
    def test_delta_rule(self, gates):
        normal = lambda *shape: self.rng.normal(size=shape)
        tokens = normal(5, 2, 6), normal(5, 2, 6), normal(5, 4, 3), -np.abs(normal(5, *gates)), np.abs(normal(5, 4))
        state = normal(4, 3, 6)
        wanted, _ = oracles.gated_delta_rule(*tokens, state, 6**-0.5)
        np.testing.assert_allclose(reference.gated_delta_rule(*tokens, state), wanted, rtol=1e-12)

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize(("per", "of_a"), [((4,), (4,)), ((4, 3), (4, 3, 6))])
    def test_state_space(self, per, of_a, gated):
        normal = lambda *shape: self.rng.normal(size=shape)
        operands = normal(5, 4, 3), normal(5, *per), -np.abs(normal(*of_a)), normal(5, 2, 6), normal(5, 2, 6)
        options = dict(state=normal(4, 3, 6), D=normal(*per), dt_bias=normal(*per))
        options |= dict(z=normal(5, 4, 3)) if gated else {}
        wanted, _ = oracles.selective_state_update(*operands, **options)
        np.testing.assert_allclose(reference.state_space(*operands, **options), wanted, rtol=1e-12)
