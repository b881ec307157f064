"""The engine that a caller holds: steps and recovery from failures, threads, saved prefixes, and reports."""
