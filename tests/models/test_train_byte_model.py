"""The training script: its forward is the served model's, its corpus holds out what it says."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from models.driver import ATOL, DATA

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


def test_forward_is_the_served_model(script):
    reference = np.load(CHECKPOINT / "reference.npz")
    tokens = jnp.asarray(reference["tokens"], jnp.int32)
    logits = script.forward(load_model(CHECKPOINT), jnp.concatenate([tokens, tokens[:, ::-1]]))
    np.testing.assert_allclose(logits[0], reference["logits"], atol=ATOL, rtol=0)


def test_held_out_paragraphs_are_not_trained_on(script, tmp_path):
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
