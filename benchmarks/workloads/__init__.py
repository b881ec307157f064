"""The named workloads of each op of `pallas_kernels`, which benchmarks, tuning and tests share."""
