"""Align-mode prefix caching for Mamba and linear-attention states on JAX.

Names resolve on first use, so that the host-side parts import without JAX and the core without flax.
"""

import importlib
from typing import Any

_PUBLIC = {
    "AlignConfig": "align.config",
    "ConvState": "align.config",
    "GroupSpec": "align.config",
    "RecurrentState": "align.config",
    "DeltaRuleRing": "align.ring",
    "Mamba2Ring": "align.ring",
    "Corrections": "align.corrections",
    "correct_counts": "align.corrections",
    "fold_slots": "align.deferred",
    "StatePool": "align.pool",
    "Additions": "align.state",
    "AlignState": "align.state",
    "add_requests": "align.state",
    "BlockTables": "align.tables",
    "TableUpdates": "align.tables",
    "update_block_tables": "align.tables",
    "StepBatch": "align.batch",
    "StepChecker": "align.checked",
    "CopyPlan": "align.step",
    "StepIndices": "align.step",
    "begin_step": "align.step",
    "finish_step": "align.step",
    "migrate": "align.step",
    "LayerRows": "metadata.rows",
    "LayerStep": "metadata.layer_step",
    "Mixer": "layers.mixer",
    "Rows": "metadata.rows",
    "RowSplit": "metadata.rows",
    "split_rows": "metadata.rows",
    "Hit": "cache.state_blocks",
    "StateBlockManager": "cache.state_blocks",
    "next_chunk_end": "cache.split",
    "KVPages": "kv",
    "KVSpec": "kv",
    "StepInputs": "metadata.step_inputs",
    "TokenPages": "metadata.layer_step",
    "step_inputs": "metadata.step_inputs",
    "InteriorBoundaries": "metadata.interior",
    "interior_boundaries": "metadata.interior",
    "Allocation": "cache.hybrid",
    "Checkpoints": "cache.checkpoints",
    "HashChain": "cache.hashing",
    "HybridCache": "cache.hybrid",
    "HybridHit": "cache.hybrid",
    "KVPageManager": "cache.kv_pages",
    "AsyncEngine": "engine.async_engine",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Grammar": "engine.grammar",
    "RequestOutput": "engine.request",
    "RequestUpdate": "engine.request",
    "SamplingParams": "engine.config",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return __all__
