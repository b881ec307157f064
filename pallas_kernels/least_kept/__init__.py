"""The least weight of the tokens that `top_k` and `top_p` keep, found without a sort."""

from pallas_kernels.least_kept.api import least_kept as least_kept
