"""The command line, `mamba-align`. Needs the extra `cli`."""
