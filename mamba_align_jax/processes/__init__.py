"""One engine over several processes, on one host or on several: process 0 leads, and the others follow."""

from mamba_align_jax.processes.group import EXIT_STATUS as EXIT_STATUS
from mamba_align_jax.processes.group import Processes as Processes
