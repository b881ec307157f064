"""One compiled step for all configurations: block_size is traced, and windows are wide enough for the largest K."""

from dataclasses import replace

import jax

from mamba_align_jax import (
    AlignConfig,
    ConvState,
    DeltaRuleRing,
    GroupSpec,
    RecurrentState,
    add_requests,
    begin_step,
    update_block_tables,
)
from mamba_align_jax.align.interior import interior_checkpoints
from mamba_align_jax.align.step import plan_finish
from mamba_align_jax.vllm_compat.staging import plan_postprocess

SLOTS = 4
# The longest sequence, with blocks of 9 tokens.
LONGEST = 83
CHANNELS, DIM = 12, 4


def make_spec(width=4, **changes):
    """Makes two groups of different layers: a gated delta net and a short convolution."""
    conv, ring = ConvState(width, CHANNELS, "float32"), DeltaRuleRing(1, DIM, 1, DIM, "float32")
    groups = GroupSpec("gdn", 1, (conv, RecurrentState((1, DIM, DIM))), ring), GroupSpec("short conv", 1, (conv,))
    return AlignConfig(groups, max_num_seqs=SLOTS, **changes)


WIDEST = make_spec(block_size=9, num_speculative_tokens=8, max_model_len=288)


@jax.tree_util.register_pytree_node_class
class AnyConfig:
    """`base` with a traced `state_block_size` and `fold_length`. Mode "none" is a large block.

    Nothing else of a configuration reaches the arithmetic, except that plans of copies are left out where K is 0 or the
    mode "none". Here they are made, and have to move nothing.
    """

    def __init__(self, base, state_block_size, fold_length=None):
        self.base, self.state_block_size, self.fold_length = base, state_block_size, fold_length

    def __getattr__(self, name):
        return getattr(self.base, name)

    def tree_flatten(self):
        return (self.state_block_size, self.fold_length), self.base

    @classmethod
    def tree_unflatten(cls, base, children):
        return cls(base, *children)


POLICIES = {policy: replace(WIDEST, policy=policy) for policy in ("copy_free", "pre_copy")}


@jax.jit
def run_step(block_size, states, tables, additions, updates, batch, num_sampled, host_inputs):
    """Runs the step under every policy, one entry of `states` for each, and the device's part of the host path."""
    tables, results = update_block_tables(tables, updates), {}
    for policy, base in POLICIES.items():
        align = AnyConfig(base, block_size)
        state = add_requests(states[policy], additions)
        state, indices = begin_step(align, state, batch, tables)
        results[policy] = state, indices, *plan_finish(align, state, batch, indices, num_sampled, tables)
    staged, sampled, slots = host_inputs
    offset, column = interior_checkpoints(indices.num_computed_tokens, batch.num_tokens, block_size, LONGEST)
    interior = offset, tables.lookup(batch.idx_mapping[:, None], column)
    return tables, results, plan_postprocess(align, staged, sampled, tables, slots), interior


# Blocks of 9 tokens and no column for a draft: as many columns as there are tokens to fill with the smallest blocks.
DEFERRED = {"deferred": replace(WIDEST, policy="deferred", fold_length=9, num_speculative_tokens=4)}


@jax.jit
def run_deferred_step(block_size, fold_length, states, tables, additions, updates, batch, num_sampled):
    """Runs the step under policy "deferred". What it returns is that of `run_step` without the host path."""
    tables, align = update_block_tables(tables, updates), AnyConfig(DEFERRED["deferred"], block_size, fold_length)
    state = add_requests(states["deferred"], additions)
    state, indices = begin_step(align, state, batch, tables)
    results = {"deferred": (state, indices, *plan_finish(align, state, batch, indices, num_sampled, tables))}
    offset, column = interior_checkpoints(indices.num_computed_tokens, batch.num_tokens, block_size, LONGEST)
    return tables, results, None, (offset, tables.lookup(batch.idx_mapping[:, None], column))
