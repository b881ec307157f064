"""Measures kernels, steps and the engine on GPUs. Rows of results are in `results/`."""
