"""Puts an engine under load and measures it: workloads, the client that sends them, and `mamba-align bench`."""
