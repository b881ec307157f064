"""Mamba-1 over decode and verify rows with deferred states: written once per group of tokens."""

from pallas_kernels.selective_scan.deferred.api import selective_scan_deferred as selective_scan_deferred
