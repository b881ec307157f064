"""Policy "deferred" with real ops: what is in a boundary's block depends on the tokens, and not on how they were stepped."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.deferred_layers import (
    BLOCK,
    DIM,
    GROUP,
    HEADS,
    KEY_HEADS,
    LAYERS,
    RING,
    SLOTS,
    SPEC,
    SPECS,
    STATES,
    K,
    Server,
    fold,
    inputs_of,
    make_spec,
)

from mamba_align_jax import (
    AlignState,
    BlockTables,
    GroupSpec,
    RecurrentState,
    StatePool,
    StepBatch,
    begin_step,
    fold_slots,
    migrate,
)

EACH = pytest.mark.parametrize("align", SPECS, ids=["gdn", "mamba2"])


def random_schedule(seed):
    rng = np.random.default_rng(seed)
    return lambda: (n := int(rng.integers(1, K + 2)), int(rng.integers(1, n + 1)))


SCHEDULES = {
    "no drafts": lambda: lambda: (1, 1),
    "all accepted": lambda: lambda: (K + 1, K + 1),
    "one accepted": lambda: lambda: (K + 1, 1),
    **{f"random {seed}": functools.partial(random_schedule, seed) for seed in range(3)},
}


@EACH
@pytest.mark.parametrize("prompt", [0, 21, *(pytest.param(n, marks=pytest.mark.deep) for n in (5, 16))])
def test_boundaries_and_outputs_have_the_same_bits_under_every_schedule(prompt, align):
    sequence, end = inputs_of(1), 80
    found = {}
    for seed, (name, schedule) in enumerate(SCHEDULES.items()):
        server = Server(seed, align)
        server.enter(1, sequence)
        if prompt:
            server.step([], chunk=(1, prompt))
        found[name] = server.finish(1, end, schedule()), server.outputs[1]
    boundaries, outputs = found.pop("no drafts")
    for name, (others, told) in found.items():
        for at in range(-(-max(prompt, 1) // BLOCK) * BLOCK, end + 1, BLOCK):
            for mine, other in zip(boundaries[at], others[at], strict=True):
                np.testing.assert_array_equal(other, mine, err_msg=f"{name}, boundary {at}")
        for at in range(prompt, end):
            np.testing.assert_array_equal(told[at], outputs[at], err_msg=f"{name}, output {at}")


@EACH
def test_a_slot_that_is_used_again_does_not_see_the_last_ring(align):
    """A request resumes from the boundary of one that speculated, in a slot whose ring is full of another's entries."""
    sequence = inputs_of(2)
    first = Server(0, align)
    first.enter(0, sequence)
    wanted, outputs = first.finish(0, 64, lambda: (1, 1)), first.outputs[0]
    second = Server(1, align)
    second.enter(0, sequence)
    second.finish(0, 37, SCHEDULES["random 0"]())
    second.enter(1, inputs_of(3))
    second.finish(1, 43, SCHEDULES["random 1"]())
    pool = second.pool
    rings = tuple(tuple(x.at[:, 1].set(jnp.nan) for x in ring) for ring in pool.rings)
    second.pool = StatePool(states=pool.states, rings=rings)
    second.enter(1, sequence, computed=32, like=0)
    got = second.finish(1, 64, SCHEDULES["random 2"]())
    for at in (48, 64):
        for mine, other in zip(got[at], wanted[at], strict=True):
            np.testing.assert_array_equal(mine, other)
    for at in range(32, 64):
        np.testing.assert_array_equal(second.outputs[1][at], outputs[at])


@EACH
@pytest.mark.parametrize("before", [1, 7, 8, 9, 15, 16, 17, 23, 24, 25])
@pytest.mark.parametrize("accepted", [1, K + 1])
def test_a_chunk_after_verify_rows_continues_from_their_entries(before, accepted, align):
    """With and without a complete fold group at the chunk's start, which is also the boundary 16."""
    sequence = inputs_of(4)
    plain, other = Server(0, align), Server(1, align)
    for server in (plain, other):
        server.enter(0, sequence)
    plain.step([], chunk=(0, before))
    while (left := before - int(other.state.num_computed_tokens[0])) > 0:
        other.step([(0, min(K + 1, left), min(accepted, left))])
    for server in (plain, other):
        assert server.step([], chunk=(0, 33), migrates=True) == 0
        server.step([(0, K + 1, 2)])
    for at in range(before, before + 35):
        np.testing.assert_allclose(other.outputs[0][at], plain.outputs[0][at], rtol=0, atol=1e-5)
    if before % BLOCK == 0:
        for mine, theirs in zip(other.boundary(0, before), plain.boundary(0, before), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


def test_a_chunk_whose_state_was_not_migrated_counts_as_lost():
    server = Server()
    server.enter(0, inputs_of(5))
    server.step([(0, K + 1, 2)])
    assert server.step([(0, 1, 1)]) == 0
    assert server.step([], chunk=(0, 4), migrates=False) == 1


@EACH
def test_only_slots_whose_group_is_complete_fold_and_others_do_not_change(align):
    server = Server(0, align)
    for slot, end in enumerate((7, 8, 9)):
        server.enter(slot, inputs_of(slot))
        while int(server.state.num_computed_tokens[slot]) < end or slot in server.entering:
            server.step([(slot, 1, 1)])
    assert server.state.state_pos.tolist() == [0, 0, 8]
    before = jax.tree.map(np.asarray, server.pool)
    tables = BlockTables(blocks=jnp.asarray(server.blocks[None]))
    state, pool = fold(align, server.state, server.pool, tables, jnp.array([0, 2, -1]))
    assert state.state_pos.tolist() == [0, 0, 8]
    jax.tree.map(np.testing.assert_array_equal, pool, before)
    state, pool = fold(align, state, pool, tables, jnp.array([1, -1]))
    assert state.state_pos.tolist() == [0, 8, 8]
    changed = [b for b in range(64) if not np.array_equal(pool.states[0][1][:, b], before.states[0][1][:, b], True)]
    assert changed == [server.blocks[1, 0]]
    np.testing.assert_array_equal(pool.states[0][0], before.states[0][0])


def test_lost_states_are_counted():
    server = Server()
    server.enter(0, inputs_of(6))
    for _ in range(3):
        # The base is 0, which is no lost state.
        assert server.step([(0, K + 1, K + 1)]) == 0
    assert server.state.state_pos[0] == 8
    server.blocks[0, 0] = 0
    assert server.step([(0, 1, 1)]) == 1


def test_no_state_is_copied_and_a_request_holds_few_blocks():
    assert (SPEC.window, SPEC.num_columns, SPEC.blocks_per_request(), SPEC.blocks_per_request(1)) == (4, 6, 2, 3)
    wide = make_spec(block_size=64, fold_length=16, num_speculative_tokens=7, max_model_len=1024)
    assert [wide.blocks_per_request(n) for n in (0, 1)] == [2, 3]
    assert [make_spec(policy="copy_free", block_size=64).blocks_per_request(n) for n in (0, 1)] == [5, 6]
    # The base may be in the block before the last boundary, and the window in the one after it.
    assert make_spec(block_size=8).blocks_per_request() == 3
    assert make_spec(mode="none", fold_length=9).blocks_per_request() == 1
    per_layer = 16 * (KEY_HEADS * DIM + HEADS * DIM + HEADS) * 4
    assert SPEC.ring_bytes_per_slot == LAYERS * per_layer
    of_mamba = 16 * (HEADS * DIM + KEY_HEADS * DIM + 2 * HEADS) * 4
    assert SPECS[1].ring_bytes_per_slot == LAYERS * of_mamba
    assert SPEC.ring_bytes == SLOTS * SPEC.ring_bytes_per_slot
    assert make_spec(policy="copy_free").ring_bytes_per_slot == 0
    assert make_spec(policy="copy_free").ring_bytes == 0


MAMBA = GroupSpec("mamba", 1, STATES)
BAD = {
    "fold_length must divide block_size = 16 under policy 'deferred', got 7": dict(fold_length=7),
    "fold_length must be more than 2 * num_speculative_tokens = 8 under policy 'deferred', got 8": dict(
        num_speculative_tokens=4
    ),
    "fold_length must be at least 1, got 0": dict(fold_length=0),
    "which only gated delta nets and Mamba-2 have, got group 'mamba' without one": dict(groups=(GROUP, MAMBA)),
    "which only gated delta nets and Mamba-2 have, got ['conv']": dict(groups=(GroupSpec("conv", 1, STATES[:1]),)),
    "must have one recurrent state [2, 4, 4] of layout 'VK' for the ring of group 'gdn', got": dict(
        groups=(GroupSpec("gdn", 1, (RecurrentState((2, 4, 4), layout="KV"),), RING),)
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_specs_are_refused(message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_spec(**BAD[message])


@pytest.mark.parametrize("policies", [("deferred", "copy_free"), ("pre_copy", "deferred")])
def test_slots_of_another_policy_are_refused(policies):
    made, used = (make_spec(policy=policy) for policy in policies)
    batch = StepBatch.from_host(used, 1, [0], [0, 1], [0])
    message = f"AlignState: policy must be the one it was made for, .*got '{policies[1]}'"
    with pytest.raises(ValueError, match=message):
        begin_step(used, AlignState.create(made), batch, BlockTables.create(used))


@pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
def test_slots_are_folded_under_policy_deferred_alone(policy):
    align = make_spec(policy=policy)
    state, pool, tables = AlignState.create(align), StatePool.create(align, 8), BlockTables.create(align)
    with pytest.raises(ValueError, match=f"fold_slots: policy must be 'deferred', got '{policy}'"):
        fold_slots(align, state, pool, tables, jnp.array([0], jnp.int32))


@EACH
def test_everything_stays_int32_in_64_bit_mode(align):
    with jax.enable_x64(True):
        state, batch = AlignState.create(align), StepBatch.from_host(align, 2, [0, 2], [0, 1, 3], [0, -1])
        state, indices = begin_step(align, state, batch, BlockTables.create(align))
        state, pool = fold_slots(
            align, state, StatePool.create(align, 8), BlockTables.create(align), jnp.array([0, -1], jnp.int32)
        )
        pool = migrate(align, pool, indices)
    kinds = {x.dtype for x in jax.tree.leaves((state, indices))}
    assert kinds == {jnp.dtype("int32"), jnp.dtype("bool")}
    assert {x.dtype for x in jax.tree.leaves(pool)} == {jnp.dtype("float32")}
