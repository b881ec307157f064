"""The benchmark of a step's layers writes its own blocks, counts the bytes that move, and times a step."""

import dataclasses
import functools
import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import (
    bookkeeping,
    pipeline,
)

HOW = ["xla", pytest.param("triton", marks=pytest.mark.gpu)]
STEPS = [("none", 2), ("copy_free", 0), ("copy_free", 2), ("pre_copy", 2)]
WRITES_EACH = [policy for policy in pipeline.POLICIES if policy != "deferred"]
CROSSES = np.array([True, False, True])


def step_case(policy, drafts, block_size=16):
    return pipeline.Case(policy, 3, drafts, block_size, layers=1, key_heads=2, value_heads=2, dim=16)


@functools.cache
def one_step(policy, drafts, implementation):
    """Returns the buffers before and after a step in which the first and third row cross, and the step's outputs."""
    case = step_case(policy, drafts)
    inputs, buffers = pipeline.make_inputs(case, 0, CROSSES), pipeline.make_buffers(case)
    before = jax.device_get(buffers)
    compiled = pipeline.trace(case, implementation).lower().compile()
    steps = pipeline.Steps(compiled, buffers, pipeline.make_tokens(case))
    out = np.asarray(steps.run([inputs]), np.float32)
    return before, jax.device_get(steps.buffers), out


class TestPipeline:
    @pytest.fixture(autouse=True)
    def few_slots(self, monkeypatch):
        monkeypatch.setattr(pipeline, "ROTATION_BYTES", 1 << 17)

    @pytest.mark.parametrize("implementation", HOW)
    @pytest.mark.parametrize(("policy", "drafts"), STEPS)
    def test_a_step_advances_the_counts_and_writes_only_its_blocks(self, policy, drafts, implementation):
        before, after, _ = one_step(policy, drafts, implementation)
        computed, blocks = np.where(CROSSES, 16 - (1 + drafts) // 2, 8) + 1 + drafts, before.tables.blocks[0]
        running = (policy != "none") * (computed - 1) // 16
        assert after.state.num_computed_tokens[:3].tolist() == computed.tolist()
        assert after.state.running_column[:3].tolist() == running.tolist()
        # With drafts, a row that crosses a boundary saves it to the column before its running column.
        window = {int(blocks[row, column]) for row, column in enumerate(running)}
        window |= {int(blocks[row, column - 1]) for row, column in enumerate(running) if drafts and column}
        recurrent = window | {int(blocks[row, running[row] + token]) for row in range(3) for token in range(1 + drafts)}
        for old, new, written in zip(before.pool.states[0], after.pool.states[0], (window, recurrent), strict=True):
            assert set(np.flatnonzero((old != new).reshape(old.shape[1], -1).any(axis=1)).tolist()) == written

    @pytest.mark.parametrize("implementation", HOW)
    def test_both_policies_compute_the_same_outputs(self, implementation):
        *_, wanted = one_step("copy_free", 2, implementation)
        *_, out = one_step("pre_copy", 2, implementation)
        np.testing.assert_array_equal(out, wanted)
        assert np.ptp(wanted) > 0

    @pytest.mark.parametrize("drafts", [0, 3])
    @pytest.mark.parametrize("policy", WRITES_EACH)
    def test_a_cycle_has_its_share_of_crossing_rows_and_counts_the_bytes_that_move(self, policy, drafts):
        case = step_case(policy, drafts)
        buffers, slots = pipeline.make_buffers(case), case.align.max_num_seqs
        state, window_row = 2 * 16 * 16 * 4, 6 * 16 * 2
        assert slots // 3 * case.align.bytes_per_block * 3 >= 1 << 17
        assert case.shares == ((0,) if policy == "none" else (0, Fraction(1, 16), 1))
        for share in case.shares:
            cycle = pipeline.make_cycle(case, share)
            rows = [(np.asarray(each.additions.slot), np.asarray(each.additions.num_computed_tokens)) for each in cycle]
            assert {int(slot) for each, _ in rows for slot in each} == set(range(slots))
            assert all(set(a) != set(b) for (a, _), (b, _) in itertools.pairwise(rows))
            crossing = sum(((computed - 1) // 16 < (computed + drafts) // 16).sum() for _, computed in rows)
            assert crossing == share * 3 * len(cycle)
            copies = share * 3 * ((policy == "pre_copy") + (policy != "none" and drafts > 0))
            assert pipeline.moved_bytes(case, buffers.state, buffers.tables, cycle) == {
                "state_bytes": 3 * ((2 + drafts) * state + (3 + 2 + 1 + drafts) * window_row),
                "copied_bytes": 2 * copies * (state + (3 + drafts) * window_row),
            }

    @pytest.mark.parametrize("implementation", HOW)
    @pytest.mark.parametrize("drafts", [0, 3])
    def test_deferred_states_compute_the_outputs_of_states_that_are_written(self, drafts, implementation):
        """The blocks of all columns hold the same state and the same rows of a window, so any place may be read."""
        outs = []
        for policy in ("copy_free", "deferred"):
            case = step_case(policy, drafts, 64)
            buffers, inputs = pipeline.make_buffers(case), pipeline.make_inputs(case, 0, CROSSES)
            pool = jax.tree.map(lambda x: jnp.broadcast_to(x[:, 1:2], x.shape) + 0, buffers.pool.states)
            conv, recurrent = pool[0]
            pool = ((jnp.broadcast_to(conv[:, :, :1], conv.shape) + 0, recurrent),)
            rings = jax.tree.map(jnp.zeros_like, buffers.pool.rings)
            buffers = buffers._replace(pool=dataclasses.replace(buffers.pool, states=pool, rings=rings))
            compiled = pipeline.trace(case, implementation).lower().compile()
            steps = pipeline.Steps(compiled, buffers, pipeline.make_tokens(case))
            outs.append(np.asarray(steps.run([inputs]), np.float32))
        assert np.ptp(outs[0]) > 0
        np.testing.assert_allclose(*outs, rtol=0, atol=1e-2 * np.abs(outs[0]).max())

    @pytest.mark.parametrize("drafts", [0, 3])
    def test_rows_of_deferred_states_are_in_all_phases_and_their_bytes_are_counted(self, drafts):
        case, T = step_case("deferred", drafts, 64), 1 + drafts
        buffers = pipeline.make_buffers(case)
        state, window_row, entry = 2 * 16 * 16 * 4, 6 * 16 * 2, 2 * 16 * 2 + 2 * 16 * 4 + 2 * 4
        for share in case.shares:
            cycle = pipeline.make_cycle(case, share)
            position = np.concatenate([each.additions.num_computed_tokens for each in cycle])
            back = position - np.concatenate([each.base for each in cycle])
            crosses = (position - back) // 64 < position // 64
            assert crosses.sum() == share * len(position)
            if share == 0:
                assert set(back.tolist()) == set(range(T, 17, T))
            moved = len(position) * state + (back >= 16).sum() * state + (back + T).sum() * entry
            moved += len(position) * (2 * 4 - 2 + drafts) * window_row
            moved += crosses.sum() * (drafts > 0) * 2 * 3 * window_row
            counted = pipeline.moved_bytes(case, buffers.state, buffers.tables, cycle)
            assert counted == {
                "state_bytes": pytest.approx(moved / len(cycle)),
                "copied_bytes": 0.0,
            }

    @pytest.mark.gpu
    @pytest.mark.parametrize("drafts", [0, 3])
    @pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
    def test_bookkeeping_copies_nothing(self, policy, drafts):
        """A copy of a few numbers is a launch as well. XLA's CPU compiler makes some in any case, so this needs a GPU."""
        books = bookkeeping.Bookkeeping(policy, drafts, 1)
        text = books.programs()[0].lower(*books.arguments()).compile().as_text()
        assert " copy(" not in text
        assert "copy-start(" not in text

    def test_a_row_of_a_step_has_times_per_step(self, monkeypatch):
        case, calls, spans = step_case("pre_copy", 0), [], []
        run = lambda buffers, inputs, tokens: (buffers, jnp.asarray(calls.append(inputs) or 0.0))
        steps = pipeline.Steps(run, pipeline.make_buffers(case), {})

        def kernel_times(launch):
            calls.clear()
            launch()
            return [("a", 1.0), ("b", 2.0)] * len(calls)

        monkeypatch.setattr(pipeline, "kernel_times", kernel_times)
        monkeypatch.setattr(pipeline, "span_per_turn", lambda *arguments: spans.append(arguments) or 8.0)
        row = pipeline.measure(case, steps, Fraction(1, 16))
        wanted = dict(us=3.0, kernels=2, span_us=8.0, rows=3, drafts=0, crossing="1/16", policy="pre_copy")
        assert {name: row[name] for name in wanted} == wanted
        ((launch, rounds, turns),) = spans
        calls.clear()
        launch(2)
        assert len(calls) == 2 * turns
        assert rounds * turns * 3.0 >= pipeline.SPAN_US
        with pytest.raises(RuntimeError, match="must divide into 2 steps, got 5 launches"):
            pipeline.kernels_per_step("a", range(5), 2)

    def test_bookkeeping_time_is_the_sum_of_its_kernels_and_does_not_depend_on_layers(self, monkeypatch):
        few, many = (bookkeeping.Bookkeeping("pre_copy", 3, layers, slots=8, groups=2) for layers in (1, 60))
        monkeypatch.setattr(
            bookkeeping, "kernel_times", lambda launch: launch() or [("a", 1.0), ("b", 2.0)] * pipeline.STEPS
        )
        monkeypatch.setattr(bookkeeping, "span_per_turn", lambda launch, rounds, turns: launch(2) or 9.0)
        row = few.measure()
        wanted = dict(us=3.0, kernels=2, span_us=9.0, slots=8, groups=2, layers=1, each=[("a", 1.0), ("b", 2.0)])
        assert {name: row[name] for name in wanted} == wanted
        (begin, finish), (begin_many, finish_many) = few.programs(), many.programs()
        state, batch, tables = given = few.arguments()
        assert begin.lower(*given).as_text() == begin_many.lower(*given).as_text()
        given = state, batch, jax.eval_shape(begin, *given)[1], jnp.ones(8, jnp.int32), tables
        assert finish.lower(*given).as_text() == finish_many.lower(*given).as_text()
