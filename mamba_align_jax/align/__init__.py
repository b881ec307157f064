"""The bookkeeping of align mode on the device. `columns`, `config`, `interior` and `policy` import no JAX."""
