"""Selective state space models over rows of any length: Mamba-1 prefill."""

from pallas_kernels.selective_scan.api import selective_scan as selective_scan
