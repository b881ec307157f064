"""Qwen3.5 text against logits and states of Hugging Face transformers, through every way a token can be run."""

import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from models.driver import PAGE_SIZE, Driver

from mamba_align_jax.models import load_model

CHECKPOINT = Path(__file__).parents[1] / "data" / "qwen3_5_text"
POLICIES = pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
ATOL = 1e-4  # float32 against float32: transformers' own chunked and stepwise paths differ by 1e-5


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT)


@pytest.fixture(scope="module")
def reference():
    return dict(np.load(CHECKPOINT / "reference.npz"))


@pytest.fixture(scope="module")
def tokens(reference):
    return reference["tokens"][0].astype(np.int32)


def prefill(driver, slot, tokens, sizes):
    ends = np.cumsum(sizes)
    assert ends[-1] == len(tokens)
    return np.concatenate([driver.step(prefill={slot: part})[slot] for part in np.split(tokens, ends[:-1])])


@pytest.mark.parametrize("sizes", [(69,), (64, 5), (37, 32), (1, 68), (20, 3, 41, 5), (32, 1, 1, 35)])
def test_prompt_in_chunks(model, reference, tokens, sizes):
    driver = Driver(model)
    logits = prefill(driver, 0, tokens, sizes)
    np.testing.assert_allclose(logits, reference["logits"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(logits[36:68], reference["gen_logits"], atol=ATOL, rtol=0)
    assert logits[36:-1].argmax(1).tolist() == tokens[37:].tolist()


@pytest.mark.parametrize("sizes", [(150,), (64, 64, 22), (90, 60)])
def test_prompt_of_several_chunks(model, reference, sizes):
    logits = prefill(Driver(model), 0, reference["long_tokens"][0].astype(np.int32), sizes)
    np.testing.assert_allclose(logits[-16:], reference["long_last_logits"], atol=ATOL, rtol=0)


@pytest.mark.parametrize("sizes", [(37,), (32, 5), (11, 26)])
def test_states_after_the_prompt(model, reference, tokens, sizes):
    driver = Driver(model)
    prefill(driver, 2, tokens[:37], sizes)
    block = driver.blocks(2)[1]
    conv, recurrent = driver.pool.states[0]
    for layer in range(3):
        window = reference[f"prompt_state/L{layer}.conv0"][0, :, 1:].T
        np.testing.assert_allclose(conv[layer, block, :3], window, atol=ATOL, rtol=0)
        state = reference[f"prompt_state/L{layer}.rec0"][0].swapaxes(1, 2)
        np.testing.assert_allclose(recurrent[layer, block], state, atol=ATOL, rtol=0)
    pages = driver.pages[2, : -(-37 // PAGE_SIZE)]
    for name, pool in (("k", driver.kv.keys), ("v", driver.kv.values)):
        held = np.asarray(pool)[0, pages].reshape(-1, *pool.shape[3:])[:37].swapaxes(0, 1)
        np.testing.assert_allclose(held, reference[f"prompt_state/L3.{name}"][0], atol=ATOL, rtol=0)


@POLICIES
@pytest.mark.parametrize("drafted", [False, True])
def test_greedy_tokens(model, reference, tokens, policy, drafted):
    """From the prompt over a block boundary, token by token or with drafts of which some are wrong."""
    driver = Driver(model, policy)
    logits = [prefill(driver, 1, tokens[:37], (32, 5))[-1]]
    out, accept = [int(logits[-1].argmax())], itertools.cycle([2, 1, 3, 3, 1])
    while len(out) < 32:
        accepted = next(accept) if drafted and len(out) < 29 else 1
        right = tokens[37 + len(out) :][: accepted - 1].tolist()
        wrong = [(token + 1) % 256 for token in tokens[37 + len(out) + accepted - 1 :][: 3 - accepted].tolist()]
        row = [out[-1], *right, *wrong] if drafted and len(out) < 29 else [out[-1]]
        logits.extend(driver.step(decode={1: row}, accepted={1: accepted})[1][:accepted])
        out += [*right, int(logits[-1].argmax())]
    assert out == tokens[37:].tolist()
    np.testing.assert_allclose(np.stack(logits), reference["gen_logits"][: len(logits)], atol=ATOL, rtol=0)


@POLICIES
def test_resumes_from_a_block_in_another_slot(model, reference, tokens, policy):
    driver = Driver(model, policy)
    prefill(driver, 0, tokens[:66], (37, 27, 2))
    driver.add(3, computed=64, like=0)
    both = driver.step(decode={0: tokens[66:67]}, prefill={3: tokens[64:67]})
    np.testing.assert_allclose(both[0][0], reference["logits"][66], atol=ATOL, rtol=0)
    np.testing.assert_allclose(both[3], reference["logits"][64:67], atol=ATOL, rtol=0)
    for slot in (3, 0):
        for at in (67, 68):
            row = driver.step(decode={slot: tokens[at : at + 1]})[slot]
            np.testing.assert_allclose(row[0], reference["logits"][at], atol=ATOL, rtol=0)


@POLICIES
def test_mixed_batch(model, reference, tokens, policy):
    """A verify and a decode row with two prompts, one of them in its middle, and a slot that is used again."""
    long = reference["long_tokens"][0].astype(np.int32)
    driver = Driver(model, policy)
    first = driver.step(prefill={0: tokens[:37], 1: tokens[:41]})
    np.testing.assert_allclose(first[1], reference["logits"][:41], atol=ATOL, rtol=0)
    prefill(driver, 2, long[:70], (70,))
    out = driver.step(
        decode={0: [tokens[37], tokens[38], 7], 1: tokens[41:42]},
        prefill={2: long[70:], 3: tokens[:50]},
        accepted={0: 2},
    )
    np.testing.assert_allclose(out[0][:2], reference["logits"][37:39], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out[1], reference["logits"][41:42], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out[2][-16:], reference["long_last_logits"], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out[3], reference["logits"][:50], atol=ATOL, rtol=0)
    driver.add(2)
    out = driver.step(decode={0: tokens[39:40]}, prefill={2: tokens[:37]})
    np.testing.assert_allclose(out[0], reference["logits"][39:40], atol=ATOL, rtol=0)
    np.testing.assert_allclose(out[2], reference["logits"][:37], atol=ATOL, rtol=0)


def test_bfloat16(reference, tokens):
    model = load_model(CHECKPOINT, dtype="bfloat16")
    assert model.dtype == "bfloat16"
    logits = prefill(Driver(model), 0, tokens, (69,))
    assert logits.dtype == np.float32
    # transformers' own bfloat16 logits differ from these by 0.02 (rms).
    assert np.sqrt(np.mean((logits - reference["logits"]) ** 2)) < 0.04
    # Logits rounded to bfloat16 would make ties of distinct ones.
    assert (logits != np.asarray(jnp.asarray(logits, jnp.bfloat16), np.float32)).any()
