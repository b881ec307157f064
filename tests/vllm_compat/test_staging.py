"""Plans and step inputs on their way to the device: what is copied, and that the host may reuse its buffers at once."""

import jax
import jax.numpy as jnp
import numpy as np
from vllm_compat.rows import Batch, Scheduled, make_spec, raises

from mamba_align_jax import BlockTables, StatePool
from mamba_align_jax.vllm_compat.mamba_utils import HostCopyPlan, postprocess_mamba
from mamba_align_jax.vllm_compat.staging import (
    AcceptedTokens,
    do_mamba_copy_block,
    postprocess_mamba_align_gpu,
    stage_postprocess_inputs_to_gpu,
)


def test_a_plan_copies_the_planned_blocks_and_no_others():
    align = make_spec(4, 2)
    batch, state_idx, sampled = a_step(align)
    pool = random_pool(align, 64)
    before = as_numpy(pool)
    assert do_mamba_copy_block(align, pool, HostCopyPlan.empty(align)) is pool
    plan, accepted = postprocess_mamba(align, batch, state_idx, sampled)
    np.testing.assert_array_equal(accepted, [2, 1])
    moved = do_mamba_copy_block(align, pool, plan)
    # 'a': the state one token into the window at column 2 goes to column 1. 'b': the state two tokens into the window
    # at column 1 goes to column 1 itself.
    for g, (conv, recurrent) in enumerate(zip(before[::2], before[1::2], strict=True)):
        for r, (source, target, offset) in enumerate([(2, 1, 1), (1, 1, 2)]):
            row = batch.block_rows[g, r]
            recurrent[:, row[target]] = recurrent[:, row[source + offset]]
            window = conv[:, row[source], offset:].copy()
            conv[:, row[target], : window.shape[1]] = window
    for wanted, got in zip(before, as_numpy(moved), strict=True):
        np.testing.assert_array_equal(wanted, got)

    # The same copies, planned on the device, with the slots in another order than the rows.
    tables = BlockTables(blocks=jnp.array(batch.block_rows[:, ::-1]))
    inputs = stage_postprocess_inputs_to_gpu(batch, state_idx, 4)
    num_sampled = jnp.array([2, 3, 9, 9], jnp.int32)
    slots = jnp.array([1, 0, -1, -1], jnp.int32)
    pool, counts = postprocess_mamba_align_gpu(align, random_pool(align, 64), inputs, num_sampled, tables, slots)
    assert jax.tree.all(jax.tree.map(np.array_equal, pool, moved))
    np.testing.assert_array_equal(counts, [2, 1, 0, 0])


def test_staged_inputs_do_not_change_when_the_host_reuses_its_buffers():
    align, n = make_spec(4, 2, max_num_seqs=64), 64
    ids, computed = [f"r{i}" for i in range(n)], np.arange(n) % 5 + 3
    counts = [aligned(x) for x in (computed, np.full(n, 3), np.full(n, 2))]
    batch = Batch(ids, *counts, np.ones((2, n, align.num_columns), np.int32))
    state_idx = {req_id: i for i, req_id in enumerate(ids)}
    first = stage_postprocess_inputs_to_gpu(batch, state_idx, n)
    wanted = [list(range(n)), *(x.tolist() for x in (counts[1], counts[0], counts[2]))]
    # The host prepares the next step in the same buffers right after it dispatched this one.
    for array in counts:
        array[:] = 7
    state_idx.update(dict.fromkeys(ids, 9))
    later = [stage_postprocess_inputs_to_gpu(batch, state_idx, n) for _ in range(16)]
    got = [first.state_idx, first.num_scheduled_tokens, first.num_computed_tokens, first.num_draft_tokens]
    assert [x.tolist() for x in got] == wanted
    assert all((later[-1].state_idx == 9).tolist())


def test_the_cpu_backend_borrows_aligned_numpy_memory():
    values = aligned(np.arange(64))
    borrowed = jax.device_put(values)
    values[:] = -1
    assert jax.default_backend() != "cpu" or (np.asarray(borrowed) == -1).all()


def test_a_plan_may_be_changed_right_after_its_dispatch():
    align = make_spec(4, 2)
    batch, state_idx, sampled = a_step(align)
    plan, _ = postprocess_mamba(align, batch, state_idx, sampled)
    wanted = as_numpy(do_mamba_copy_block(align, late(random_pool(align, 64)), plan))
    plan = HostCopyPlan(*map(aligned, plan))
    # The copies run only after the slow step that makes the pool.
    moved = do_mamba_copy_block(align, late(random_pool(align, 64)), plan)
    for array in plan:
        array[...] = 1
    assert all(map(np.array_equal, wanted, as_numpy(moved)))


def test_accepted_counts_are_fetched_early_and_follow_their_requests():
    class Arriving:
        """A device's array, which must not be waited for before it is needed."""

        shape = (4,)
        asked = waited = False

        def copy_to_host_async(self):
            self.asked = True

        def __array__(self, dtype=None, copy=None):
            self.waited = True
            return np.array([2, 3, 0, 9], np.int32)

    counts, arriving = AcceptedTokens(), Arriving()
    counts.expect(["a", "b", "c"], np.array([4, 4, 4]))
    counts.expect(["a", "b", "c"], arriving)
    assert (arriving.asked, arriving.waited) == (True, False)
    # 'c' had no tokens, and 'd' is new. After that 'a' is absent, 'b' is resumed, and 'c' has finished and its id
    # returns.
    assert counts.reorder(Scheduled(), ["c", "d", "a", "b"]).tolist() == [4, 1, 2, 3]
    assert counts.reorder(Scheduled(["c"], None, ["b"]), ["b", "c"]).tolist() == [1, 1]
    assert counts.reorder(Scheduled(), ["a", "b"]).tolist() == [2, 1]
    buffer = np.array([2, 2])
    counts.expect(["a", "b"], buffer)
    buffer[:] = 3
    assert counts.reorder(Scheduled(), ["b", "a"]).tolist() == [2, 2]
    with raises("AcceptedTokens: counts must have at least 3 rows, got 2"):
        counts.expect(["a", "b", "c"], buffer)


# What the tests use.


def random_pool(align, blocks):
    rng = np.random.default_rng(0)
    # Copied, because JAX cannot donate memory that it borrows from NumPy.
    return jax.tree.map(
        lambda x: jnp.array(rng.normal(size=x.shape), x.dtype, copy=True), StatePool.create(align, blocks)
    )


def as_numpy(pool):
    return [np.array(x) for x in jax.tree.leaves(pool)]


def a_step(align):
    """Makes a step in which both rows save a boundary: 'a' in its second column, 'b' in its running column."""
    rows = np.arange(1, 1 + 2 * align.num_columns, dtype=np.int32).reshape(1, 2, -1)
    batch = Batch(["a", "b"], [6, 5], [3, 3], [2, 2], np.concatenate([rows, 60 - rows]))
    return batch, {"a": 2, "b": 1}, np.array([2, 3], np.int32)


def aligned(values):
    """Makes a NumPy array that `jax.device_put` borrows on a CPU."""
    values = np.asarray(values, np.int32)
    raw = np.zeros(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    array = raw[start : start + values.nbytes].view(np.int32).reshape(values.shape)
    array[...] = values
    return array


@jax.jit
def late(tree):
    """Returns the same arrays about a tenth of a second later."""
    busy = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), jnp.full((256, 256), 0.1))
    return jax.tree.map(lambda x: x + 0 * busy[0, 0], tree)
