"""The backend for tpu-inference keeps the contract of its kernel. `make integrations` runs tpu-inference's own tests."""

import functools
import inspect
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fakes import tpu_inference as fake
from oracles import ops

from mamba_align_jax.integrations import tpu_inference
from pallas_kernels import Rows, causal_conv1d_update

SIGNATURES = json.loads((Path(__file__).parent / "data" / "tpu_inference_signatures.json").read_text())
KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WIDTH, SLOTS = 2, 4, 8, 16, 4, 24
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
SIZES = dict(n_kq=KEY_HEADS, n_v=HEADS, d_k=KEY_DIM, d_v=VALUE_DIM, kernel_size=WIDTH)
# Float32 against float64, relative to the largest value.
TOLERANCE = 2e-5

# A row is (tokens of this step, tokens before it, slot to read, slot to write, offset of the slot to read).
CASES = {
    "decode rows, one of them fresh": (0, 3, [(1, 9, 2, 2, 0), (1, 0, 3, 3, 0), (1, 64, 4, 5, 0)], []),
    "prefill rows that start, go on and hit": (0, 0, [], [(70, 0, 6, 6, 0), (5, 37, 7, 7, 0), (3, 128, 7, 8, 0)]),
    "decode and prefill rows": (0, 1, [(1, 12, 9, 9, 0)], [(2, 0, 3, 3, 0), (66, 64, 1, 4, 0)]),
    "verify rows of all lengths": (2, 2, [(3, 30, 1, 1, 2), (1, 7, 4, 4, 1), (2, 64, 7, 10, 0), (3, 0, 13, 13, 1)], []),
    "verify and prefill rows": (2, 2, [(2, 30, 1, 1, 1), (3, 8, 4, 4, 0)], [(20, 0, 7, 7, 0), (4, 20, 10, 13, 0)]),
}
# Only the full depth runs these, whose kinds of rows are in the other cases too.
DEEP = ("decode rows, one of them fresh", "verify rows of all lengths")


def draw(case):
    """The arguments of a step, the pools full of numbers and what no row reads full of NaN."""
    _, padding, early, late = case
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    rows = early + late
    lengths = [row[0] for row in rows]
    tokens = sum(lengths)
    column = lambda n: np.array([row[n] for row in rows] + [1] * padding, np.int32)
    arrays = dict(
        qkv=normal(tokens + 2, CHANNELS), b=normal(tokens + 2, HEADS), a=normal(tokens + 2, HEADS),
        conv_state=normal(SLOTS, WIDTH - 1, CHANNELS), recurrent_state=normal(SLOTS, HEADS, KEY_DIM, VALUE_DIM),
        conv_weight=normal(CHANNELS, 1, WIDTH), conv_bias=normal(CHANNELS), a_log=normal(HEADS), dt_bias=normal(HEADS),
        # What comes after the last row is arbitrary, as tpu-inference fills it with ones.
        query_start_loc=np.concatenate([[0], np.cumsum(lengths), [1] * padding]).astype(np.int32),
        state_indices=column(3), distribution=np.array([len(early), len(early), len(rows)], np.int32),
        seq_lens=column(0) + column(1), read_state_indices=column(2), read_offsets=column(4),
    )  # fmt: skip
    for name in ("qkv", "b", "a"):
        arrays[name][tokens:] = np.nan
    arrays["conv_state"][0] = arrays["recurrent_state"][0] = np.nan
    return arrays


def run(arrays, drafts=0, **options):
    """Runs the kernel. Returns windows, states and outputs."""
    arrays = {name: jnp.array(x) for name, x in arrays.items()}
    (windows, states), out = tpu_inference.conv1d_gdn(**arrays, **SIZES, num_spec_tokens=drafts, **options)
    return np.asarray(windows), np.asarray(states), np.asarray(out)


def expected(case, arrays):
    """The same in float64, row by row and token by token. Also returns the slots that are written."""
    _, _, early, late = case
    windows, states = (arrays[name].astype(np.float64) for name in ("conv_state", "recurrent_state"))
    out, written, start = np.zeros((len(arrays["qkv"]), HEADS * VALUE_DIM)), set(), 0
    before = windows.copy(), states.copy()
    for n, (length, position, read, write, offset) in enumerate(early + late):
        history, state = (pool[read + offset] if position else np.zeros_like(pool[1]) for pool in before)
        part = slice(start, start + length)
        qkv, inputs = ops.causal_conv1d(arrays["qkv"][part], history, arrays["conv_weight"][:, 0].T,
                                        arrays["conv_bias"], silu=True)  # fmt: skip
        keys = KEY_HEADS * KEY_DIM
        q, k = (qkv[:, i * keys : (i + 1) * keys].reshape(length, KEY_HEADS, KEY_DIM) for i in range(2))
        v = qkv[:, 2 * keys :].reshape(length, HEADS, VALUE_DIM)
        g, beta = ops.gates(arrays["a"][part], arrays["b"][part], arrays["a_log"], arrays["dt_bias"])
        y, after = ops.gated_delta_rule(q, k, v, g, beta, state.swapaxes(1, 2), KEY_DIM**-0.5)
        out[part] = y.reshape(length, -1)
        for t in range(length) if n < len(early) else [length - 1]:
            slot = write + t if n < len(early) else write
            windows[slot], states[slot] = inputs[t + 1 : t + WIDTH], after[t].swapaxes(1, 2)
            written.add(slot)
        start += length
    return windows, states, out, written


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.deep if name in DEEP else ()) for name in CASES])
def test_outputs_windows_and_states_are_those_of_the_equations(name):
    case = CASES[name]
    arrays = draw(case)
    came = run(arrays, drafts=case[0])
    *right, written = expected(case, arrays)
    for x, y, before in zip(came, right, (arrays["conv_state"], arrays["recurrent_state"], None), strict=True):
        if before is not None:  # a pool
            others = [slot for slot in range(SLOTS) if slot not in written]
            np.testing.assert_array_equal(x[others], before[others])
            x, y = x[sorted(written)], y[sorted(written)]
        assert np.abs(x - y).max() < TOLERANCE * np.abs(y).max()


@pytest.mark.deep
def test_bfloat16_windows_hold_the_inputs_themselves():
    """States stay float32. The convolution's outputs are rounded to bfloat16 before the delta rule."""
    case = CASES["verify and prefill rows"]
    arrays = draw(case)
    for name in ("qkv", "b", "a", "conv_state"):
        arrays[name] = arrays[name].astype(jnp.bfloat16)
    windows, states, out = run(arrays, drafts=2)
    right_windows, right_states, right_out, written = expected(case, arrays)
    assert (windows.dtype, states.dtype, out.dtype) == (jnp.bfloat16, np.float32, jnp.bfloat16)
    slots = sorted(written)
    np.testing.assert_array_equal(windows[slots], right_windows[slots].astype(jnp.bfloat16))
    for x, y in ((states[slots], right_states[slots]), (out.astype(np.float32), right_out)):
        assert np.abs(x - y).max() < 2**-5 * np.abs(y).max()


def test_fresh_rows_read_nothing_of_their_slots():
    for name in ("decode rows, one of them fresh", "prefill rows that start, go on and hit"):
        case = CASES[name]
        arrays = draw(case)
        fresh = [row[2] for row in case[2] + case[3] if row[1] == 0]
        for pool in ("conv_state", "recurrent_state"):
            arrays[pool][fresh] = np.nan
        for x in run(arrays):
            assert not np.isnan(x[1:]).any()


@pytest.mark.deep
def test_rows_of_slot_0_change_nothing():
    case = (2, 0, [(3, 9, 0, 0, 1), (1, 4, 5, 5, 0)], [(6, 9, 0, 0, 0)])
    arrays = draw(case)
    windows, states, out = run(arrays, drafts=2)
    others = [slot for slot in range(1, SLOTS) if slot != 5]
    np.testing.assert_array_equal(windows[others], arrays["conv_state"][others])
    np.testing.assert_array_equal(states[others], arrays["recurrent_state"][others])
    assert np.isfinite(out).all()


@pytest.mark.deep
def test_a_distribution_may_count_more_rows_than_there_are():
    """tpu-inference's own test of one prompt says that there are three rows."""
    arrays = draw((0, 0, [], [(9, 0, 6, 6, 0)]))
    plain = run(arrays)
    arrays["distribution"] = np.array([0, 0, 3], np.int32)
    for x, y in zip(run(arrays), plain, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_block_of_ours_holds_the_windows_of_a_verify_rows_slots():
    """Rows t .. t + width-2 of a window of width-1 + K rows are the window in slot `state_indices + t`."""
    drafts, slot = 2, 4
    arrays = draw((drafts, 0, [(drafts + 1, 30, slot, slot, 1)], []))
    windows, _, _ = run(arrays, drafts)
    pool = jnp.full((1, 3, WIDTH - 1 + drafts, CHANNELS), jnp.nan)
    pool = pool.at[0, 2, 1:WIDTH].set(arrays["conv_state"][slot + 1])
    index = functools.partial(jnp.array, dtype=jnp.int32)
    where = dict(window_read=index([2]), window_row=index([1]), write=index([[2]]))
    rows = Rows(query_start_loc=index([0, drafts + 1]), layer=0, **where)
    taps = jnp.array(arrays["conv_weight"][:, 0].T)
    _, pool = causal_conv1d_update(jnp.array(arrays["qkv"][: drafts + 1]), pool, taps, None, rows)
    for t in range(drafts + 1):
        np.testing.assert_array_equal(windows[slot + t], pool[0, 2, t : t + WIDTH - 1])


def test_a_prompt_that_resumes_at_a_multiple_of_64_has_the_same_bits():
    whole = draw((0, 0, [], [(80, 0, 6, 6, 0)]))
    *pools, out = run(whole)
    parts, state = [], {}
    for begin, end, read, write in ((0, 64, 3, 3), (64, 80, 3, 6)):
        step = whole | state | {name: whole[name][begin:end] for name in ("qkv", "b", "a")}
        step |= dict(
            query_start_loc=np.array([0, end - begin]), seq_lens=np.array([end]),
            read_state_indices=np.array([read]), state_indices=np.array([write]),
        )  # fmt: skip
        windows, states, part = run(step)
        state, parts = dict(conv_state=windows, recurrent_state=states), [*parts, part]
    np.testing.assert_array_equal(np.concatenate(parts), out[:80])
    np.testing.assert_array_equal(windows[6], pools[0][6])
    np.testing.assert_array_equal(states[6], pools[1][6])


def test_a_donated_step_copies_no_pool(optimized_programs):
    arrays = {name: jnp.array(x) for name, x in draw(CASES["verify and prefill rows"]).items()}
    pools = dict(conv_state=jnp.zeros((2048, WIDTH - 1, CHANNELS)))
    pools |= dict(recurrent_state=jnp.zeros((2048, HEADS, KEY_DIM, VALUE_DIM)))
    compiled = tpu_inference.conv1d_gdn.lower(**arrays | pools, **SIZES, num_spec_tokens=2).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < min(pool.nbytes for pool in pools.values())
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(pool.nbytes for pool in pools.values())


def test_the_backend_is_made_and_called_as_tpu_inferences_own(monkeypatch):
    registered = fake.put(monkeypatch)
    tpu_inference.register()
    tpu_inference.register()  # vLLM runs the plugins more than once
    (backend,) = registered.values()
    assert [*registered] == ["mamba_align"]
    assert {"name", *backend} == {*SIGNATURES["register_attention_backend"]}
    assert backend["attention"] is fake.RPAAttentionBackend
    assert backend["vllm_backend"] == SIGNATURES["PallasAttentionBackend"]
    parameters = lambda function: list(inspect.signature(function).parameters)
    assert parameters(backend["linear_attention"].conv1d_gdn_kernel) == SIGNATURES["conv1d_gdn_kernel"]
    kernel = backend["linear_attention"]().conv1d_gdn_kernel()
    assert parameters(tpu_inference.conv1d_gdn) == [*SIGNATURES["fused_conv1d_gdn"], "implementation"]
    # `run_jax_gdn_attention` gives the arrays by place and the sizes by name.
    case = CASES["decode and prefill rows"]
    arrays = {name: draw(case)[name] for name in SIGNATURES["fused_conv1d_gdn"][:14]}
    (windows, states), out = kernel(*map(jnp.array, arrays.values()), **SIZES)
    # Arguments given by name make another program, whose sums may be rounded otherwise.
    for x, y in zip((windows[1:], states[1:], out), run(arrays), strict=True):
        y = y[-len(x) :]
        assert np.abs(x - y).max() < TOLERANCE * np.abs(y).max()


def test_bad_input_is_refused_by_name(monkeypatch):
    fake.put(monkeypatch)
    with pytest.raises(ValueError, match="implementation must be 'xla', 'triton' or None, got 'tpu'"):
        tpu_inference.register(implementation="tpu")
    case = CASES["verify and prefill rows"]
    arrays = draw(case)
    with pytest.raises(ValueError, match="read_offsets must be given if num_spec_tokens is positive, got None and 2"):
        run({name: x for name, x in arrays.items() if name != "read_offsets"}, drafts=2)
    with pytest.raises(ValueError, match="conv_state must have qkv's dtype float32, got bfloat16"):
        run(arrays | dict(conv_state=arrays["conv_state"].astype(jnp.bfloat16)), drafts=2)
    for name, shape in (("conv_state", (SLOTS, 5, CHANNELS)), ("conv_weight", (CHANNELS, WIDTH))):
        with pytest.raises(ValueError, match=f"{name} must have the shape"):
            run(arrays | {name: np.zeros(shape, np.float32)}, drafts=2)


def test_without_tpu_inference_the_error_says_what_is_needed():
    with pytest.raises(ImportError, match=r"needs tpu-inference.*docs/integrations\.md names the version"):
        tpu_inference.register()
