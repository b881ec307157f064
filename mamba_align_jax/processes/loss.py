"""What a process does when another one is lost: it says so and ends, because their devices can't go on without it."""

import os
import sys

# The exit status of a process that ends because another one is lost: a supervisor starts all of them again.
EXIT_STATUS = os.EX_TEMPFAIL


def end_process(reason: str) -> None:
    """Writes a line to stderr and ends the process at once, with `EXIT_STATUS`.

    A thread may be in a program that waits for a device of the process that is lost. Nothing ends such a wait, so no
    thread is waited for and no exit handler runs.
    """
    try:
        sys.stderr.write(f"mamba-align: {reason}\n")
        sys.stderr.flush()
    finally:
        os._exit(EXIT_STATUS)
