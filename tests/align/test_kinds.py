"""Arguments of another kind: the functions of a step refuse them by name."""

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
STATE, TABLES, POOL = AlignState.create(SPEC), BlockTables.create(SPEC), StatePool.create(SPEC, 4)
BATCH = StepBatch.from_host(SPEC, 1, [0], [0, 1], [0])
INDICES = begin_step(SPEC, STATE, BATCH, TABLES)[1]
CALLS = {
    begin_step: dict(align=SPEC, state=STATE, batch=BATCH, tables=TABLES),
    migrate: dict(align=SPEC, pool=POOL, indices=INDICES),
    finish_step: dict(
        align=SPEC, state=STATE, pool=POOL, batch=BATCH, indices=INDICES, num_sampled=jnp.int32([1]), tables=TABLES
    ),
    fold_slots: dict(align=SPEC, state=STATE, pool=POOL, tables=TABLES, slots=jnp.int32([0])),
    add_requests: dict(state=STATE, additions=Additions.from_host(SPEC, 1, [0], [0])),
    correct_counts: dict(state=STATE, corrections=Corrections.from_host(SPEC, 1, [0], [0])),
    update_block_tables: dict(tables=TABLES, updates=TableUpdates.from_host(SPEC, 1, [(0, 0, 0, 1)])),
}
# Whatever has the fields of a configuration is taken for one, and the two arrays have tests of their own.
OTHERS = "align", "num_sampled", "slots"


@pytest.mark.parametrize(
    ("function", "name"),
    [(function, name) for function, given in CALLS.items() for name in given if name not in OTHERS],
    ids=lambda x: getattr(x, "__name__", x),
)
@pytest.mark.parametrize("other", [None, 3, "text", [1], jnp.zeros(2)], ids=repr)
def test_arguments_of_another_kind_are_refused_by_name(function, name, other):
    wanted = type(CALLS[function][name]).__name__
    with pytest.raises(ValueError, match=rf"{function.__name__}: {name} must be {wanted}, got "):
        function(**CALLS[function] | {name: other})


@pytest.mark.parametrize("slots", [None, 0, [0], jnp.zeros(1), jnp.zeros((1, 1), jnp.int32)], ids=repr)
def test_slots_to_fold_are_a_vector_of_integers(slots):
    with pytest.raises(ValueError, match=r"fold_slots: slots must be int32 \[n\], got "):
        fold_slots(**CALLS[fold_slots] | dict(slots=slots))


def test_a_pool_of_another_configuration_is_not_folded():
    other = replace(SPEC, groups=(replace(GROUP, num_layers=2),))
    with pytest.raises(ValueError, match=r"StatePool: states must be made for this AlignConfig, "):
        fold_slots(**CALLS[fold_slots] | dict(pool=StatePool.create(other, 4)))


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_what_is_right_is_taken(function):
    function(**CALLS[function])
