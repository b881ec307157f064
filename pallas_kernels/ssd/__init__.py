"""Mamba-2's state space duality: prefill of packed rows in chunks, with the states in a pool."""

from pallas_kernels.ssd.api import ssd as ssd
