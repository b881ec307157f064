"""How a command's options are read: help of a part of them, and a file in which they stand."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Help(argparse.Action):
    """Prints the help and ends the program. `--help=TEXT` prints a group, or the options whose names have the text."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Prints the part of the help that `values` names, or all of it if there is no such part."""
        text, word = parser.format_help(), str(values or "").replace("_", "-").lower().strip("-")
        groups = re.split(r"\n(?=\S.*:\n)", text)
        options = re.findall(r"^  -.*(?:\n {3,}.*)*\n?", text, re.MULTILINE)
        found = [group for group in groups if group.lower().startswith(f"{word}:\n")]
        found = found or [
            option for option in options if word in " ".join(re.findall(r"-[\w-]+", option.split("  ")[1]))
        ]
        print("".join(found) if word and found else text, end="")
        parser.exit()


def options_in(file: Path) -> list[str]:
    """Reads the options in a YAML file, as `vllm serve --config` reads them. A key is an option's name without dashes.

    Returns:
        The options as they would stand on the command line.

    Raises:
        ValueError: the file holds something else.
        OSError: it can't be read.
    """
    import yaml

    try:
        found = yaml.safe_load(file.read_text(encoding="utf8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} must be YAML, got {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} must have options as keys, got {type(found).__name__}")
    options: list[str] = []
    for key, value in found.items():
        name = str(key).replace("_", "-")
        if isinstance(value, bool):
            options.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            options += [f"--{name}", *map(str, value)]
        elif value is not None:
            options.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return options
