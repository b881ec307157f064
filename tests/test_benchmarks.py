"""Tests of the benchmarks: what they run, what they count, and what they print. Times need a GPU."""

import contextlib
import dataclasses
import functools
import itertools
import json
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracles import ops as oracles

from benchmarks import (
    all_reduce,
    attention,
    bookkeeping,
    chains,
    drawing,
    experts,
    kernel_benchmark,
    kernels,
    memory,
    model,
    model_floor,
    pipeline,
    plot,
    precision,
    prefill,
    reference,
    rotary,
    scripted,
    timing,
    tune,
)
from benchmarks.cases import options_parser, run_cases
from benchmarks.kernels import OPS
from benchmarks.report import machines, read_rows, table, tables
from mamba_align_jax import models
from mamba_align_jax.layers.linear import Linear
from pallas_kernels.causal_conv1d import cases as causal_conv1d_cases
from pallas_kernels.gated_delta_rule import cases as gated_delta_rule_cases
from pallas_kernels.least_kept.cases import CASES as DRAWING_CASES
from pallas_kernels.mixture_of_experts.cases import Case as ExpertsCase
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from pallas_kernels.product_chain import product_chain
from pallas_kernels.product_chain.cases import Case as ChainCase
from pallas_kernels.product_chain.cases import Mixture
from pallas_kernels.rotary.cases import CASES as ROTARY_CASES
from pallas_kernels.state_copy.config import Config as CopyConfig

SMALL = {
    "state_copy": dict(layers=2, states=(((3, 64), "bfloat16"), ((2, 8, 16), "float32"))),
    "causal_conv1d_update": dict(channels=64),
    "causal_conv1d_prefill": dict(channels=64),
    "gated_delta_rule_update": dict(key_heads=2, value_heads=2, key_dim=16, value_dim=16),
    "gated_delta_rule_prefill": dict(key_heads=2, key_dim=16, value_dim=32),
    "selective_state_update": dict(head_dim=16, groups=1, state_dim=16),
    "ssd": dict(heads=4, head_dim=16, groups=2, state_dim=16),
    "selective_scan": dict(head_dim=128, state_dim=16),
}
RESULTS = sorted((Path(__file__).parents[1] / "benchmarks" / "results").glob("*.jsonl"))
CASES = [(op, case) for op, (cases, _) in OPS.items() for case in cases]
KINDS = {case.name.split()[0]: (op, case) for op, case in reversed(CASES)}.values()


def small(op, case, **fields):
    if hasattr(case, "lengths"):
        fields = dict(lengths=tuple(min(length, 70) for length in case.lengths[:8])) | fields
    if op == "gated_delta_rule_prefill":
        fields |= dict(value_heads=2 if case.kda else 4)
    return dataclasses.replace(case, **SMALL[op], **fields)


UPDATES = [(op, case) for op, case in KINDS if op not in prefill.OPS]


@pytest.mark.parametrize(("op", "case"), UPDATES, ids=lambda x: x if isinstance(x, str) else x.name)
def test_every_kind_of_benchmark_runs_and_rotates_through_its_blocks(op, case, monkeypatch):
    monkeypatch.setattr(kernel_benchmark, "ROTATION_BYTES", 1 << 19)
    benchmark = OPS[op][1](small(op, case))
    result = jax.jit(lambda inputs: benchmark.run(2, inputs, implementation="xla"))(benchmark.inputs)
    assert [x.shape for x in result] == [x.shape for x in benchmark.initial()]
    assert float(benchmark.error(implementation="xla")) == 0.0
    blocks = benchmark.given["read" if "read" in benchmark.given else "write"]
    assert blocks.min() > 0
    assert len(blocks) * benchmark.bytes >= 1 << 19 or op == "state_copy"


PREFILL = [
    (op, case) for op, case in CASES if op in prefill.OPS and ((op, case) in KINDS or case.name.endswith("olmo"))
]


@pytest.mark.parametrize(("op", "case"), PREFILL, ids=lambda x: x if isinstance(x, str) else x.name)
def test_prefill_agrees_with_float64_and_returns_the_outputs_of_every_turn(op, case, monkeypatch):
    case = small(op, case, dtype="float32", lengths=(1, 70, 0, 130))
    monkeypatch.setattr(kernel_benchmark, "ROTATION_BYTES", 2 * prefill.OPS[op][1](case).bytes)
    benchmark = prefill.OPS[op][1](case)
    pool, out = benchmark.first_turn(implementation="xla")
    assert benchmark.rms_error(out) < 1e-5
    assert benchmark.rms_error(2 * out) == pytest.approx(1, rel=1e-4)
    # Errors are measured over the longest row, which is not the first one.
    assert benchmark.part[0] == slice(71, 201)
    # Every turn has outputs of its own. Rows without tokens are not given to a peer.
    sets = len(benchmark.given["write"])
    assert sets == 2
    after, *outputs = benchmark.run_sets(1, benchmark.inputs, implementation="xla")
    assert len(outputs) == sets
    assert benchmark.rms_error(outputs[0]) < 1e-5
    written = benchmark.given["write"][0]
    np.testing.assert_array_equal(after[0, written], pool[0, written])
    assert benchmark.given["query_start_loc"].tolist() == [0, 1, 71, 201]


def test_the_compiler_does_not_merge_turns():
    """What depends only on the inputs is computed again in every turn, in a loop and unrolled."""
    case = small("gated_delta_rule_prefill", gated_delta_rule_cases.PREFILL_CASES[0])
    benchmark = prefill.delta_rule_benchmark(case)
    work = lambda turn, carry, x: (carry[0] + 1, jnp.sin(x))
    benchmark = dataclasses.replace(
        benchmark, step=work, draw=lambda: dict(x=jnp.ones(3)), initial=lambda: (jnp.zeros(3), jnp.zeros(3))
    )
    for run, wanted in ((benchmark.run, 1), (benchmark.run_sets, benchmark.span_sets)):
        lowered = jax.jit(lambda inputs, run=run: run(4, inputs)).lower(benchmark.inputs)
        body = lowered.as_text().split("while")[1]
        assert body.count("optimization_barrier") == body.count("stablehlo.sine") == wanted


def test_bytes_equal_the_formulas():
    def bytes_of(name):
        op, case = next((op, case) for op, case in CASES if case.name == name)
        return OPS[op][1](case).bytes

    state = 32 * 128 * 128 * 4
    # A state is read and one is written. Inputs are 2 * 16 * 128 + 32 * 128 and two gates per head, outputs 32 * 128, all
    # of them bfloat16.
    assert bytes_of("gdn_decode float32 1") == 2 * state + 2 * (8192 + 64 + 4096)
    # Each row writes three states.
    assert bytes_of("gdn_verify float32 8") == 8 * (4 * state + 3 * 2 * (8192 + 64 + 4096))
    # A window of three rows and a token are read and written, and the taps are read.
    assert bytes_of("conv_update 8") == 8 * 8 * 8192 * 2 + 4 * 8192 * 2
    assert bytes_of("state_copy idle 64") == 0
    assert bytes_of("state_copy 8") == 8 * 2 * 30 * (state + 3 * 8192 * 2)
    # Each head has two float32 gates per token.
    assert bytes_of("gdn_prefill 1x8192") == 2 * state + 8192 * (2 * (8192 + 4096) + 4 * 64)
    # Each key channel has a gate, and there are as many key heads as value heads.
    assert bytes_of("kda_prefill 1x8192") == 2 * state + 8192 * (2 * 4 * 4096 + 4 * (32 * 128 + 32))
    # The row without tokens moves nothing.
    assert bytes_of("gdn_prefill olmo") == 8 * 30 * 96 * 192 * 4 + 894 * (2 * 2 * 30 * (96 + 192) + 4 * 60)
    assert bytes_of("conv_prefill ragged") == 2 * 8192 * (4 * 6 + 2 * 894 + 4)


def test_bytes_of_state_space_prefill_equal_the_formulas():
    def bytes_of(op, name):
        cases, make = prefill.OPS[op]
        return make(next(case for case in cases if case.name == name)).bytes

    assert bytes_of("ssd", "ssd_prefill 4x2048") == (
        8 * 128 * 64 * 128 * 4 + 8192 * 2 * (2 * 8192 + 128 + 2 * 1024) + 4 * 128
    )
    assert bytes_of("selective_scan", "selective_scan 4x2048") == (
        8 * 8192 * 16 * 4 + 8192 * 2 * (3 * 8192 + 32) + 4 * 8192 * 16
    )


class FakeTensor(SimpleNamespace):
    def contiguous(self):
        return self.array


def test_the_fastest_peer_that_agrees_is_reported(monkeypatch, capsys):
    nothing = lambda *_, **__: contextlib.nullcontext()
    cuda = SimpleNamespace(synchronize=nothing, graph=nothing, CUDAGraph=lambda: SimpleNamespace(replay=nothing))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(kernel_benchmark, "ROTATION_BYTES", 1 << 16)
    monkeypatch.setattr(kernels, "MIN_SPAN_US", 40)
    case = small("causal_conv1d_prefill", causal_conv1d_cases.PREFILL_CASES[-1], lengths=(3, 0, 40), dtype="float32")
    benchmark = prefill.conv_benchmark(case)
    step = lambda *arguments, implementation, **inputs: benchmark.step(*arguments, implementation="xla", **inputs)
    ours = dataclasses.replace(benchmark, step=step)
    pool, out = benchmark.first_turn(implementation="xla")
    states = pool[0, benchmark.given["write"][0]]
    of = lambda *arrays: lambda benchmark, pools: lambda turn: tuple(FakeTensor(array=array) for array in arrays)
    found = dict(slow=of(states, out), wrong=of(states, out + 1), stateless=of(states + 1, out), fast=of(states, out))
    found |= dict(broken=of(states, "no tensor"))
    monkeypatch.setattr(kernels.peers, "find", lambda benchmark: found)
    times = itertools.cycle((5.0, 9.0, 7.0))
    monkeypatch.setattr(kernels, "time_per_turn", lambda *arguments: next(times))
    monkeypatch.setattr(kernels, "span_per_turn", lambda launch, rounds, turns: (launch(rounds), 8.0)[1])
    row = kernels.measure(ours)
    wanted = dict(us=5, span_us=8, peer="fast", peer_us=7, peer_span_us=8, other_peers={"slow": 9})
    assert {name: row[name] for name in wanted} == wanted
    assert row["rms_error"] == pytest.approx(row["peer_rms_error"])
    assert row["rms_error"] < 1e-5
    refused = [line.split()[2] for line in capsys.readouterr().out.splitlines()]
    assert refused == ["wrong", "stateless", "broken"]


def test_a_peer_in_jax_needs_no_torch(monkeypatch):
    """Its states may be the other way round. A CUDA graph, and so a span, exist only for torch."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(kernel_benchmark, "ROTATION_BYTES", 1 << 16)
    case = small("causal_conv1d_prefill", causal_conv1d_cases.PREFILL_CASES[-1], lengths=(3, 0, 40), dtype="float32")
    benchmark = prefill.conv_benchmark(case)
    step = lambda *arguments, implementation, **inputs: benchmark.step(*arguments, implementation="xla", **inputs)
    pool, out = benchmark.first_turn(implementation="xla")
    states = kernels.peers.Transposed(pool[0, benchmark.given["write"][0]].swapaxes(-1, -2))
    adapter = lambda benchmark, pools: lambda turn: (states, out)
    peer = kernels.Peer("jla", adapter, dataclasses.replace(benchmark, step=step))
    assert peer.error == 0.0
    peer.turns(2)
    assert peer.span(5.0) is None


class TestReference:
    rng = np.random.default_rng(0)

    def test_conv(self):
        x, history, weight = (self.rng.normal(size=(n, 5)) for n in (7, 3, 4))
        wanted, _ = oracles.causal_conv1d(x, history, weight, None, silu=True)
        np.testing.assert_allclose(reference.causal_conv1d(x, history, weight), wanted, rtol=1e-12)

    @pytest.mark.parametrize("gates", [(4,), (4, 6)])
    def test_delta_rule(self, gates):
        normal = lambda *shape: self.rng.normal(size=shape)
        tokens = normal(5, 2, 6), normal(5, 2, 6), normal(5, 4, 3), -np.abs(normal(5, *gates)), np.abs(normal(5, 4))
        state = normal(4, 3, 6)
        wanted, _ = oracles.gated_delta_rule(*tokens, state, 6**-0.5)
        np.testing.assert_allclose(reference.gated_delta_rule(*tokens, state), wanted, rtol=1e-12)

    @pytest.mark.parametrize("gated", [False, True])
    @pytest.mark.parametrize(("per", "of_a"), [((4,), (4,)), ((4, 3), (4, 3, 6))])
    def test_state_space(self, per, of_a, gated):
        normal = lambda *shape: self.rng.normal(size=shape)
        operands = normal(5, 4, 3), normal(5, *per), -np.abs(normal(*of_a)), normal(5, 2, 6), normal(5, 2, 6)
        options = dict(state=normal(4, 3, 6), D=normal(*per), dt_bias=normal(*per))
        options |= dict(z=normal(5, 4, 3)) if gated else {}
        wanted, _ = oracles.selective_state_update(*operands, **options)
        np.testing.assert_allclose(reference.state_space(*operands, **options), wanted, rtol=1e-12)


def test_a_sweep_has_every_combination_of_settings():
    configs = tune.sweep(CopyConfig, num_warps=(4,), tile=(1, 2), programs=(3, 5))
    assert [dataclasses.astuple(config) for config in configs] == [(1, 3, 4), (1, 5, 4), (2, 3, 4), (2, 5, 4)]


def test_configurations_that_compile_are_timed_and_the_fastest_comes_first(monkeypatch, capsys):
    def time_ours(benchmark, *, implementation, config):
        assert (benchmark, implementation) == ("a case", "triton")
        if config == 7:
            raise jax.errors.JaxRuntimeError("too much shared memory\nand more")
        return lambda: float(config or 5)

    monkeypatch.setattr(tune, "time_ours", time_ours)
    assert tune.time_each("a case", [None, 9, 7, 2]) == [(2.0, 2), (5.0, None), (9.0, 9)]
    assert capsys.readouterr().out == "7: too much shared memory\n"


def test_the_span_of_a_turn_is_the_difference_of_two_runs(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def launch(rounds):
        clock[0] += 1.0 + 3e-5 * rounds

    assert timing.span_per_turn(launch, rounds=10, turns=3) == pytest.approx(10.0)


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
        buffers, slots = pipeline.make_buffers(case), case.spec.max_num_seqs
        state, window_row = 2 * 16 * 16 * 4, 6 * 16 * 2
        assert slots // 3 * case.spec.bytes_per_block * 3 >= 1 << 17
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


def test_precision_measures_every_architecture():
    assert {models.ARCHITECTURES[name] for name in precision.MODELS} == set(models.ARCHITECTURES.values())
    for name in precision.MODELS:
        model = nnx.eval_shape(
            lambda name=name, make=models.ARCHITECTURES[name].Model: make(precision.configuration(name), nnx.Rngs(0))
        )
        assert model.state_groups()


@pytest.mark.deep
def test_precision_sees_only_rounding_and_names_ops_without_a_kernel(tmp_path, monkeypatch, capsys):
    """Errors have the size of rounding. Decode steps continue from the states of the prompts."""
    monkeypatch.setitem(precision.MODELS, "mamba2", dict(num_heads=2, head_dim=16, n_groups=1, state_size=256))
    monkeypatch.setattr(precision, "_SIZES", dict(vocab_size=64, hidden_size=32, num_hidden_layers=1))
    compiled, compile_ = [], precision.Pass.compile
    monkeypatch.setattr(precision.Pass, "compile", lambda run: (compiled.append(run), compile_(run))[1])
    file = tmp_path / "precision.jsonl"
    options = ["--model=mamba2", "--prompt=21", "--decode=3", f"--json={file}", "--commit=abc"]
    (row,) = precision.main(options)
    assert json.loads(file.read_text()) == row
    assert (row["model"], row["tokens"], row["commit"]) == ("mamba2", 4 * 24, "abc")
    assert 1e-4 < row["rms_error"] < 0.03
    assert 0.8 < row["top1_agreement"] <= 1
    assert 0 <= row["largest_loss"] < 0.2
    squares = [row[f"{part}_rms_error"] ** 2 for part in ("prefill", "decode")]
    assert min(squares) < row["rms_error"] ** 2 < max(squares)
    assert row["ops_float32"] == [
        "causal_conv1d.prefill", "causal_conv1d.update", "rms_norm.add_rms_norm", "selective_state_update.update",
        "ssd.prefill",
    ]  # fmt: skip
    # Four tiles of 64 x 256 float32 do not fit in a GPU's shared memory.
    assert (row["xla_ops_float32"], row["xla_ops_bfloat16"]) == (["ssd.prefill"], [])
    assert "without a kernel: ssd.prefill of float32" in capsys.readouterr().out
    assert "| - |" not in table(file).splitlines()[-1]
    *_, exact = compiled
    np.testing.assert_allclose(exact.run(), exact.run([3, 24]), atol=1e-5)


def test_tables_hold_the_newest_row_of_each_case(tmp_path):
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5)
    rows = [row, dict(case="b", us=3.0, bandwidth_fraction=0.01), row | dict(us=1.0, peer="p", peer_us=4.0, ratio=0.25)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(file).splitlines()[2:] == ["| a | 1.0 us | 0.50 | p 4.0 us | 0.25 |", "| b | 3.0 us | - | - | - |"]


def test_tables_name_a_gpu_that_is_not_the_usual_one(tmp_path):
    row, file = dict(case="a", us=2.0, bandwidth_fraction=0.5), tmp_path / "rows.jsonl"
    for gpu, name in (("NVIDIA H200", "a"), ("NVIDIA H100 80GB HBM3", "a, H100")):
        file.write_text(json.dumps(row | dict(gpu=gpu)) + "\n")
        assert table(file).splitlines()[2] == f"| {name} | 2.0 us | 0.50 | - | - |"


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_every_results_file_has_a_table(file):
    lines = table(file).splitlines()
    assert len(lines) > 2
    assert all(line.startswith("|") for line in lines if line)


def test_plot_groups_serving_rows_by_load_with_a_bar_for_each_mode():
    (file,) = (file for file in RESULTS if file.stem == "serving")
    loads = plot.bars(read_rows(file))
    assert {"none", "align/pre_copy", "align/copy_free"} == set(loads["prefix_repetition x64\nopen, no drafts"])
    assert all(row["mode"] == mode for load in loads.values() for mode, row in load.items())
    assert any("by prompt_lookup" in load for load in loads)


def test_spans_and_errors_have_a_table_with_only_the_rows_that_have_them(tmp_path):
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5)
    more = dict(case="b", span_us=3.5, rms_error=0.00234, peer_span_us=None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in (row, row | more)))
    assert table(file).splitlines()[-1] == "| b | 3.5 us | - | 2.3e-03 | - |"


def test_step_tables_compare_policies_side_by_side(tmp_path):
    step = dict(case="a", policy="none", rows=1, drafts=0, crossing="0", us=100.0, span_us=250.4, state_bytes=2e6)
    step |= dict(copied_bytes=0.0)
    other = dict(case="b", policy="pre_copy", crossing="1/8", us=200.0, copied_bytes=5e5)
    books = dict(case="c", policy="pre_copy", drafts=3, layers=1, groups=4, us=12.34, kernels=8)
    rows = [step | dict(us=1.0), step, step | other, step | other | dict(crossing="1"), step | dict(case="d", rows=8)]
    rows += [books, books | dict(case="e", layers=30, us=9.0)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert table(file).splitlines() == [
        "| policy | drafts | 1 layers | 30 layers |",
        "|---|---|---|---|",
        "| pre_copy | 3 | 12.3 us, 8 kernels | 9.0 us, 8 kernels |",
        "",
        "| rows | drafts | none | pre_copy 1/8 | pre_copy 1 |",
        "|---|---|---|---|---|",
        "| 1 | 0 | 100 / 250 us | 200 / 250 us | 200 / 250 us |",
        "| 8 | 0 | 100 / 250 us | - | - |",
        "",
        "| rows | drafts | none | pre_copy 1/8 | pre_copy 1 |",
        "|---|---|---|---|---|",
        "| 1 | 0 | 2.0 MB | 2.5 MB | 2.5 MB |",
        "| 8 | 0 | 2.0 MB | - | - |",
    ]


def test_tables_have_names_and_machines_are_listed_once():
    about = dict(gpu="NVIDIA H200", driver="580", jax="0.11.2", commit="abc", date="2026-11-20")
    row = dict(case="a", us=2.0, bandwidth_fraction=0.5) | about
    rows = [row, row | dict(case="b", span_us=3.0, date="2026-11-22"), row | dict(case="c", commit="def")]
    assert list(tables(rows)) == ["kernels", "kernel spans"]
    assert tables(rows)["kernels"].count("\n") == 1 + len(rows)
    assert machines(rows) == "- NVIDIA H200, driver 580, JAX 0.11.2, at abc, def, 2026-11-20 to 2026-11-22"
    assert machines([row, row | dict(driver="590")]) == "- NVIDIA H200, driver 590, JAX 0.11.2, at abc, 2026-11-20"


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("decode", (1, 1), (100, 20), heads=4, kv_heads=2, key_dim=32, page_size=16, max_model_len=128),
        AttentionCase(
            "prompt", (70, 5), (10, 3), None, heads=2, kv_heads=1, key_dim=48, value_dim=32, max_model_len=128
        ),
    ],
    ids=lambda case: case.name,
)
def test_attention_benchmark_compares_every_path_with_float32(case, monkeypatch):
    monkeypatch.setattr(attention, "ROTATION_BYTES", 1 << 16)
    paths = attention.candidates_of(case, tune=False)
    assert list(paths) == ["triton", "xla", "gather"]
    paths["triton"] = attention.candidates_of(case, tune=False, interpret=True)["triton"]
    for row in attention.measure(case, paths, time_it=False):
        assert 0 < row["rms_error"] < 4e-3
    # What is timed: calls on one layer after another.
    setup = attention.prepare(case)
    assert setup.layers > 1
    out = attention.compile_turns(setup, paths["xla"])
    assert not np.array_equal(np.asarray(out(1)), np.asarray(out(2)))


def test_attention_benchmark_names_every_configuration_that_it_tries():
    for case in attention.DECODE_CASES + attention.PROMPT_CASES:
        paths = attention.candidates_of(case, tune=True)
        assert len(paths) == 1 + len(attention.tuned(case))


def test_chain_benchmark_runs_every_chain_with_weights_of_its_own():
    chain = ChainCase("small", (256, "norm", ("gated", 512), 256, "norm", 64), 512, (32, 16, 16))
    case = chains.ChainOfTokens(chain, 3)
    drawn = [case.draw(seed) for seed in range(2)]
    found = chains.turn(drawn, parts=chain.parts, implementation="xla")
    alone = [product_chain(*each, parts=chain.parts, implementation="xla") for each in drawn]
    assert [chains.difference(out, wanted) for (out, _), (wanted, _) in zip(found, alone, strict=True)] == [0.0, 0.0]
    assert chains.difference(found[0][0], found[1][0]) > 1
    assert case.weight_bytes() == 2 * (256 * 512 + 1024 * 256 + 256 * 512 + 64 * 256)


def test_chain_benchmark_counts_the_chosen_experts():
    mixture = Mixture(routed=8, top_k=2, size=64, outputs=128)
    case = chains.ChainOfTokens(ChainCase("experts", ("norm", mixture, "norm"), 128), 1)
    assert case.weight_bytes() == 2 * (9 * 128 + 3 * (2 * 64 * 128 + 128 * 64))
    assert len({case.name for case in chains.CASES}) == len(chains.CASES)


@pytest.mark.parametrize("case", ROTARY_CASES[-2:], ids=lambda case: case.name)
def test_rotary_benchmark_compares_every_candidate_with_float64(case):
    candidates = dict(xla=dict(implementation="xla"), triton=dict(implementation="triton", interpret=True))
    rows = rotary.measure(case, candidates, rate=None)
    assert [row["candidate"] for row in rows] == list(candidates)
    for row in rows:
        assert "failed" not in row
        assert 0 < row["rms_error"] < (1e-6 if case.dtype == "float32" else 1e-3)


def test_drawing_benchmark_compares_every_candidate_with_sorting():
    candidates = dict(xla=dict(implementation="xla"), triton=dict(implementation="triton", interpret=True))
    rows = drawing.measure(DRAWING_CASES[-1], candidates, time_it=False)
    assert [row["candidate"] for row in rows] == list(candidates)
    for row in rows:
        assert "failed" not in row
        assert row["difference"] == 0
    weights = jnp.asarray([[1.0, 0.5, 0.25]])
    assert drawing.kept_difference(weights, jnp.asarray([0.25]), 0, 0.5) == 2  # it keeps three tokens instead of one


def test_drawing_benchmark_tries_configurations_of_every_large_case():
    assert min(len(drawing.tuned(case)) for case in DRAWING_CASES[:-1]) > 1


def test_rotary_benchmark_tries_configurations_of_every_case():
    assert min(len(rotary.tuned(case)) for case in ROTARY_CASES) > 1


@pytest.mark.parametrize("case", [
    ExpertsCase("few", 5, experts=6, top_k=2, hidden=64, size=32, dtype="float32"),
    ExpertsCase("many", 280, experts=6, top_k=2, hidden=48, size=24, activation="relu2"),
], ids=lambda case: case.name)  # fmt: skip
def test_experts_benchmark_compares_every_path_with_float32(case, monkeypatch):
    monkeypatch.setattr(experts, "TURNS", 2)
    paths = experts.candidates_of(case, tune=False)
    assert ("ragged_dot" in paths) == (case.name == "few")
    interpreted = experts.candidates_of(case, tune=False, interpret=True)
    paths |= {name: run for name, run in interpreted.items() if name.endswith("triton")}
    for row in experts.measure(case, paths, time_it=False):
        assert "failed" not in row
        assert row["error"] < (1e-5 if case.dtype == "float32" else 1e-2)
    wrong = {"wrong": lambda arguments: 1.1 * experts.call(case, arguments, implementation="xla")}
    (row,) = experts.measure(case, wrong, time_it=False)
    assert "above" in row["failed"]
    # The floor is that of the weights for few tokens, and of the operations for many.
    setup = experts.prepare(case)
    size, operations = case.hidden * (case.up_size + case.size), 2 * case.tokens * case.top_k
    assert setup.chosen == 6 or case.name == "few"
    few = 4 * size * setup.chosen / 4e6
    assert setup.floor_us(4e6) == pytest.approx(few if case.name == "few" else max(few / 2, size * operations / 790e6))


def test_experts_benchmark_names_every_configuration_that_it_tries():
    for case in experts.QWEN_CASES:
        assert len(experts.candidates_of(case, tune=True)) == 1 + len(experts.tuned(case))


def sizes_of_products(config):
    """The number of weights of every product of a model's layers, routed and shared experts not included."""
    shapes = nnx.eval_shape(lambda: models.qwen3_5.Model(config, nnx.Rngs(0)))
    found = nnx.iter_modules(shapes)
    return [module.weight.size for path, module in found if isinstance(module, Linear) and path[0] == "layers"]


def test_the_floor_of_a_model_counts_every_matrix():
    config = model.MODELS["qwen3.5-4b"]
    kernels = sizes_of_products(config)
    assert sum(inputs * outputs for inputs, outputs in model_floor.products(config)) == sum(kernels)
    floor = functools.partial(model_floor.floor_us, config, copy_rate=4e6)
    # One row reads all weights, its keys and values and its states; twice the rows read the weights once.
    row_bytes = 4096 * 8 * 2 * 4 * 256 * 2 + 2 * 24 * 32 * 128 * 128 * 4
    one, two = (floor(model_floor.Case("decode", rows, 4096)) for rows in (1, 2))
    np.testing.assert_allclose(one, (2 * (sum(kernels) + config.hidden_size * config.vocab_size) + row_bytes) / 4e6)
    np.testing.assert_allclose(two - one, row_bytes / 4e6)
    # A long prompt is bound by arithmetic, and its attention grows with the square of its length.
    attention_us = 2 * 8 * 16 * 256 * 4096**2 / model_floor.FLOPS_PER_US
    prompt, twice = (floor(model_floor.Case("prompt", 1, context)) for context in (4096, 8192))
    head = max(2 * config.hidden_size * config.vocab_size / 4e6, 0)
    np.testing.assert_allclose(twice - head, 2 * (prompt - head) + 2 * attention_us)


def test_the_floor_of_deferred_states_counts_folds_and_entries():
    case, config = model_floor.Case("verify", 64, 4096, drafts=3), model.MODELS["qwen3.5-4b"]
    floor = functools.partial(model_floor.floor_us, config, case, copy_rate=4e6)
    state = 24 * 32 * 128 * 128 * 4
    # Rows advance by 2.5 of their 4 tokens, read 8.5 entries each and write 4.
    ring = model_floor.Ring(fold_length=16, accepted=64 * 2.5, entry_bytes=1000.0)
    np.testing.assert_allclose(
        (floor() - floor(ring=ring)) * 4e6, 64 * 4 * state - 10 * state - 64 * (8.5 + 4) * 1000, rtol=1e-6
    )


def test_deferred_states_of_more_requests_fit_where_rows_have_drafts(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = memory.main(["--model", "qwen3.5-4b", "--drafts", "3", "--json", str(file)])
    assert read_rows(file) == rows
    fits = {(row["count"], row["policy"]): row["requests_that_fit"] for row in rows}
    for count, gain in (("reserved, synchronous", 2.1), ("reserved, asynchronous", 1.8), ("held", 2.5)):
        assert fits[count, "deferred"] >= gain * fits[count, "copy_free"]
    first, *_ = rows
    assert first["requests_that_fit"] * first["blocks"] * first["block_bytes"] <= 40e9
    # A verify row holds its running column and one for each draft.
    assert 4 <= memory.mean_held(memory.make_spec("tiny", "copy_free", 3, 512), tokens=2000) < 4.1


def test_the_floor_of_experts_counts_those_that_are_chosen():
    config = model.MODELS["qwen3.5-35b-a3b"]
    shapes = nnx.state(nnx.eval_shape(lambda: models.qwen3_5.Model(config, nnx.Rngs(0))))
    leaves = nnx.to_flat_state(shapes)
    kernels = sizes_of_products(config)
    # The shared expert of each layer, which all tokens have, is stored with the others.
    shared = 40 * 3 * 2048 * 512
    assert sum(inputs * outputs for inputs, outputs in model_floor.products(config)) == sum(kernels) + shared
    experts = [256 * shared]
    assert sum(leaf.size for place, leaf in leaves if "experts" in place) == 257 * shared
    assert 34e9 < sum(leaf.size for _, leaf in leaves) < 36e9
    floor = functools.partial(model_floor.floor_us, config, copy_rate=4e6)
    one, most = model_floor.Case("decode", 1, 4096), model_floor.Case("prompt", 1, 512)
    assert model_floor.expected_experts(config, 1) == pytest.approx(8)
    assert model_floor.expected_experts(config, 4096) == pytest.approx(256)
    np.testing.assert_allclose(floor(one, experts=10) - floor(one), 2 / 256 * 2 * sum(experts) / 4e6)
    few, every = floor(most, experts=240), floor(most, experts=256)
    np.testing.assert_allclose(every - few, 16 / 256 * 2 * sum(experts) / 4e6)
    np.testing.assert_allclose(floor(one, devices=2), floor(one) / 2)
    # A verify row reads its states once and writes them after each token.
    verify, decode = (floor(model_floor.Case("verify", 16, 4096, drafts), experts=256) for drafts in (3, 0))
    np.testing.assert_allclose(verify - decode, 16 * 3 * 30 * 32 * 128 * 128 * 4 / 4e6)


def test_scripted_drafts_are_right_as_often_as_the_script_says():
    """The scripted model follows its rule whatever its weights, and each number of drafts is right equally often."""
    drafter, length = scripted.ScriptedDrafter(512), 4000
    history = jnp.asarray(np.random.default_rng(0).integers(0, 512, (1, length)), jnp.int32)
    rows, lengths = jnp.broadcast_to(history, (length - 1, length)), jnp.arange(1, length, dtype=jnp.int32)
    drafts, counts = drafter.propose(rows, lengths, 3)
    assert (np.asarray(counts) == 3).all()
    wanted, found = history[0, : length - 1], []
    for place in range(3):
        wanted = scripted.following(wanted, 512)
        found.append(np.asarray(drafts[:, place] == wanted))
    right = np.stack(found).sum(axis=0)
    assert (np.diff(np.stack(found).astype(int), axis=0) <= 0).all()
    assert np.bincount(right).min() > 0.2 * length


POOLS = ["--num-state-blocks=100", "--num-kv-pages=400"]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_rows_of_decode_and_verify_steps_are_complete(name, monkeypatch):
    cases = (
        model_floor.Case("decode", 2, 64),
        model_floor.Case("decode", 2, 64, draws=True),
        model_floor.Case("verify", 3, 64, drafts=3),
    )
    monkeypatch.setattr(model, "CASES", cases)
    sizes = ["--max-model-len=600", "--max-num-seqs=4", "--max-num-batched-tokens=128", *POOLS]
    sizes += ["--steps=16", "--warm-up=20"]
    decode, drawn, verify = model.main([f"--model={name}", *sizes])
    prefix = "moe " if name == "tiny-moe" else ""
    names = [f"{prefix}{case}" for case in ("decode 2x64", "decode 2x64 drawn", "verify K3 3x64")]
    assert [row["case"] for row in (decode, drawn, verify)] == names
    # Two tokens choose two to four of the eight experts; each number of accepted tokens is as frequent as the others.
    assert ("experts_per_layer" in decode) == (name == "tiny-moe")
    assert 2 <= decode.get("experts_per_layer", 3) <= 4
    assert 2 < verify["tokens_per_row"] < 3
    for row in (decode, drawn, verify):
        assert row["ratio"] > 1
        # The host starts a step and waits for the one before within a step.
        assert min(row["start_us"], row["wait_us"]) > 0
        assert row["start_us"] + row["wait_us"] < row["step_us_max"]
        assert row["first_step_us"] > 0


@pytest.mark.deep
def test_rows_of_models_are_complete(tmp_path):
    sizes = ["--max-model-len=1100", "--max-num-seqs=2", "--max-num-batched-tokens=128", *POOLS]
    (row,) = model.main(["--model=tiny", "--case=prompt 512", f"--json={tmp_path / 'rows.jsonl'}", *sizes])
    assert row["ratio"] == 1e3 * row["ttft_ms"] / row["floor_us"] > 1
    assert [*read_rows(tmp_path / "rows.jsonl")] == [json.loads(json.dumps(row))]
    assert "prompt 512" in tables([row])["models"]


def test_cases_that_are_named_are_measured_within_the_budget(tmp_path, capsys):
    cases, file, measured = [SimpleNamespace(name=name) for name in ("a 1", "a 16", "b 1")], tmp_path / "rows.jsonl", []

    def measure(case):
        measured.append(case.name)
        return [{"case": case.name, "candidate": name, "us": us} for us, name in enumerate(("fast", "slow", "xla"))]

    def run(*arguments, **more):
        options = options_parser("", budget=100).parse_args([*arguments, "--json", str(file), "--commit", "abc"])
        run_cases(options, cases, measure, **more)
        return capsys.readouterr().out

    said = run("--case", "^a", copy_rate=4.2e6, shown=1)
    assert measured == ["a 1", "a 16"]
    rows = read_rows(file)
    assert [(row["case"], row["candidate"]) for row in rows][:3] == [("a 1", "fast"), ("a 1", "slow"), ("a 1", "xla")]
    assert {(row["copy_bandwidth_tb_s"], row["commit"]) for row in rows} == {(4.2, "abc")}
    assert "fast" in said
    assert "xla" in said
    assert "slow" not in said
    assert "slow" in run("--case", "b")
    assert "b 1: no time left" in run("--case", "b", "--budget", "-1")
    assert measured == ["a 1", "a 16", "b 1"]


def test_sums_over_devices_are_compared_with_xla(monkeypatch):
    monkeypatch.setattr(all_reduce, "ROUNDS", 1)
    monkeypatch.setattr(all_reduce, "CALLS", 2)
    case = next(case for case in all_reduce.CASES if case.name == "all_reduce_rms_norm odd 5")
    (row,) = all_reduce.measure(case, 1, {"xla": dict(implementation="xla")})
    assert (row["candidate"], row["error"], row["same_on_all"]) == ("xla", 0.0, True)
    names = all_reduce.tuned(case)
    assert all(config["config"].num_warps * 32 * config["config"].pack <= 1024 for config in names.values())
    assert "w8_p4" in names
