"""`python -m mamba_align_jax` is the command line."""

import sys

from mamba_align_jax.cli import main

sys.exit(main())
