"""The kinds of steps of a chain, a file for each: see `Step`."""
