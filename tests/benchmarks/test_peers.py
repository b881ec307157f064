"""The fastest kernel of another project that computes the same is reported."""

import contextlib
import dataclasses
import itertools
import sys
from types import SimpleNamespace

import pytest
from fakes.small_cases import small

from benchmarks import (
    kernel_benchmark,
    kernels,
    prefill,
)
from benchmarks.workloads import causal_conv1d as causal_conv1d_cases


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
