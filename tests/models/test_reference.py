"""Every model agrees with the logits, tokens and states of Hugging Face transformers in every kind of row.

A model under test is a folder of tests/data with a `reference.npz`.
"""

import jax
import numpy as np
import pytest
from fakes.driver import DATA, PAGE_SIZE, Driver, close, every_split
from oracles import models as oracles

from mamba_align_jax.models import load_model

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

MODELS = (
    *("bamba", "falcon_h1", "kimi_linear", "lfm2", "lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_text", "qwen3_next", "zamba2"),
)
# transformers keeps these states as [heads, key_dim, value_dim].
TRANSPOSED = ("gdn", "kda")


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return load_model(DATA / name)


@pytest.fixture(scope="module")
def reference(name):
    return oracles.reference(DATA / name)


def check_states(driver, model, slot, reference):
    """Checks the states after the prompt of 37 tokens, in the slot's second column."""
    block, pages = driver.blocks(slot)[1], driver.pages[slot, : -(-37 // PAGE_SIZE)]
    groups, passed = [group.name for group in driver.align.groups], []
    for number, layer in enumerate(model.layers):
        for mixer in vars(layer).values():
            if not hasattr(mixer, "kind"):
                continue
            place = passed.count(mixer.kind)
            passed.append(mixer.kind)
            wanted = {
                key.rpartition(".")[2]: value[0]
                for key, value in reference.items()
                if key.startswith(f"prompt_state/L{number}.")
            }
            if mixer.kind in groups:
                conv, *recurrent = driver.pool.states[groups.index(mixer.kind)]
                close(conv[place, block, : conv.shape[2] - 2], wanted["conv0"][:, 1:].T)
                # A short convolution has no other state.
                assert len(recurrent) == ("rec0" in wanted)
                for pool in recurrent:
                    state = wanted["rec0"].swapaxes(1, 2) if mixer.kind in TRANSPOSED else wanted["rec0"]
                    close(pool[place, block].reshape(state.shape), state)
            else:
                pool = np.concatenate([driver.kv.keys, driver.kv.values], -1)
                held = pool[place, pages].reshape(-1, *pool.shape[3:])[:37].swapaxes(0, 1)
                # Falcon-H1's factor of the keys is one of the scores here.
                keys = wanted["k"] / getattr(model.config, "key_multiplier", 1.0)
                close(held, np.concatenate([keys, wanted["v"]], -1))
    assert passed


def check_logits(model, reference, implementation):
    """Checks whole and chunked prompts, decode and verify rows, a reused slot and one that resumes from a block."""
    tokens, logits = reference["tokens"][0].astype(np.int32), reference["logits"]
    long = reference["long_tokens"][0].astype(np.int32)
    driver = Driver(model, one_program=True, implementation=implementation)
    wrong = (tokens + 1) % model.config.vocab_size

    out = driver.step(prefill={0: tokens[:37], 1: tokens[:11]})
    close(out[0], logits[:37])
    close(out[1], logits[:11])
    check_states(driver, model, 0, reference)
    out = driver.step(decode={0: [tokens[37], tokens[38], wrong[39]]}, prefill={1: tokens[11:37]}, accepted={0: 2})
    close(out[0][:2], logits[37:39])
    close(out[1], logits[11:37])
    check_states(driver, model, 1, reference)
    out = driver.step(decode={0: tokens[39:40], 1: [tokens[37], *wrong[38:40]]}, prefill={2: tokens[:64]})
    close(out[0], logits[39:40])
    close(out[1][:1], logits[37:38])
    close(out[2], logits[:64])
    out = driver.step(decode={1: tokens[38:41], 0: tokens[40:41]}, prefill={3: long[:70]}, accepted={1: 3})
    close(out[1], logits[38:41])
    close(out[0], logits[40:41])
    driver.add(0, computed=64, like=2)
    out = driver.step(decode={1: tokens[41:42]}, prefill={0: tokens[64:68], 3: long[70:]})
    close(out[1], logits[41:42])
    close(out[0], logits[64:68])
    close(out[3][-16:], reference["long_last_logits"])
    driver.add(3)
    out = driver.step(decode={0: tokens[68:69]}, prefill={1: tokens[42:69], 3: tokens})
    close(out[0], logits[68:69])
    close(out[1], logits[42:69])
    close(out[3], logits)
    assert (logits[36:-1].argmax(1) == tokens[37:]).all()


def test_logits_and_states_are_those_of_transformers(model, reference):
    check_logits(model, reference, implementation="xla")


def test_every_split_of_the_prompt_gives_the_same_logits(model, reference):
    prompt, splits = reference["tokens"][0, :37].astype(np.int32), 0
    for driver, slot, logits in every_split(model, prompt, implementation="xla"):
        close(logits, reference["logits"][:37])
        check_states(driver, model, slot, reference)
        splits += 1
    assert splits == 36


@pytest.mark.gpu
def test_logits_and_states_of_compiled_kernels_are_those_of_transformers(model, reference):
    with jax.default_matmul_precision("highest"):
        check_logits(model, reference, implementation=None)


def test_bfloat16_logits_are_close():
    path = DATA / "qwen3_5_text"
    model, reference = load_model(path, dtype="bfloat16"), oracles.reference(path)
    assert model.dtype == "bfloat16"
    logits = Driver(model).step(prefill={0: reference["tokens"][0].astype(np.int32)})[0]
    assert logits.dtype == np.float32
    # The bfloat16 logits of transformers differ from these by 0.02 (rms).
    assert np.sqrt(np.mean((logits - reference["logits"]) ** 2)) < 0.04
    # Logits that are rounded to bfloat16 would tie.
    assert (logits != np.asarray(jax.numpy.asarray(logits, "bfloat16"), np.float32)).any()
