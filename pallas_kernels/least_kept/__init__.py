"""The least probability of the tokens that `top_k` and `top_p` keep, by a radix select instead of a sort."""

from pallas_kernels.least_kept.api import least_kept as least_kept
