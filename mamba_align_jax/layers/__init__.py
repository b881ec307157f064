"""Layers of hybrid models as flax.nnx modules: each is one step over packed tokens and pools, usable alone."""
