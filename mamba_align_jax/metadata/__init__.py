"""What kernels and attention need per batch, from the packed rows: row split, positions, gather indices."""
