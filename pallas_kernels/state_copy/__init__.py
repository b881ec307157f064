"""Copies of whole states between blocks."""

from pallas_kernels.state_copy.api import state_copy as state_copy
