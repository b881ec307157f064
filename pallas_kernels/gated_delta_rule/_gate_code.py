"""The gates of a head, computed by single threads on Hopper GPUs. `Gates.compute` computes the same."""

from typing import Any

from pallas_kernels import hopper as hp
from pallas_kernels.gated_delta_rule.gates import Gates


def log_decay(gates: Gates, raw: Any, rate: Any, bias: Any) -> Any:
    """Return the log decay of a token, given its raw projection, `A_log` and `dt_bias`, all in float32."""
    raw, rate = raw + bias, hp.exp(rate)
    if gates.lower_bound is None:
        return -(rate * hp.softplus(raw))
    return hp.f32(gates.lower_bound) * _sigmoid(rate * raw)


def beta(gates: Gates, raw: Any) -> Any:
    """Return a token's correction strength, given its raw projection in float32."""
    return _sigmoid(raw) * (2.0 if gates.allow_neg_eigval else 1.0)


def _sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x))."""
    return hp.f32(1.0) / (hp.f32(1.0) + hp.exp(-x))
