"""Layers of hybrid models as flax.nnx modules. Each layer runs one step's packed tokens and can be used alone."""
