"""Counts the running requests whose states fit in memory, by policy: `python -m benchmarks.memory`. It needs no GPU.

A case "reserved" counts the blocks that an engine keeps for each running request, the largest number that one may hold. A
case "held" counts the blocks that a request holds on average while it decodes with synchronous stepping, every number of
accepted drafts being equally likely. Under "deferred", each request has a ring besides. Cached prefixes take what is left.
"""

import argparse
import statistics

import numpy as np
from flax import nnx

from benchmarks.random_model import MODELS
from benchmarks.rows import Row, append
from mamba_align_jax import AlignConfig, EngineConfig, StateBlockManager
from mamba_align_jax.engine.device.sizing import align_config
from mamba_align_jax.models.qwen3_5 import Model

POLICIES = ("copy_free", "deferred")
MEMORY_BYTES = 40e9
TOKENS = 16384  # that the request of a case "held" generates


def make_spec(model: str, policy: str, drafts: int, block_size: int) -> AlignConfig:
    """Returns how an engine keeps the states of a model, whose weights are not made."""
    fields = dict(prefix_cache="align", max_num_seqs=8, num_speculative_tokens=drafts, policy=policy)
    config = EngineConfig(block_size=block_size, **fields)
    return align_config(config, nnx.eval_shape(lambda: Model(MODELS[model], nnx.Rngs(0))))


def mean_held(align: AlignConfig, tokens: int = TOKENS, seed: int = 0) -> float:
    """Returns the mean number of blocks that a decoding request holds after its step was dispatched."""
    drafts, rng = align.num_speculative_tokens, np.random.default_rng(seed)
    fold_length = align.fold_length if align.is_deferred else None
    manager = StateBlockManager(64, align.block_size, drafts, fold_length=fold_length)
    manager.allocate("request", 0, 0, 1)
    manager.release("request")
    computed, held = 1, []
    manager.commit("request", [0] * computed)
    while computed < tokens:
        manager.allocate("request", computed, computed, 1 + drafts, drafts)
        manager.release("request")
        held.append(len(manager.columns("request")))
        computed += 1 + int(rng.integers(1 + drafts))
        manager.commit("request", [0] * computed)
    return statistics.mean(held)


def measure(model: str, drafts: int, block_size: int) -> list[Row]:
    """Returns the rows of one model and number of drafts."""
    specs = {policy: make_spec(model, policy, drafts, block_size) for policy in POLICIES}
    ways = {
        "reserved, synchronous": lambda align: align.blocks_per_request(0),
        "reserved, asynchronous": lambda align: align.blocks_per_request(1),
        "held": mean_held,
    }
    rows: list[Row] = []
    for way, blocks_of in ways.items():
        for policy, align in specs.items():
            blocks = blocks_of(align)
            each = blocks * align.bytes_per_block + align.ring_bytes_per_slot
            shared = align.ring_bytes - align.max_num_seqs * align.ring_bytes_per_slot
            row: Row = {"case": f"{model} K{drafts}, {way}, {policy}", "model": model, "drafts": drafts, "count": way}
            row |= {"policy": policy, "block_size": block_size, "blocks": blocks}
            row |= {"block_bytes": align.bytes_per_block, "ring_bytes": align.ring_bytes_per_slot}
            rows.append(row | {"memory_bytes": MEMORY_BYTES, "requests_that_fit": int((MEMORY_BYTES - shared) // each)})
    return rows


def main(arguments: list[str] | None = None) -> list[Row]:
    """Counts for the models and numbers of drafts that the options ask for, and returns the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: qwen3.5-4b and qwen3.5-35b-a3b")
    parser.add_argument("--drafts", type=int, action="append", help="default: 0, 3 and 7")
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--json", metavar="FILE", help="append the rows to FILE")
    parser.add_argument("--commit", default="unknown")
    options = parser.parse_args(arguments)
    rows = []
    for model in options.model or ("qwen3.5-4b", "qwen3.5-35b-a3b"):
        for drafts in options.drafts or (0, 3, 7):
            for row in measure(model, drafts, options.block_size):
                rows.append(row | {"commit": options.commit})
                append(options.json, rows[-1])
                print(f"{row['case']}: {row['blocks']:.2f} blocks, {row['requests_that_fit']} requests")
    return rows


if __name__ == "__main__":
    main()
