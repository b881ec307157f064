"""Per-batch values that layers need: rows by kind, positions, and the inputs of a step."""
