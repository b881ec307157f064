"""Functions of vLLM under vLLM's names, for code that is ported from vLLM: see docs/porting.md.

The rest of the package does not import this folder. `host_types`, `mamba_utils`, `row_kinds` and `block_idx` import no JAX.
"""
