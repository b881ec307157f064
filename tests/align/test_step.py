"""Single steps: rows without tokens, copies that are left out, padding, refused arguments, and sizes."""

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    CopyPlan,
    GroupSpec,
    LayerStep,
    RecurrentState,
    StatePool,
    StepBatch,
    TableUpdates,
    add_requests,
    begin_step,
    finish_step,
    migrate,
    update_block_tables,
)
from mamba_align_jax.align.columns import choose, column_of, last_boundary
from pallas_kernels import NULL_BLOCK

POLICIES = ["copy_free", "pre_copy"]
CONV, RECURRENT = ConvState(4, 6, "float32"), RecurrentState((2, 4, 8))
GROUPS = (GroupSpec("a", 3, (CONV, RECURRENT)), GroupSpec("b", 2, (RECURRENT,)))


def make_spec(**changes):
    fields = dict(groups=GROUPS, block_size=4, num_speculative_tokens=2, max_num_seqs=4, max_model_len=24)
    return AlignConfig(**fields | changes)


def running(align, num_blocks=64):
    """Makes slots that have computed some tokens, and tables with a different block in every column."""
    entries = lambda *values: jnp.array(values[: align.max_num_seqs], jnp.int32)
    state = AlignState(
        num_computed_tokens=entries(6, 7, 13, 0),
        num_accepted_tokens=entries(1, 2, 1 + align.num_speculative_tokens, 1),
        running_column=entries(1, 1, 2, -1),
    )
    shape = (len(align.groups), align.max_num_seqs, align.num_columns)
    blocks = 1 + jnp.arange(np.prod(shape[1:]), dtype=jnp.int32).reshape(shape[1:])
    assert int(blocks.max()) < num_blocks
    return state, BlockTables(blocks=jnp.broadcast_to(blocks, shape))


def fill_pool(align, rng, num_blocks=64):
    """Makes a pool of random values and NaNs."""
    pool = StatePool.create(align, num_blocks)
    dirty = lambda x: np.where(rng.random(x.shape) < 0.2, np.nan, rng.normal(size=x.shape)).astype(np.float32)
    return jax.tree.map(lambda x: jnp.asarray(dirty(x)), pool)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def run(align, state, pool, batch, num_sampled, tables):
    """Runs a step whose model does nothing."""
    state, indices = begin_step(align, state, batch, tables)
    pool = migrate(align, pool, indices)
    return finish_step(align, state, pool, batch, indices, num_sampled, tables)


# Rows without tokens.


@pytest.mark.parametrize("K", [0, 2])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("slots", [[], [-1, -1], [2, 0, -1, 1, 3]], ids=["empty", "padding", "no tokens"])
def test_idle_rows_leave_state_and_pool_unchanged(rng, slots, policy, K):
    align = make_spec(policy=policy, num_speculative_tokens=K)
    state, tables = running(align)
    pool = fill_pool(align, rng)
    # Rows without tokens may be of any kind, and may have any number of sampled tokens.
    drafts = [min(r - 1, K) if slot >= 0 else -1 for r, slot in enumerate(slots)]
    batch = StepBatch.from_host(align, 6, slots, [0] * (1 + len(slots)), drafts)
    step = jax.jit(functools.partial(run, align))
    after = step(state, pool, batch, jnp.arange(6, dtype=jnp.int32), tables)
    assert bits(after) == bits((state, pool))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_live_row_changes_its_own_slot_and_destinations_only(rng, policy):
    align = make_spec(policy=policy)
    state, tables = running(align)
    pool = fill_pool(align, rng)
    # Slot 2 had computed 13 tokens, with 3 accepted in columns 2 to 4. A verify row of 3 tokens crosses to column 3 and
    # reaches 16.
    batch = StepBatch.from_host(align, 4, [0, 2, -1], [0, 0, 3, 3], [-1, 2, -1])
    after, moved = run(align, state, pool, batch, jnp.array([7, 3, 7, 7]), tables)
    np.testing.assert_array_equal(after.num_computed_tokens, [6, 7, 16, 0])
    np.testing.assert_array_equal(after.num_accepted_tokens, [1, 2, 1, 1])
    np.testing.assert_array_equal(after.running_column, [1, 1, 3, -1])
    column = np.asarray(tables.blocks[0, 2])
    for before, now in zip(jax.tree.leaves(pool), jax.tree.leaves(moved), strict=True):
        changed = {b for b in range(64) if np.asarray(before[:, b]).tobytes() != np.asarray(now[:, b]).tobytes()}
        assert changed == {column[3]}


@pytest.mark.parametrize("policy", POLICIES)
def test_lost_states_are_counted(policy):
    align = make_spec(policy=policy)
    state, tables = running(align)
    # Slot 0 continues from column 1, slot 1 from columns 2 and 1, and slot 2 from columns 4 and 2. Slot 3 is fresh.
    batch = StepBatch.from_host(align, 6, [2, 3, 0, -1, 1], [0, 3, 4, 5, 5, 6], [2, 0, 0, -1, 0])
    counts = {
        (): 0,
        ((1, 0, 1),): 1,
        ((0, 1, 2),): 1,
        ((0, 2, 4),): 1,
        ((1, 2, 2),): 1,
        ((0, 0, 1), (1, 0, 1), (1, 2, 4)): 2,
        # Columns from which no row continues, or only the fresh one.
        ((0, 3, 0), (0, 0, 0), (1, 1, 3)): 0,
    }
    for places, count in counts.items():
        blocks = np.array(tables.blocks)
        for place in places:
            blocks[place] = 0
        _, indices = begin_step(align, state, batch, BlockTables(blocks=jnp.asarray(blocks)))
        found = indices.num_null_reads()
        assert (int(found), found.dtype, found.shape) == (count, jnp.int32, ()), places


# Copies that a step does not contain.


def lowered(function, *arguments):
    return jax.jit(function, donate_argnums=0).lower(*arguments).as_text()


def moves_states(text):
    return any(word in text for word in ("while", "dynamic_update_slice", "dynamic_slice", "custom_call"))


def step_parts(align, rng):
    state, tables = running(align)
    batch = StepBatch.from_host(align, 2, [0, 1], [0, 1, 2], [0, 0])
    state, indices = begin_step(align, state, batch, tables)
    return state, fill_pool(align, rng), batch, indices, tables


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("changes", "num_sampled", "copies"),
    [
        (dict(num_speculative_tokens=0), 1, False),
        (dict(num_speculative_tokens=2), 1, True),
        (dict(num_speculative_tokens=2), None, False),
        (dict(num_speculative_tokens=2, mode="none"), 1, False),
        (dict(num_speculative_tokens=2, mode="all"), 1, True),
    ],
    ids=["K = 0", "K = 2", "nothing sampled", "mode none", "mode all"],
)
def test_finish_step_copies_only_where_a_boundary_can_be_passed(rng, changes, num_sampled, copies, policy):
    align = make_spec(policy=policy, **changes)
    state, pool, batch, indices, tables = step_parts(align, rng)
    assert (finish_step(align, state, pool, batch, indices, num_sampled, tables)[1] is pool) == (not copies)
    finish = lambda pool, state, indices: finish_step(align, state, pool, batch, indices, num_sampled, tables)
    assert moves_states(lowered(finish, pool, state, indices)) == copies


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("K", [0, 2])
def test_only_pre_copy_migrates(rng, K, policy):
    align = make_spec(policy=policy, num_speculative_tokens=K)
    _, pool, _, indices, _ = step_parts(align, rng)
    copies = policy == "pre_copy"
    assert (migrate(align, pool, indices) is pool) == (not copies)
    assert moves_states(lowered(functools.partial(migrate, align), pool, indices)) == copies


def test_num_copies_counts_what_moves():
    plan = CopyPlan(
        recurrent_source=jnp.array([[3, 4, 5, 6, 7], [3, 4, 5, 6, 7]]),
        conv_source=jnp.array([[3, 4, 5, 2, 7], [3, 4, 5, 6, 7]]),
        window_row=jnp.array([0, 1, 0, 2, 0]),
        # Group 0: a copy onto itself, one that only shifts, two real copies and a skip. Group 1: only the last is a
        # copy.
        destination=jnp.array([[3, 4, 6, 2, 0], [0, 0, 0, 0, 8]]),
    )
    recurrent, conv = plan.num_copies()
    assert (recurrent.tolist(), conv.tolist()) == ([2, 1], [3, 1])


# Sampled tokens.


@pytest.mark.parametrize("scalar", [0, 1, jnp.int32(2)], ids=["0", "1", "int32"])
def test_an_int_num_sampled_stands_for_every_row(rng, scalar):
    align = make_spec()
    state, tables = running(align)
    pool = fill_pool(align, rng)
    batch = StepBatch.from_host(align, 4, [1, 2], [0, 3, 6], [2, 2])
    one = run(align, state, pool, batch, scalar, tables)
    assert bits(one) == bits(run(align, state, pool, batch, jnp.full(4, scalar, jnp.int32), tables))


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        (jnp.ones(3, jnp.int32), "int32 [3]"),
        (jnp.ones((4, 1), jnp.int32), "int32 [4, 1]"),
        (jnp.ones(4), "float32 [4]"),
        (1.5, "1.5"),
        (True, "True"),
        ([1, 1, 1, 1], "[1, 1, 1, 1]"),
    ],
    ids=str,
)
def test_another_num_sampled_is_refused(rng, wrong, got):
    align = make_spec()
    state, tables = running(align)
    batch = StepBatch.from_host(align, 4, [1, 2], [0, 3, 6], [2, 2])
    with raises(f"finish_step: num_sampled must be None, a whole number, or int32 [4], got {got}"):
        run(align, state, fill_pool(align, rng), batch, wrong, tables)


def test_a_stage_that_samples_nothing_continues_from_its_last_token(rng):
    align = make_spec()
    state, tables = running(align)
    pool = fill_pool(align, rng)
    batch = StepBatch.from_host(align, 2, [0, 3], [0, 2, 10], [-1, -1])
    after, same = run(align, state, pool, batch, None, tables)
    np.testing.assert_array_equal(after.num_computed_tokens, [8, 7, 13, 8])
    np.testing.assert_array_equal(after.num_accepted_tokens, [1, 2, 3, 1])
    assert same is pool


# Slots and tables.


def test_add_requests_seeds_its_slots_and_skips_padding():
    align = make_spec()
    state, _ = running(align)
    within = add_requests(state, Additions.from_host(align, 4, [0, 1, 3], [7, 9, 1]))
    np.testing.assert_array_equal(within.running_column, [1, 2, state.running_column[2], 0])
    after = add_requests(state, Additions.from_host(align, 4, [2, 0], [8, 0]))
    np.testing.assert_array_equal(after.num_computed_tokens, [0, 7, 8, 0])
    np.testing.assert_array_equal(after.num_accepted_tokens, [1, 2, 1, 1])
    np.testing.assert_array_equal(after.running_column, [-1, 1, 1, -1])
    assert bits(add_requests(state, Additions.from_host(align, 4, [], []))) == bits(state)


def test_update_block_tables_sets_its_entries_and_skips_padding():
    align = make_spec()
    tables = BlockTables.create(align)
    assert tables.blocks.shape == (2, 4, 8)
    entries = [(0, 1, 2, 11), (1, 3, 7, 12), (1, 0, 0, 13)]
    wanted = np.zeros((2, 4, 8), np.int32)
    for *place, block in entries:
        wanted[tuple(place)] = block
    after = update_block_tables(tables, TableUpdates.from_host(align, 8, entries))
    np.testing.assert_array_equal(after.blocks, wanted)
    assert bits(update_block_tables(after, TableUpdates.from_host(align, 8, []))) == bits(after)


def test_columns_outside_the_row_have_no_block():
    _, tables = running(align := make_spec())
    columns = jnp.array([-(2**31), -2, -1, 0, align.num_columns - 1, align.num_columns, 2**31 - 1])
    found = tables.lookup(jnp.full(7, 3), columns)
    first, last = tables.blocks[:, 3, 0], tables.blocks[:, 3, -1]
    wanted = [[NULL_BLOCK] * 3 + [a, b] + [NULL_BLOCK] * 2 for a, b in zip(first, last, strict=True)]
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", [int, np.int32, jnp.int32])
def test_no_tokens_have_column_minus_one(kind):
    # (tokens, column, boundary) for blocks of 4
    for tokens, column, boundary in [(0, -1, 0), (1, 0, 0), (4, 0, 4), (5, 1, 4), (8, 1, 8)]:
        assert (column_of(kind(tokens), 4), last_boundary(kind(tokens), 4)) == (column, boundary)
    assert choose(kind(1) > 0, kind(5), kind(7)) == 5
    assert choose(kind(1) < 0, kind(5), kind(7)) == 7


# Arguments that are refused.


def batch_of(**changes):
    rows = dict(bucket=4, idx_mapping=[0, 1], query_start_loc=[0, 3, 5], num_drafts=[2, -1])
    return StepBatch.from_host(make_spec(), **rows | changes)


BAD_BATCHES = {
    "query_start_loc must describe 2 rows, got 1": dict(query_start_loc=[0, 3]),
    "num_drafts must describe 2 rows, got 3": dict(num_drafts=[2, -1, -1]),
    "bucket must be at least 2 rows, got 1": dict(bucket=1),
    "query_start_loc must start at 0, got 1": dict(query_start_loc=[1, 4, 5]),
    "row 1: idx_mapping must be in [-1, 4), got 4": dict(idx_mapping=[0, 4]),
    "row 0: idx_mapping must be in [-1, 4), got -2": dict(idx_mapping=[-2, 1]),
    "row 1: idx_mapping repeats slot 3 of row 0": dict(idx_mapping=[3, 3]),
    "row 1: query_start_loc must not decrease, got 3 then 2": dict(query_start_loc=[0, 3, 2]),
    "row 1: a padding row must have no tokens, got 2": dict(idx_mapping=[0, -1]),
    "row 1: num_drafts must be in [-1, 2], got 3": dict(num_drafts=[2, 3]),
    "row 0: num_drafts must be in [-1, 2], got -2": dict(num_drafts=[-2, -1]),
    "row 0: a verify row with 1 drafts must have 2 tokens, got 3": dict(num_drafts=[1, -1]),
    "row 1: must have at most max_model_len = 24 tokens, got 25": dict(query_start_loc=[0, 3, 28]),
}
BAD_ADDITIONS = {
    "slots and num_computed_tokens must have the same length, at most 3, got 2 and 1": ([0, 1], [0]),
    "at most 3, got 4 and 4": ([0, 1, 2, 3], [0] * 4),
    "slots must be distinct, got [1, 1]": ([1, 1], [0, 0]),
    "slot of entry 1 must be in [0, 4), got 4": ([0, 4], [0, 0]),
    "slot of entry 0 must be in [0, 4), got -1": ([-1], [0]),
    "num_computed_tokens of entry 1 must be in [0, 24), got 24": ([0, 1], [4, 24]),
    "num_computed_tokens of entry 0 must be in [0, 24), got -4": ([0], [-4]),
}
BAD_UPDATES = {
    "entries must be at most bucket = 3, got 4": [(0, 0, c, 1) for c in range(4)],
    "(group, slot, column) (1, 2, 3) must have one block, got 7 and 8": [(1, 2, 3, 7), (0, 2, 3, 9), (1, 2, 3, 8)],
    "entry 1 must be (group, slot, column) inside (2, 4, 8) and a block >= 0, got (2, 0, 0, 1)": [
        (0,) * 4,
        (2, 0, 0, 1),
    ],
    "entry 0 must be (group, slot, column) inside (2, 4, 8) and a block >= 0, got (0, 4, 0, 1)": [(0, 4, 0, 1)],
    "entry 0 must be (group, slot, column) inside (2, 4, 8) and a block >= 0, got (0, -1, 0, 1)": [(0, -1, 0, 1)],
    "entry 0 must be (group, slot, column) inside (2, 4, 8) and a block >= 0, got (0, 0, 8, 1)": [(0, 0, 8, 1)],
    "entry 0 must be (group, slot, column) inside (2, 4, 8) and a block >= 0, got (0, 0, 0, -1)": [(0, 0, 0, -1)],
}
BAD_SPECS = {
    "groups must not be empty": lambda: make_spec(groups=()),
    "block_size must be at least 1, got 0": lambda: make_spec(block_size=0, num_speculative_tokens=0),
    "num_speculative_tokens must be at least 0, got -1": lambda: make_spec(num_speculative_tokens=-1),
    "max_num_seqs must be at least 1, got 0": lambda: make_spec(max_num_seqs=0),
    "max_model_len must be at least 1, got 0": lambda: make_spec(max_model_len=0),
    "mode must be 'none', 'align' or 'all', got 'sometimes'": lambda: make_spec(mode="sometimes"),
    "max_model_len must be at most 2147483646, got": lambda: make_spec(mode="none", max_model_len=2**31 - 1),
    "policy must be one of ['copy_free', 'deferred', 'pre_copy'], got 'guess'": lambda: make_spec(policy="guess"),
    "block_size must be at least num_speculative_tokens + 1 = 5, got 4": lambda: make_spec(num_speculative_tokens=4),
    "num_speculative_tokens + 1 = 6, got 4": lambda: make_spec(num_speculative_tokens=5, mode="all"),
    "dtype must be one of ['bfloat16', 'float16', 'float32'], got 'int8'": lambda: ConvState(4, 8, "int8"),
    "got 'float64'": lambda: RecurrentState((2, 2), np.float64),
    "width must be 2 to 5 and channels positive, got 6, 8": lambda: ConvState(6, 8),
    "width must be 2 to 5 and channels positive, got 1, 8": lambda: ConvState(1, 8),
    "width must be 2 to 5 and channels positive, got 4, 0": lambda: ConvState(4, 0),
    "layout must be 'SD' or 'DS', got 'sd'": lambda: ConvState(4, 8, layout="sd"),
    "layout must be 'VK' or 'KV', got 'SD'": lambda: RecurrentState((2, 4, 8), layout="SD"),
    "two axes or more, all positive, got (8,)": lambda: RecurrentState((8,)),
    "two axes or more, all positive, got (8, 0)": lambda: RecurrentState((8, 0)),
    "groups must have distinct names, got ['a', 'a']": lambda: make_spec(groups=(GROUPS[0],) * 2),
    "GroupSpec 'z': states must be ConvState or RecurrentState, got (2, 2)": lambda: GroupSpec("z", 1, ((2, 2),)),
    "GroupSpec 'z': states must be ConvState or RecurrentState, got None": lambda: GroupSpec("z", 1, (RECURRENT, None)),
    "GroupSpec 'x': must have at least one layer and one state": lambda: GroupSpec("x", 0, (CONV,)),
    "GroupSpec 'y': must have at least one layer and one state": lambda: GroupSpec("y", 1, ()),
}


def raises(message):
    return pytest.raises(ValueError, match=re.escape(message))


def test_a_good_batch_is_padded():
    batch = batch_of()
    np.testing.assert_array_equal(batch.idx_mapping, [0, 1, -1, -1])
    np.testing.assert_array_equal(batch.query_start_loc, [0, 3, 5, 5, 5])
    np.testing.assert_array_equal(batch.num_drafts, [2, -1, -1, -1])
    np.testing.assert_array_equal(batch.num_tokens, [3, 2, 0, 0])


@pytest.mark.parametrize("message", BAD_BATCHES)
def test_bad_batches_are_refused(message):
    with raises(message):
        batch_of(**BAD_BATCHES[message])


@pytest.mark.parametrize("message", BAD_ADDITIONS)
def test_bad_additions_are_refused(message):
    with raises(message):
        Additions.from_host(make_spec(), 3, *BAD_ADDITIONS[message])


@pytest.mark.parametrize("message", BAD_UPDATES)
def test_bad_table_updates_are_refused(message):
    with raises(message):
        TableUpdates.from_host(make_spec(), 3, BAD_UPDATES[message])


def test_an_update_may_repeat_an_entry():
    updates = TableUpdates.from_host(make_spec(), 3, [(1, 2, 3, 7), (0, 2, 3, 8), (1, 2, 3, 7)])
    tables = update_block_tables(BlockTables.create(make_spec()), updates)
    assert (int(tables.blocks[1, 2, 3]), int(tables.blocks[0, 2, 3])) == (7, 8)


@pytest.mark.parametrize("message", BAD_SPECS)
def test_bad_specs_are_refused(message):
    with raises(message):
        BAD_SPECS[message]()


def started(align):
    """Returns the batch of one row, and what `begin_step` needs and returns."""
    batch, tables = StepBatch.from_host(align, 1, [0], [0, 1], [0]), BlockTables.create(align)
    state, indices = begin_step(align, AlignState.create(align), batch, tables)
    return batch, tables, state, indices


OTHER_POOLS = {
    "fewer drafts": lambda align: StatePool.create(make_spec(num_speculative_tokens=0), 8),
    "fewer groups": lambda align: StatePool.create(make_spec(groups=align.groups[:1]), 8),
    "arrays in another order": lambda align: StatePool.create(align, 8).with_group(
        0, StatePool.create(align, 8).states[0][::-1]
    ),
    "another dtype": lambda align: jax.tree.map(lambda x: x.astype(jnp.float16), StatePool.create(align, 8)),
    "another policy": lambda align: replace(StatePool.create(align, 8), rings=((),) * len(align.groups)),
    "no pool": lambda align: StatePool.create(align, 8).states,
}


@pytest.mark.parametrize("name", OTHER_POOLS)
def test_a_pool_that_was_made_for_another_spec_is_refused(name):
    """It would lose states silently."""
    align = make_spec()
    batch, tables, state, indices = started(align)
    pool = OTHER_POOLS[name](align)
    with pytest.raises(ValueError, match=r"(StatePool|migrate|finish_step): (states|rings|pool) must be"):
        migrate(align, pool, indices)
    with pytest.raises(ValueError, match=r"(StatePool|migrate|finish_step): (states|rings|pool) must be"):
        finish_step(align, state, pool, batch, indices, 1, tables)


def test_slots_of_another_number_are_refused():
    align = make_spec()
    few = AlignState.create(make_spec(max_num_seqs=1))
    batch, tables, *_ = started(align)
    with raises(f"AlignState: slots must be max_num_seqs = {align.max_num_seqs}, got 1"):
        begin_step(align, few, batch, tables)


@pytest.mark.parametrize(
    ("where", "wanted"), [((0, 2), "group must be at most 1, got 2"), ((0, -1), "group"), ((-1, 0), "layer")]
)
def test_a_layer_of_no_group_is_refused(where, wanted):
    batch, _, _, indices = started(make_spec())
    step = LayerStep.create(batch, indices, num_decode_rows=1, num_tokens=1)
    with raises(f"LayerStep.at: {wanted}"):
        step.at(*where)


@pytest.mark.parametrize("shape", [(2, 4, 7), (1, 4, 8), (2, 3, 8), (4, 8)], ids=str)
def test_tables_of_another_configuration_are_refused(shape):
    """The tables have too few columns for the end of the longest sequence, or other groups or slots."""
    align = make_spec()
    batch = StepBatch.from_host(align, 1, [0], [0, 1], [0])
    wanted = f"blocks must be [groups, slots, columns] = [2, 4, 8], or more columns, got {list(shape)}"
    with raises(wanted):
        begin_step(align, AlignState.create(align), batch, BlockTables(blocks=jnp.ones(shape, jnp.int32)))


# Sizes.


def test_sizes_by_hand():
    align = make_spec()
    # Windows: 3 layers of 3 + 2 rows of 6. Recurrent states: 2 * 4 * 8 in 3 layers, and in 2 layers.
    assert align.state_bytes_per_block(0, CONV) == 3 * 5 * 6 * 4 == 360
    assert align.bytes_per_block == 360 + 3 * 64 * 4 + 2 * 64 * 4 == 1640
    assert align.num_columns == 24 // 4 + 2 == 8
    assert make_spec(max_model_len=25).num_columns == 9
    assert (align.window, align.blocks_per_request(), align.blocks_per_request(1)) == (3, 5, 5)
    plain = make_spec(num_speculative_tokens=0)
    assert (plain.num_columns, plain.blocks_per_request()) == (6, 2)
    # In mode "all" a chunk may keep a state in every column.
    every = make_spec(mode="all")
    assert (every.state_block_size, every.num_columns, every.blocks_per_request(1)) == (4, 8, 8)
    none = make_spec(mode="none", block_size=1)
    assert (none.num_columns, none.blocks_per_request(), none.blocks_per_request(1)) == (3, 3, 3)
    # Qwen3.5-35B-A3B: 30 layers of GDN, convolutions in bfloat16, states in float32.
    gdn = GroupSpec("gdn", 30, (ConvState(4, 8192), RecurrentState((32, 128, 128))))
    assert AlignConfig((gdn,), 64).bytes_per_block == 30 * (3 * 8192 * 2 + 32 * 128 * 128 * 4) == 64_389_120


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype("bfloat16")], ids=["name", "jax", "numpy"])
def test_dtypes_become_names(dtype):
    assert ConvState(4, 8, dtype) == ConvState(4, 8)
    assert hash(ConvState(4, 8, dtype)) == hash(ConvState(4, 8))


def test_pools_have_the_shapes_of_the_configuration():
    pool = StatePool.create(make_spec(), 6)
    assert [[x.shape for x in group] for group in pool.states] == [[(3, 6, 5, 6), (3, 6, 2, 4, 8)], [(2, 6, 2, 4, 8)]]
    assert pool.num_blocks == 6
    with raises("num_blocks must be at least 6 for one request, got 5"):
        StatePool.create(make_spec(), 5)


def test_a_pool_takes_the_callers_own_arrays():
    align = make_spec()
    conv, recurrent, other = jnp.zeros((3, 9, 5, 6)), jnp.zeros((3, 9, 2, 4, 8)), jnp.zeros((2, 7, 2, 4, 8))
    pool = StatePool.from_arrays(align, [[conv, recurrent], [other]])
    assert pool.num_blocks == 7
    assert pool.states[0][1] is recurrent
    with raises("StatePool.with_group: states of group 0 must be 2 arrays, got 1"):
        pool.with_group(0, [conv])
    with raises("states must have [2, 1] arrays per group, got [1, 2]"):
        StatePool.from_arrays(align, [[conv], [recurrent, other]])
    with raises("arrays of group 'b' must be float32[2, 7, 2, 4, 8], got float32[2, 7, 2, 8, 4]"):
        StatePool.from_arrays(align, [[conv, recurrent], [other.swapaxes(3, 4)]])
    with raises("arrays of group 'a' must be float32[3, 9, 5, 6], got float16[3, 9, 5, 6]"):
        StatePool.from_arrays(align, [[conv.astype(jnp.float16), recurrent], [other]])
    with raises("arrays of group 'a' must be float32[3, 9, 2, 4, 8], got float32[3, 8, 2, 4, 8]"):
        StatePool.from_arrays(align, [[conv, recurrent[:, 1:]], [other]])


def random_pool(align, blocks=9):
    rng = np.random.default_rng(0)
    pool = StatePool.create(align, blocks)
    # Copied, because JAX cannot donate memory that it borrows from NumPy.
    return jax.tree.map(lambda x: jnp.array(rng.normal(size=x.shape), x.dtype, copy=True), pool)


def test_a_block_is_read_to_the_host_and_written_to_another_block():
    pool = random_pool(make_spec())
    before = [[np.array(x) for x in group] for group in pool.states]  # copies: a view would hold the donated buffer
    states = pool.read_block(0, 3)
    assert all(isinstance(x, np.ndarray) for x in states)
    for state, array in zip(states, before[0], strict=True):
        np.testing.assert_array_equal(state, array[:, 3])
    given = pool.states[0]
    after = pool.write_block(0, 5, states)
    assert all(x.is_deleted() for x in given)
    for array, was in zip(after.states[0], before[0], strict=True):
        np.testing.assert_array_equal(array[:, 5], was[:, 3])
        np.testing.assert_array_equal(np.delete(array, 5, 1), np.delete(was, 5, 1))
    assert after.states[1] is pool.states[1]


def test_missing_blocks_and_wrong_states_are_refused():
    pool = random_pool(make_spec())
    states = pool.read_block(1, 8)
    for block in (-1, 0, 9):
        with raises(f"StatePool.read_block: block must be in [1, 9), got {block}"):
            pool.read_block(1, block)
        with raises(f"StatePool.write_block: block must be in [1, 9), got {block}"):
            pool.write_block(1, block, states)
    with raises("StatePool.read_block: group must be in [0, 2), got 2"):
        pool.read_block(2, 1)
    with raises("StatePool.write_block: states must be 2 arrays, got 1"):
        pool.write_block(0, 1, states)
    with raises("StatePool.write_block: states must be float32[2, 2, 4, 8], got float32[2, 4, 8]"):
        pool.write_block(1, 1, [states[0][0]])
    with raises("StatePool.write_block: states must be float32[2, 2, 4, 8], got float64[2, 2, 4, 8]"):
        pool.write_block(1, 1, [states[0].astype(np.float64)])
    assert not pool.states[1][0].is_deleted()


# 64-bit mode.


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_stays_int32_in_64_bit_mode(rng, policy):
    with jax.enable_x64(True):
        align = make_spec(policy=policy)
        state, tables = AlignState.create(align), BlockTables.create(align)
        entries = [(g, 1, c, 1 + c) for g, c in itertools.product(range(2), range(4))]
        tables = update_block_tables(tables, TableUpdates.from_host(align, 8, entries))
        state = add_requests(state, Additions.from_host(align, 2, [1], [4]))
        batch = StepBatch.from_host(align, 2, [1], [0, 3], [2])
        step, indices = begin_step(align, state, batch, tables)
        pool = StatePool.create(align, 8)
        for num_sampled in (2, None, jnp.array([2, 0], jnp.int32)):
            after, same = finish_step(align, step, migrate(align, pool, indices), batch, indices, num_sampled, tables)
            integers = jax.tree.leaves((tables, state, batch, step, indices, after))
            assert {x.dtype.name for x in integers} == {"int32", "bool"}
            assert {x.dtype.name for x in jax.tree.leaves(same)} == {"float32"}
