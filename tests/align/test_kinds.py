"""Arguments of another kind: the functions of a step refuse them by name."""

import inspect
from dataclasses import replace

import jax.numpy as jnp
import pytest

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    Corrections,
    DeltaRuleRing,
    GroupSpec,
    RecurrentState,
    StatePool,
    StepBatch,
    TableUpdates,
    add_requests,
    begin_step,
    correct_counts,
    finish_step,
    fold_slots,
    migrate,
    update_block_tables,
)

GROUP = GroupSpec("a", 1, (RecurrentState((2, 8, 8)),), DeltaRuleRing(1, 8, 2, 8, "float32"))
SPEC = AlignConfig((GROUP,), block_size=8, policy="deferred", fold_length=8, max_num_seqs=2, max_model_len=32)
FUNCTIONS = begin_step, migrate, finish_step, fold_slots, add_requests, correct_counts, update_block_tables
# Whatever has the fields of a configuration is taken for one, and the others have tests of their own.
OTHERS = "align", "num_sampled", "slots", "implementation"


@pytest.fixture(scope="module")
def calls():
    """Right arguments of each function."""
    state, tables, pool = AlignState.create(SPEC), BlockTables.create(SPEC), StatePool.create(SPEC, 4)
    batch = StepBatch.from_host(SPEC, 1, [0], [0, 1], [0])
    step = dict(align=SPEC, state=state, pool=pool, tables=tables)
    indices = begin_step(SPEC, state, batch, tables)[1]
    return {
        begin_step: dict(align=SPEC, state=state, batch=batch, tables=tables),
        migrate: dict(align=SPEC, pool=pool, indices=indices),
        finish_step: step | dict(batch=batch, indices=indices, num_sampled=jnp.int32([1])),
        fold_slots: step | dict(slots=jnp.int32([0])),
        add_requests: dict(state=state, additions=Additions.from_host(SPEC, 1, [0], [0])),
        correct_counts: dict(state=state, corrections=Corrections.from_host(SPEC, 1, [0], [0])),
        update_block_tables: dict(tables=tables, updates=TableUpdates.from_host(SPEC, 1, [(0, 0, 0, 1)])),
    }


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (function, name)
        for function in FUNCTIONS
        for name in inspect.signature(function).parameters
        if name not in OTHERS
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("other", [None, 3, "text", [1], jnp.zeros(2)], ids=repr)
def test_arguments_of_another_kind_are_refused_by_name(calls, function, name, other):
    wanted = type(calls[function][name]).__name__
    with pytest.raises(ValueError, match=rf"{function.__name__}: {name} must be {wanted}, got "):
        function(**calls[function] | {name: other})


@pytest.mark.parametrize("slots", [None, 0, [0], jnp.zeros(1), jnp.zeros((1, 1), jnp.int32)], ids=repr)
def test_slots_to_fold_are_a_vector_of_integers(calls, slots):
    with pytest.raises(ValueError, match=r"fold_slots: slots must be int32 \[n\], got "):
        fold_slots(**calls[fold_slots] | dict(slots=slots))


def test_a_pool_of_another_configuration_is_not_folded(calls):
    other = replace(SPEC, groups=(replace(GROUP, num_layers=2),))
    with pytest.raises(ValueError, match=r"StatePool: states must be made for this AlignConfig, "):
        fold_slots(**calls[fold_slots] | dict(pool=StatePool.create(other, 4)))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_what_is_right_is_taken(calls, function):
    function(**calls[function])
