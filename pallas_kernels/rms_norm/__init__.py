"""The sum of a residual stream and its root-mean-square norm, in one pass."""

from pallas_kernels.rms_norm.api import add_rms_norm as add_rms_norm
