"""Mamba-2 over decode and verify rows with deferred states: written once per group of tokens."""

from pallas_kernels.selective_state_update.deferred.api import selective_state_deferred as selective_state_deferred
from pallas_kernels.selective_state_update.deferred.entries import Mamba2Entries as Mamba2Entries
