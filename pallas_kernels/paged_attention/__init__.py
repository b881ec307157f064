"""Causal attention of packed rows over paged keys and values: decode and verify rows, and prompts of any length."""

from pallas_kernels.paged_attention.api import paged_attention as paged_attention
