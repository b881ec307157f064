"""The bookkeeping of align mode on the device; `columns` and `policy` are plain arithmetic and import no JAX."""
