"""Runs the command line for `python -m mamba_align_jax`."""

import sys

from mamba_align_jax.cli import main

sys.exit(main())
