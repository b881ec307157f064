"""Fields of dataclasses that are options of the command line as well. A field says its own help and its choices."""

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import Field, field, fields
from fractions import Fraction
from types import MappingProxyType
from typing import Any, get_args

# Whole numbers with a suffix, which mean what they mean on vLLM's command line.
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?=[kmgt])|\d+(?=[KMGT]))(.)")
_UNITS = {unit: base**power for base, units in ((1000, "kmgt"), (1024, "KMGT")) for power, unit in enumerate(units, 1)}


def option(default: Any, about: str, choices: Collection[str] = ()) -> Any:
    """Returns a field of a dataclass that is an option, too.

    `about` says what it is, in the words of the class's docstring. `choices` are the texts that it may be; empty for
    any.
    """
    return field(default=default, metadata={"about": about, "choices": tuple(choices)})


def chosen(about: str, choices: Collection[str] = ()) -> Any:
    """Returns a field that is an option, whose value is chosen later if it is left out. Its type is that of the value."""
    return field(default=None, metadata={"about": about, "choices": tuple(choices), "is_chosen": True})


def whole_number(text: str) -> int:
    """Reads a whole number: 32k and 25.6k are thousands, 32K is 32 times 1024, and so on with m, g, t, M, G and T.

    Raises:
        ValueError: the text is no whole number.
    """
    found = _NUMBER.fullmatch(text.strip())
    return int(text) if found is None else int(str(Fraction(found[1]) * _UNITS[found[2]]))


def add_fields(
    group: argparse._ArgumentGroup,
    kind: type,
    prefix: str = "",
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Adds an option for each field of the dataclass `kind` that `option` made.

    `defaults` are those that differ from the fields' own, by the fields' names. An option has the field's name after
    `prefix`, or the one that it has in `names`.
    """
    for item in _options_of(kind):
        default = (defaults or {}).get(item.name, item.default)
        name = "--" + names.get(item.name, f"{prefix}{item.name}").replace("_", "-")
        dest = prefix + item.name
        about = item.metadata["about"].replace("%", "%%")
        if default is None and "is_chosen" in item.metadata:
            about += " (default: chosen for the model and the device)"
        if item.type is bool:
            group.add_argument(name, dest=dest, action=argparse.BooleanOptionalAction, default=default, help=about)
            continue
        about = about if default is None else f"{about} (default: {default})"
        if item.metadata["choices"]:
            group.add_argument(name, dest=dest, choices=item.metadata["choices"], default=default, help=about)
        else:
            # The type of an optional number is the first of a union.
            kind_of: Any = (*get_args(item.type), item.type)[0]
            of_text = whole_number if kind_of is int else kind_of
            group.add_argument(name, dest=dest, type=of_text, default=default, metavar="N", help=about)


def given_fields(options: argparse.Namespace, kind: type, prefix: str = "") -> dict[str, Any]:
    """Returns the values of the options that `add_fields` has added, by the names of the fields."""
    return {item.name: getattr(options, prefix + item.name) for item in _options_of(kind)}


def _options_of(kind: Any) -> list[Field[Any]]:
    return [item for item in fields(kind) if item.metadata]
