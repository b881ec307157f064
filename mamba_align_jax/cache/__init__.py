"""The prefix cache on the host, in plain Python without JAX: which blocks requests hold, and what is cached."""
