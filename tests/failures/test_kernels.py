"""Shapes that broke kernels elsewhere work here. The tests of the kernels do not have them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from kernels.common import IMPLEMENTATIONS, assert_close, assert_untouched, dirty_pool, pack, run_by
from kernels.lowered_cases import OPS
from oracles.ops import gated_delta_rule

from pallas_kernels import Rows, causal_conv1d_prefill, causal_conv1d_update, gated_delta_rule_recurrent


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_seventy_two_rows_of_up_to_eight_drafts(rng, implementation):
    """There are many more tokens than rows, every number of drafts, and a number of rows that no tile divides."""
    heads, dim, window = 1, 16, 9
    lengths = [n % (window + 1) for n in range(72)]
    tokens, blocks = sum(lengths), 1 + 72 * window
    draw = lambda *shape: rng.normal(size=(tokens, heads, *shape)).astype(np.float32)
    q, k, v, g, beta = draw(dim), draw(dim), draw(dim), -np.abs(draw()), 1 / (1 + np.exp(-draw()))
    write = 1 + np.arange(72 * window).reshape(72, window)
    read = np.where(np.arange(72) % 5, write[:, 0], 0)
    pool = dirty_pool(rng, (1, blocks, heads, dim, dim), jnp.float32, clean=write[:, 0])
    where = dict(read=jnp.asarray(read, jnp.int32), write=jnp.asarray(write, jnp.int32))
    rows = Rows(query_start_loc=pack(lengths), layer=0, **where)
    inputs = map(jnp.asarray, (q, k, v, g, beta))
    out, after = gated_delta_rule_recurrent(*inputs, pool, rows, run=run_by(implementation))
    loc, written = np.cumsum([0, *lengths]), []
    for r, n in enumerate(lengths):
        row = slice(loc[r], loc[r] + n)
        state = np.asarray(pool, np.float64)[0, read[r]] if read[r] else np.zeros((heads, dim, dim))
        double = (np.asarray(x[row], np.float64) for x in (q, k, v, g, beta))
        wanted, states = gated_delta_rule(*double, state, dim**-0.5)
        terms = 4 * (n + 1) * dim
        assert_close(out[row], wanted, jnp.float32, terms, f"row {r}")
        for t in range(n):
            assert_close(after[0, write[r, t]], states[t], jnp.float32, terms, f"state {r}, {t}")
        written += write[r, :n].tolist()
    assert_untouched(pool, after, written)


@pytest.mark.parametrize("op", ["causal_conv1d_prefill", "gated_delta_rule_prefill", "ssd", "selective_scan"])
def test_prompts_of_more_than_2_to_the_31_elements_have_64_bit_offsets(op, monkeypatch, capsys):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    run, _, case = OPS[op]

    def triton_ir(tokens):
        run("NVIDIA H200", dataclasses.replace(case, lengths=(tokens,)), blocks=33)
        return capsys.readouterr().out

    assert "xi64>" not in triton_ir(8192)
    assert "xi64>" in triton_ir(2**20)


@pytest.mark.parametrize(
    ("op", "implementation"),
    [
        (causal_conv1d_update, "xla"),
        (causal_conv1d_prefill, "interpret"),
        pytest.param(causal_conv1d_update, "triton", marks=pytest.mark.gpu),
        pytest.param(causal_conv1d_prefill, "triton", marks=pytest.mark.gpu),
    ],
)
def test_products_of_a_convolution_are_not_rounded(rng, op, implementation):
    """A product of bfloat16 values has 16 bits, so that every sum, apart from ties, is rounded to the nearest."""
    rows, channels = 3, 512
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x, pool, taps = draw(rows, channels), draw(1, 8, 3, channels), draw(4, channels)
    ints = lambda *values: jnp.asarray(values, jnp.int32)
    where = dict(window_read=ints(1, 2, 3), window_row=ints(0, 0, 0), write=ints(4, 5, 6)[:, None])
    here = Rows(query_start_loc=pack([1] * rows), layer=0, **where)
    y, _ = op(x, pool, taps, None, here, activation=None, run=run_by(implementation))
    double = lambda array: np.asarray(array.astype(jnp.float32), np.float64)
    inputs = np.concatenate([double(pool)[0, 1:4], double(x)[:, None]], axis=1)
    wanted = jnp.asarray((inputs * double(taps)).sum(1)).astype(jnp.bfloat16)
    assert np.mean(double(y) == double(wanted)) > 0.999
