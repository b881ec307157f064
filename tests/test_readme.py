"""The code on the pages runs."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracles.ops import causal_conv1d, gated_delta_rule, gates, paged_attention

import mamba_align_jax as ma

ROOT = Path(__file__).parents[1]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run(*arguments):
    environment = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"} | os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=True, env=environment
    ).stdout


@pytest.mark.deep
def test_the_engine_in_ten_lines():
    out = run("-c", blocks("README.md")[0])
    first, *others = (
        int(count) for count in re.findall(r"^(\d+) of \d+ prompt tokens were cached:$", out, re.MULTILINE)
    )
    assert first == 0
    assert len(others) == 2
    assert all(count > 0 for count in others)


@pytest.mark.deep
def test_the_quickstart():
    first, second, stats, answer = run("-c", "".join(blocks("docs/quickstart.md")[:2])).splitlines()
    assert first.startswith("0 cached;")
    assert int(second.split()[0]) >= 64
    assert "hit_requests=1" in stats
    assert 0 < len(answer) <= 16


@pytest.mark.deep
def test_the_foreign_step_is_the_example_and_the_example_runs():
    """It imports neither the engine nor flax."""
    example = ROOT / "examples" / "foreign_step.py"
    assert blocks("README.md")[1] in example.read_text()
    out = run(
        "-c",
        f"import runpy, sys; runpy.run_path({str(example)!r}, run_name='__main__');"
        "print([name for name in sys.modules if name.startswith(('flax', 'mamba_align_jax.engine'))])",
    )
    assert out.count("tokens right") == 2
    assert out.splitlines()[-1] == "[]"


def test_a_foreign_step_multiplies_by_a_layer_of_an_fp8_file(capsys):
    runpy.run_path(str(ROOT / "examples" / "foreign_fp8.py"), run_name="__main__")
    assert capsys.readouterr().out == "184320 weights lie in 184392 bytes, and 5 tokens are right\n"


@pytest.mark.parametrize("padding", [0, 1, 7])
@pytest.mark.parametrize(("decoded", "begin", "end"), [(1, 1, 13), (2, 1, 13), (2, 0, 1)])
def test_a_batch_of_both_kinds_of_rows_needs_no_padding(decoded, begin, end, padding):
    """Decode rows of one token, each of which may have three, and then a chunk of a prompt in slot 2."""
    own = runpy.run_path(str(ROOT / "examples" / "foreign_step.py"))
    align, channels, rng = own["SPEC"], 3 * own["HEADS"] * own["DIM"], np.random.default_rng(0)
    shapes = dict(embed=(50, 32), qkv=(32, channels), conv=(own["WIDTH"], channels), a=(32, 2), b=(32, 2))
    weights = {name: jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    weights |= {"A_log": jnp.zeros(2), "dt_bias": jnp.zeros(2)}
    prompt, decoding = rng.integers(0, 50, 14, dtype=np.int32), rng.integers(0, 50, 17, dtype=np.int32)
    wanted, wanted_last = (own["Server"](weights).run(2, 0, tokens, enters=True) for tokens in (prompt, decoding))

    server = own["Server"](weights)
    for slot in range(decoded):
        server.run(slot, 0, decoding[:16], enters=True)
    if begin:
        server.run(2, 0, prompt[:begin], enters=True)
    entering = [2][begin:]
    row = [(0, slot, column, server.block(slot, column)) for slot in entering for column in range(align.num_columns)]
    out, server.pool, server.state, server.tables = own["step"](
        weights,
        np.concatenate([decoding[16:].repeat(decoded), prompt[begin:end], np.zeros(padding, np.int32)]),
        ma.StepBatch.from_host(
            align, decoded + 1, [*range(decoded), 2], [*range(decoded + 1), decoded + end - begin], [0] * decoded + [-1]
        ),
        ma.TableUpdates.from_host(align, align.num_columns, row),
        ma.Additions.from_host(align, 1, entering, [0] * len(entering)),
        jnp.int32(1),
        *(server.pool, server.state, server.tables),
        decode_rows=decoded,
    )
    np.testing.assert_allclose(out[:decoded], wanted_last[[-1] * decoded], atol=2e-6)
    np.testing.assert_allclose(out[decoded : decoded + end - begin], wanted[begin:end], atol=2e-6)
    np.testing.assert_allclose(server.run(2, end, prompt[end:]), wanted[end:], atol=2e-6)


def test_a_model_keeps_its_answers_when_its_cache_is_swapped(capsys):
    runpy.run_path(str(ROOT / "examples" / "own_cache.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert re.findall(r"(\d+) of \d+ tokens were cached; the same 20 tokens", out) == ["0", "32", "32"]


@pytest.fixture
def hybrid(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    return lambda name: runpy.run_path(str(ROOT / "examples" / "hybrid_step.py"), run_name=name)


def test_a_hybrid_model_in_a_foreign_step_answers_from_the_cache_as_from_an_empty_one(hybrid, capsys):
    hybrid("__main__")
    out = capsys.readouterr().out
    assert re.findall(r"(\d+) of \d+ tokens were cached; the same 20 tokens", out) == ["32", "32", "64"]
    # Of 20 tokens that are drafted, every third is wrong.
    assert int(re.search(r"(\d+) drafts were accepted", out)[1]) >= 10


def hybrid_logits(weights, tokens, heads):
    """The model of examples/hybrid_step.py over a whole sequence, in float64."""
    w = {name: np.asarray(weight, np.float64) for name, weight in weights.items()}
    x = w["embed"][tokens]
    count, hidden = x.shape
    packed = lambda y: y.reshape(count, -1, hidden // heads)
    history = np.zeros((len(w["conv"]) - 1, w["conv"].shape[1]))
    q, k, v = np.split(packed(causal_conv1d(x @ w["qkv"], history, w["conv"], None, silu=True)[0]), 3, axis=1)
    decays = gates(x @ w["a"], x @ w["b"], w["A_log"], w["dt_bias"])
    empty = np.zeros((heads, hidden // heads, hidden // heads))
    x = x + gated_delta_rule(q, k, v, *decays, empty, q.shape[2] ** -0.5)[0].reshape(count, -1)
    attended = paged_attention(*(packed(x @ w[name]) for name in ("q", "k", "v")), 0)
    return (x + attended.reshape(count, -1)) @ w["embed"].T


def test_the_hybrid_example_computes_its_model(hybrid):
    own = hybrid("example")
    weights, prompt = own["make_weights"](), np.random.default_rng(2).integers(0, own["VOCAB"], 37).tolist()
    answer, logits, _ = own["generate"](own["Server"](weights), "a request", prompt, 6)
    wanted = hybrid_logits(weights, prompt + answer, own["HEADS"])
    np.testing.assert_allclose(logits, wanted[len(prompt) - 1 : -1], atol=1e-4)
