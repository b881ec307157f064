"""The host side imports without JAX, the core without the extras, and nothing starts a backend."""

import ast
import subprocess
import sys
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import mamba_align_jax

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)

sys.meta_path.insert(0, Blocked())
"""
ALL_OF = """
import importlib, pkgutil, {0}
for module in pkgutil.walk_packages({0}.__path__, "{0}."):
    importlib.import_module(module.name)
"""
# Nothing seems to be installed but Python's own modules and {installed}.
INSTALLED_ALONE = """
import sys
from importlib.machinery import PathFinder

class FewInstalled(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in sys.stdlib_module_names or top in {installed} or top.startswith("_")
        return PathFinder.find_spec(name, path, target) if known else None

sys.meta_path[:] = [FewInstalled if finder is PathFinder else finder for finder in sys.meta_path]
"""
# The core's requirements, and theirs.
INSTALLED = {"jax", "jaxlib", "jaxtyping", "numpy", "ml_dtypes", "opt_einsum", "scipy", "wadler_lindig"}
OURS = {"mamba_align_jax", "pallas_kernels"}
EXTRAS = {"flax", "safetensors", "tokenizers", "rich"}
HOST = [
    "mamba_align_jax.cache",
    "mamba_align_jax.align.columns",
    "mamba_align_jax.align.interior",
    "mamba_align_jax.align.policy",
    "mamba_align_jax.align.config",
    "mamba_align_jax.vllm_compat.block_idx",
    "mamba_align_jax.vllm_compat.mamba_utils",
    "mamba_align_jax.vllm_compat.row_kinds",
]
CORE = ["mamba_align_jax.align", "mamba_align_jax.metadata", "mamba_align_jax.vllm_compat"]


def python(program):
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", HOST)
def test_the_host_side_imports_without_jax(module):
    python(BLOCK.format(blocked={"jax", "jaxlib", *EXTRAS}) + f"import {module}")


def test_all_of_the_cache_imports_without_jax():
    python(BLOCK.format(blocked={"jax", "jaxlib", *EXTRAS}) + ALL_OF.format("mamba_align_jax.cache"))


def test_the_core_imports_with_what_pip_installs_for_it_and_starts_no_backend():
    """Nothing of Mosaic GPU is imported either: JAX 0.10's needs absl, which JAX itself does not."""
    # -W error would turn the deprecation of Pallas Triton into a failure.
    quiet = "import warnings; warnings.filterwarnings('ignore', 'The Pallas Triton backend', DeprecationWarning)\n"
    program = (
        INSTALLED_ALONE.format(installed=INSTALLED | OURS)
        + quiet
        + "import pallas_kernels, mamba_align_jax.align.pool, mamba_align_jax.sharding\n"
        + "".join(map(ALL_OF.format, CORE))
    )
    started = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())\n"
    mosaic = "print([name for name in sys.modules if name.startswith('jax.experimental.mosaic')])"
    assert python(program + started + mosaic).split() == ["False", "[]"]


def test_what_pip_installs_for_the_core_is_all_that_the_test_allows():
    """The core's requirements, and theirs, without the extras."""

    def needs(name):
        required = map(Requirement, metadata.requires(name) or ())
        return {each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})}

    found, new = set(), {"mamba-align-jax"}
    while new:
        found |= new
        new = set().union(*map(needs, new)) - found
    assert {name.replace("-", "_") for name in found} == INSTALLED | {"mamba_align_jax"}


@pytest.mark.parametrize("blocked", ["jax", "flax"])
def test_a_blocked_import_is_seen(blocked):
    with pytest.raises(AssertionError, match=f"{blocked} is blocked"):
        python(BLOCK.format(blocked={blocked}) + f"import {blocked}")


@pytest.mark.parametrize("missing", ["flax", "absl", "pallas_kernels"])
def test_an_import_of_what_seems_not_to_be_installed_is_seen(missing):
    with pytest.raises(AssertionError, match=f"No module named '{missing}'"):
        python(INSTALLED_ALONE.format(installed=INSTALLED) + f"import {missing}")


def test_the_package_alone_imports_nothing_else():
    assert python("import sys, mamba_align_jax; print('jax' in sys.modules)").strip() == "False"


def test_type_checkers_read_the_names_that_resolve_on_first_use():
    """The package has them twice. `make lint` checks a user's file by what checkers read."""
    tree = ast.parse(Path(mamba_align_jax.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.asname: f"{node.module}:{alias.name}" for node in block.body for alias in node.names}
    resolved = {name: getattr(mamba_align_jax, name) for name in mamba_align_jax.__all__}
    assert seen == {name: f"mamba_align_jax.{mamba_align_jax._MODULE_OF[name]}:{name}" for name in resolved}


def test_both_packages_say_that_they_are_typed():
    assert [(files(name) / "py.typed").read_text() for name in ("mamba_align_jax", "pallas_kernels")] == ["", ""]


def test_the_version_is_that_of_the_installed_package():
    assert mamba_align_jax.__version__ == metadata.version("mamba-align-jax")


def test_a_users_folder_named_pallas_kernels_gives_an_error_that_says_so(tmp_path):
    (tmp_path / "pallas_kernels").mkdir()
    (tmp_path / "pallas_kernels" / "__init__.py").touch()
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from mamba_align_jax.align import step"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    *_, last = done.stderr.splitlines()
    assert last.startswith(
        "ImportError: mamba_align_jax needs its own package pallas_kernels, but Python finds another one"
    )
    assert str(tmp_path / "pallas_kernels" / "__init__.py") in last


COMMAND = "from mamba_align_jax.__main__ import main; sys.exit(main({arguments}))"


@pytest.mark.parametrize("missing", ["rich", "flax"])
def test_the_command_without_its_extra_names_the_extra(missing):
    program = BLOCK.format(blocked={missing}) + COMMAND.format(arguments=["demo"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("mamba-align: the command line needs the extra 'cli' (pip install 'mamba-align-jax[cli]'): ")
    assert missing in line


def test_the_command_gives_its_version_without_any_extra():
    program = BLOCK.format(blocked={"jax", "jaxlib", *EXTRAS}) + COMMAND.format(arguments=["--version"])
    assert python(program) == f"mamba-align {mamba_align_jax.__version__}\n"


def test_the_command_says_its_environment_without_any_extra():
    program = BLOCK.format(blocked=EXTRAS) + COMMAND.format(arguments=["env"])
    assert f"jax {metadata.version('jax')}, " in python(program)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_the_help_comes_without_jax(arguments):
    program = BLOCK.format(blocked={"jax", "jaxlib", "flax", "safetensors", "tokenizers"})
    assert "usage: mamba-align" in python(program + COMMAND.format(arguments=arguments))


@pytest.mark.parametrize("name", mamba_align_jax.__all__)
def test_every_public_name_resolves(name):
    assert getattr(mamba_align_jax, name).__name__ == name
    assert name in dir(mamba_align_jax)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        mamba_align_jax.Nothing  # noqa: B018


def test_resolving_every_public_name_starts_no_backend():
    program = "import warnings; warnings.filterwarnings('ignore', 'The Pallas Triton backend', DeprecationWarning)\n"
    program += "import mamba_align_jax as ma\nfor name in ma.__all__: getattr(ma, name)\n"
    started = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(program + started).strip() == "False"
