"""Every model against logits, tokens and states of Hugging Face transformers, through every way a token can be run.

A model under test is a directory of tests/data with a `reference.npz`.
"""

import jax
import numpy as np
import pytest
from models.driver import ATOL, DATA, PAGE_SIZE, Driver
from models.float64 import without_clamp

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.models import load_model

MODELS = ("kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_text", "qwen3_next")
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
    arrays = dict(np.load(DATA / name / "reference.npz"))
    # transformers clamps the step sizes of Nemotron-H's prompts, as no other implementation does.
    return without_clamp(DATA / name, arrays) if name == "nemotron_h" else arrays


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=ATOL, rtol=0)


def check_states(driver, model, slot, reference):
    """States after the prompt of 37 tokens, in the slot's second column."""
    block, pages = driver.blocks(slot)[1], driver.pages[slot, : -(-37 // PAGE_SIZE)]
    groups, passed = [group.name for group in driver.spec.groups], []
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
                conv, recurrent = driver.pool.states[groups.index(mixer.kind)]
                close(conv[place, block, : conv.shape[2] - 2], wanted["conv0"][:, 1:].T)
                state = wanted["rec0"].swapaxes(1, 2) if mixer.kind in TRANSPOSED else wanted["rec0"]
                close(recurrent[place, block].reshape(state.shape), state)
            else:
                pool = np.concatenate([driver.kv.keys, driver.kv.values], -1)
                held = pool[place, pages].reshape(-1, *pool.shape[3:])[:37].swapaxes(0, 1)
                close(held, np.concatenate([wanted["k"], wanted["v"]], -1))
    assert passed


def check_logits(model, reference, **options):
    """Whole and chunked prompts, decode and verify rows, a slot that is used again, and one that resumes from a block."""
    tokens, logits = reference["tokens"][0].astype(np.int32), reference["logits"]
    long = reference["long_tokens"][0].astype(np.int32)
    driver = Driver(model, one_program=True, **options)
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


def test_logits_and_states(model, reference):
    check_logits(model, reference, implementation="xla")


@pytest.mark.gpu
def test_logits_and_states_of_kernels(model, reference):
    with jax.default_matmul_precision("highest"):
        check_logits(model, reference, implementation=None)


def test_engine(model, reference):
    """Greedy tokens of a chunked prompt, and of prompts that resume from its states and its continuation's."""
    prompt, tokens = reference["prompt"][0].tolist(), tuple(reference["tokens"][0].tolist())
    config = EngineConfig(
        block_size=32,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_state_blocks=12,
        num_kv_pages=24,
    )
    engine = Engine(model, config)
    (output,) = engine.generate(prompt, SamplingParams(max_tokens=32, ignore_eos=True))
    assert output.token_ids == tokens[37:]
    for length, cached in ((37, 32), (66, 64)):
        before = engine.stats.cached_tokens
        (output,) = engine.generate(tokens[:length], SamplingParams(max_tokens=3, ignore_eos=True))
        assert output.token_ids == tokens[length : length + 3]
        assert engine.stats.cached_tokens - before == cached
    assert engine.stats.null_reads == 0


@pytest.fixture(scope="module")
def dense():
    path = DATA / "qwen3_5_text"
    return path, dict(np.load(path / "reference.npz"))


def test_policy_that_copies(dense):
    check_logits(load_model(dense[0]), dense[1], policy="pre_copy")


def test_bfloat16(dense):
    path, reference = dense
    model = load_model(path, dtype="bfloat16")
    assert model.dtype == "bfloat16"
    logits = Driver(model, one_program=True).step(prefill={0: reference["tokens"][0].astype(np.int32)})[0]
    assert logits.dtype == np.float32
    # transformers' own bfloat16 logits differ from these by 0.02 (rms).
    assert np.sqrt(np.mean((logits - reference["logits"]) ** 2)) < 0.04
    # Logits rounded to bfloat16 would make ties of distinct ones.
    assert (logits != np.asarray(jax.numpy.asarray(logits, "bfloat16"), np.float32)).any()
