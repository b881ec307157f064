"""The bookkeeping of align mode, on the device and as host Python; `columns`, `policy` and `host` import no JAX."""
