"""The host's side of the cache, in plain Python without JAX: who holds which block, and which prefix it stands for."""
