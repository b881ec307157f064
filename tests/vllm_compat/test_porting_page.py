"""The page about porting names files and names that exist."""

import importlib
import re
from pathlib import Path

import pytest

import pallas_kernels

ROOT = Path(__file__).parents[2]
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!^## ).*\n)*)", (ROOT / "docs/porting.md").read_text(), re.MULTILINE))
NAME = r"`(?:\w+\.)?\w+`"


def rows(section):
    """The second cells of a section's table."""
    return [line.split("|")[2].strip() for line in SECTIONS[section].splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(("section", "folder"), [
    ("The worker, V2: the device path", ""),
    ("The worker, V1: the host path", "vllm_compat/"),
    ("Metadata builders", ""),
    ("Scheduler and cache manager", ""),
])  # fmt: skip
def test_each_of_our_names_is_in_its_file(section, folder):
    found = 0
    for cell in rows(section):
        for file, names in re.findall(rf"`([\w/]+)\.py`: ({NAME}(?:, {NAME})*)", cell):
            module = importlib.import_module(f"mamba_align_jax.{folder}{file}".replace("/", "."))
            for name in re.findall(r"[\w.]+", names):
                owner = module
                for part in name.split("."):
                    known = hasattr(owner, part) or part in getattr(owner, "__dataclass_fields__", {})
                    assert known, f"{file}.py has no {name}"
                    owner = getattr(owner, part, None)
                found += 1
    assert found >= 5, "the table was not read"


def test_each_of_our_ops_exists():
    names = [name for cell in rows("Kernels") for name in re.findall(r"`(\w+)`", cell)]
    assert len(names) >= 9
    for name in names:
        assert hasattr(pallas_kernels, name), name
