"""Starts the command line: `mamba-align`, and `python -m mamba_align_jax`."""

import sys

from mamba_align_jax import __version__
from mamba_align_jax.cli import env

# What the extra `cli` installs, by the names of the modules.
_EXTRA = ("flax", "jinja2", "rich", "safetensors", "tokenizers", "yaml")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit status.

    Without the extra `cli` it gives the version and the environment, and says for anything else that the extra is missing,
    with status 2.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if given == ["--version"]:
        print(f"mamba-align {__version__}")
        return 0
    if given[:1] == ["env"]:
        return env.main(given[1:])
    try:
        from mamba_align_jax.cli import commands

        return commands.main(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _EXTRA:
            raise
        print(
            f"mamba-align: the command line needs the extra 'cli' (pip install 'mamba-align-jax[cli]'): {error}",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
