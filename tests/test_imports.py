"""The host side imports without JAX, the core without the extras, and nothing starts a backend."""

import subprocess
import sys

import pytest

import mamba_align_jax

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocked())
"""
ALL_OF = """
import importlib, pkgutil, {0}
for module in pkgutil.walk_packages({0}.__path__, "{0}."):
    importlib.import_module(module.name)
"""
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
CORE = ["mamba_align_jax.align", "mamba_align_jax.metadata", "mamba_align_jax.vllm_compat", "pallas_kernels"]


def python(program):
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", HOST)
def test_the_host_side_imports_without_jax(module):
    python(BLOCK.format(blocked={"jax", "jaxlib", *EXTRAS}) + f"import {module}")


def test_all_of_the_cache_imports_without_jax():
    python(BLOCK.format(blocked={"jax", "jaxlib", *EXTRAS}) + ALL_OF.format("mamba_align_jax.cache"))


def test_the_core_imports_without_the_extras_and_starts_no_backend():
    # -W error would turn the deprecation of Pallas Triton into a failure.
    quiet = "import warnings; warnings.filterwarnings('ignore', 'The Pallas Triton backend', DeprecationWarning)\n"
    program = (
        BLOCK.format(blocked=EXTRAS)
        + quiet
        + "import mamba_align_jax.align.pool, mamba_align_jax.sharding\n"
        + "".join(map(ALL_OF.format, CORE))
    )
    started = "from jax._src import xla_bridge; print(xla_bridge.backends_are_initialized())"
    assert python(program + started).strip() == "False"


def test_a_blocked_import_is_seen():
    for blocked in ("jax", "flax"):
        with pytest.raises(AssertionError, match=f"{blocked} is blocked"):
            python(BLOCK.format(blocked={blocked}) + f"import {blocked}")


def test_the_package_alone_imports_nothing_else():
    assert python("import sys, mamba_align_jax; print('jax' in sys.modules)").strip() == "False"


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
