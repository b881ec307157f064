"""The gates of a head as arithmetic of single threads, for `pm.inline`. They are those of `gates` in xla.py."""

from typing import Any, NamedTuple

from pallas_kernels import _thread_code as code
from pallas_kernels._pallas_mosaic import arith, math


class Gate(NamedTuple):
    """How gates and factors of vectors are computed: see the arguments of `gated_delta_rule_update`."""

    lower_bound: float | None
    allow_neg_eigval: bool
    scale: float
    use_qk_l2norm: bool

    def log_decay(self, raw: Any, rate: Any, bias: Any) -> Any:
        """Returns the log decay of a token, given its raw projection, `A_log` and `dt_bias`, all in float32."""
        raw, rate = arith.addf(raw, bias), math.exp(rate)
        if self.lower_bound is None:
            return arith.negf(arith.mulf(rate, code.softplus(raw)))
        return arith.mulf(code.number(self.lower_bound), _sigmoid(arith.mulf(rate, raw)))

    def beta(self, raw: Any) -> Any:
        """Returns the strength of a token's correction, given its raw projection in float32."""
        return arith.mulf(_sigmoid(raw), code.number(2.0 if self.allow_neg_eigval else 1.0))


def _sigmoid(x: Any) -> Any:
    """Returns 1 / (1 + exp(-x))."""
    return arith.divf(code.number(1.0), arith.addf(code.number(1.0), math.exp(arith.negf(x))))
