"""Selective state space models, token by token: Mamba-1 and Mamba-2 decode and verify rows."""

from pallas_kernels.selective_state_update.api import selective_state_update as selective_state_update
