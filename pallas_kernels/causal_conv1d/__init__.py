"""Depthwise causal convolution over packed rows, with its window kept in a pool."""

from pallas_kernels.causal_conv1d.api import causal_conv1d_prefill as causal_conv1d_prefill
from pallas_kernels.causal_conv1d.api import causal_conv1d_update as causal_conv1d_update
