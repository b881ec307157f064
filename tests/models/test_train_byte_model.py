"""The training script computes what the served model computes, and keeps its held-out text out of training."""

import argparse
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.draft_head_weights import write_with_head
from fakes.driver import ATOL, DATA
from flax import nnx
from oracles.draft_head import NumpyHead

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.drafting.prompt_lookup import PromptLookupDrafter
from mamba_align_jax.models import load_model

CHECKPOINT = DATA / "qwen3_5_text"
pytest.importorskip("optax")


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "examples" / "train_byte_model.py"
    spec = importlib.util.spec_from_file_location("train_byte_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_forward_pass_is_that_of_the_served_model(script):
    reference = np.load(CHECKPOINT / "reference.npz")
    tokens = jnp.asarray(reference["tokens"], jnp.int32)
    model = load_model(CHECKPOINT)
    hidden = script.forward(model, jnp.concatenate([tokens, tokens[:, ::-1]]))
    np.testing.assert_allclose(model.logits(hidden[0]), reference["logits"], atol=ATOL, rtol=0)


def test_draft_head_is_trained_as_it_is_served(script, tmp_path):
    """Each draft uses the hidden state and the keys of the draft before it."""
    model = load_model(write_with_head(CHECKPOINT, tmp_path))
    random = np.random.default_rng(0)
    hidden, tokens = random.normal(size=(2, 9, 64)).astype(np.float32), random.integers(0, 256, (2, 9))
    said = jax.jit(lambda *rows: script.head_logits(model, *rows, 3))(hidden, tokens)
    assert [logits.shape for logits in said] == [(2, 6, 256)] * 3
    head = NumpyHead(tmp_path)
    for place in range(6):
        out = head.step(hidden[1, place], tokens[1, place + 1], place)
        later = head.fork()
        np.testing.assert_allclose(said[0][1, place], later.logits(out), atol=ATOL, rtol=0)
        for n in (1, 2):
            out = later.step(out, tokens[1, place + n + 1], place + n)
            np.testing.assert_allclose(said[n][1, place], later.logits(out), atol=ATOL, rtol=0)


@pytest.mark.deep
def test_training_the_draft_head_does_not_change_the_model(script, capsys, monkeypatch):
    monkeypatch.setattr(script, "forward", lambda model, tokens: model.embed_tokens(tokens))  # less to compile
    monkeypatch.setattr(script, "DEPTH", 1)
    model = load_model(CHECKPOINT, "bfloat16")
    random = np.random.default_rng(0)
    corpus = {name: random.integers(0, 256, 40, np.uint8) for name in ("docs", "code", "validation", "heldout")}
    options = argparse.Namespace(batch=2, length=16, calls=2, mtp_minutes=0)
    with jax.numpy_dtype_promotion("standard"):  # as optax wants it
        trained = script.train_head(corpus, model, options)
    assert trained.config.mtp_num_hidden_layers == 1
    new, kept = nnx.split_state(nnx.state(trained, nnx.Param), nnx.PathContains("mtp"), ...)
    assert len(jax.tree.leaves(new)) == 12
    jax.tree.map(np.testing.assert_array_equal, kept, script.served(nnx.state(model, nnx.Param)))
    assert "heldout: drafts 1 to 1 are the model's own choice" in capsys.readouterr().out


def test_held_out_paragraphs_are_not_in_the_training_text(script, tmp_path):
    shared = "A paragraph that two topics have in common, word for word."
    texts = {f"topic{n:02}": f"What topic {n} alone says, at some length.\n\n{shared}" for n in range(12)}
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(f"topics = {texts!r}\n")
    (tmp_path / "module.py").write_text(f'def function():\n    """{"Documented here. " * 5}"""\n')
    corpus = {name: text.tobytes().decode() for name, text in script.prepare(tmp_path).items()}
    assert corpus["heldout"] == "\0".join([texts["topic00"], texts["topic10"]])
    assert corpus["validation"] == texts["topic05"]
    assert "What topic 1 alone" in corpus["docs"]
    assert shared not in corpus["docs"]
    assert "Documented here." in corpus["docs"]
    assert "def function" in corpus["code"]


@pytest.mark.deep
def test_bundled_draft_head_beats_prompt_lookup_on_prose(script):
    """Counts how often a draft is the model's own choice, after right drafts, on text that neither was trained on."""
    graph, head, rest = nnx.split(load_model(BYTE_MODEL), nnx.PathContains("mtp"), ...)
    text = (DATA / "heldout_docs.txt").read_bytes()[2000:2515]
    both = jax.jit(lambda tokens: script.head_and_model_logits(graph, head, rest, tokens))
    said, meant = both(jnp.array([list(text)], jnp.int32))
    lookup = PromptLookupDrafter(4, 2)
    looked = [lookup.draft("text", list(text[: place + 2]), 3) or [-1] * 3 for place in range(512)]
    for n in range(3):
        right = np.asarray(meant[n][0].argmax(-1))
        by_head = np.mean(np.asarray(said[n][0].argmax(-1)) == right)
        by_lookup = np.mean(np.array(looked)[:, n] == right)
        assert by_head > max(0.6, by_lookup + 0.2), (n, by_head, by_lookup)
