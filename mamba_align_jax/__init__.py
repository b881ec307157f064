"""Align-mode prefix caching for Mamba and linear-attention states on JAX.

Names resolve on first use, so that the host-side parts import without JAX and the core without flax. Type checkers, which
don't see that, read the imports under `TYPE_CHECKING`.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from mamba_align_jax.align.batch import StepBatch as StepBatch
    from mamba_align_jax.align.checked import StepChecker as StepChecker
    from mamba_align_jax.align.config import AlignConfig as AlignConfig
    from mamba_align_jax.align.config import ConvState as ConvState
    from mamba_align_jax.align.config import GroupSpec as GroupSpec
    from mamba_align_jax.align.config import RecurrentState as RecurrentState
    from mamba_align_jax.align.corrections import Corrections as Corrections
    from mamba_align_jax.align.corrections import correct_counts as correct_counts
    from mamba_align_jax.align.deferred import fold_slots as fold_slots
    from mamba_align_jax.align.pool import StatePool as StatePool
    from mamba_align_jax.align.ring import DeltaRuleRing as DeltaRuleRing
    from mamba_align_jax.align.ring import Mamba2Ring as Mamba2Ring
    from mamba_align_jax.align.state import Additions as Additions
    from mamba_align_jax.align.state import AlignState as AlignState
    from mamba_align_jax.align.state import add_requests as add_requests
    from mamba_align_jax.align.step import CopyPlan as CopyPlan
    from mamba_align_jax.align.step import StepIndices as StepIndices
    from mamba_align_jax.align.step import begin_step as begin_step
    from mamba_align_jax.align.step import finish_step as finish_step
    from mamba_align_jax.align.step import migrate as migrate
    from mamba_align_jax.align.tables import BlockTables as BlockTables
    from mamba_align_jax.align.tables import TableUpdates as TableUpdates
    from mamba_align_jax.align.tables import update_block_tables as update_block_tables
    from mamba_align_jax.cache.checkpoints import Checkpoints as Checkpoints
    from mamba_align_jax.cache.hashing import HashChain as HashChain
    from mamba_align_jax.cache.hybrid import Allocation as Allocation
    from mamba_align_jax.cache.hybrid import HybridCache as HybridCache
    from mamba_align_jax.cache.hybrid import HybridHit as HybridHit
    from mamba_align_jax.cache.kv_pages import KVPageManager as KVPageManager
    from mamba_align_jax.cache.split import next_chunk_end as next_chunk_end
    from mamba_align_jax.cache.state_blocks import Hit as Hit
    from mamba_align_jax.cache.state_blocks import StateBlockManager as StateBlockManager
    from mamba_align_jax.engine.config import EngineConfig as EngineConfig
    from mamba_align_jax.engine.config import SamplingParams as SamplingParams
    from mamba_align_jax.engine.grammar import Grammar as Grammar
    from mamba_align_jax.engine.running.async_engine import AsyncEngine as AsyncEngine
    from mamba_align_jax.engine.running.engine import Engine as Engine
    from mamba_align_jax.engine.scheduling.request import RequestOutput as RequestOutput
    from mamba_align_jax.engine.scheduling.request import RequestUpdate as RequestUpdate
    from mamba_align_jax.kv import KVPages as KVPages
    from mamba_align_jax.kv import KVSpec as KVSpec
    from mamba_align_jax.layers.mixer import Mixer as Mixer
    from mamba_align_jax.metadata.interior import InteriorBoundaries as InteriorBoundaries
    from mamba_align_jax.metadata.interior import interior_boundaries as interior_boundaries
    from mamba_align_jax.metadata.layer_step import LayerStep as LayerStep
    from mamba_align_jax.metadata.layer_step import TokenPages as TokenPages
    from mamba_align_jax.metadata.rows import Rows as Rows
    from mamba_align_jax.metadata.rows import RowSplit as RowSplit
    from mamba_align_jax.metadata.rows import split_rows as split_rows
    from mamba_align_jax.metadata.step_inputs import StepInputs as StepInputs
    from mamba_align_jax.metadata.step_inputs import step_inputs as step_inputs

# The public names of each module.
_NAMES = {
    "align.batch": ("StepBatch",),
    "align.checked": ("StepChecker",),
    "align.config": ("AlignConfig", "ConvState", "GroupSpec", "RecurrentState"),
    "align.corrections": ("Corrections", "correct_counts"),
    "align.deferred": ("fold_slots",),
    "align.pool": ("StatePool",),
    "align.ring": ("DeltaRuleRing", "Mamba2Ring"),
    "align.state": ("Additions", "AlignState", "add_requests"),
    "align.step": ("CopyPlan", "StepIndices", "begin_step", "finish_step", "migrate"),
    "align.tables": ("BlockTables", "TableUpdates", "update_block_tables"),
    "cache.checkpoints": ("Checkpoints",),
    "cache.hashing": ("HashChain",),
    "cache.hybrid": ("Allocation", "HybridCache", "HybridHit"),
    "cache.kv_pages": ("KVPageManager",),
    "cache.split": ("next_chunk_end",),
    "cache.state_blocks": ("Hit", "StateBlockManager"),
    "engine.config": ("EngineConfig", "SamplingParams"),
    "engine.grammar": ("Grammar",),
    "engine.running.async_engine": ("AsyncEngine",),
    "engine.running.engine": ("Engine",),
    "engine.scheduling.request": ("RequestOutput", "RequestUpdate"),
    "kv": ("KVPages", "KVSpec"),
    "layers.mixer": ("Mixer",),
    "metadata.interior": ("InteriorBoundaries", "interior_boundaries"),
    "metadata.layer_step": ("LayerStep", "TokenPages"),
    "metadata.rows": ("RowSplit", "Rows", "split_rows"),
    "metadata.step_inputs": ("StepInputs", "step_inputs"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULE_OF)


if not TYPE_CHECKING:  # to a type checker every name would be one of this package

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def _refuse_another_pallas_kernels() -> None:
    """Raises an ImportError if Python finds another `pallas_kernels` before the one that is installed with this package."""
    spec = importlib.util.find_spec("pallas_kernels")
    found = Path(spec.origin) if spec and spec.origin else None
    if found is not None and found.exists() and not (found.parent / "dispatch.py").exists():
        raise ImportError(
            f"mamba_align_jax needs its own package pallas_kernels, but Python finds another one first: {found}. "
            "Rename that one, or start Python in another folder",
            name="pallas_kernels",
        )


_refuse_another_pallas_kernels()
