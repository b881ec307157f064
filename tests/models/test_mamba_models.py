"""Models with Mamba layers against Hugging Face transformers, or the recurrence in float64 where that is no reference.

transformers clamps the step sizes of Nemotron-H's prompts, as no other implementation does, and its Mamba-1 models start
again from zero when a prompt comes in pieces: its single pass over all tokens is right, but for Nemotron-H.
"""

import functools
import itertools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from models import float64, tiny
from models.driver import PAGE_SIZE, Driver
from safetensors.numpy import load_file, save_file

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.models import load_model

DATA = Path(__file__).parents[1] / "data"
ATOL = 1e-4


class Case:
    """A model, two token sequences, and what is right for each."""

    def __init__(self, path, tokens, long, decode=None, vocab=256):
        self.model, self.tokens, self.long = load_model(path), tokens, long
        self.vocab, self.logits_of, self.path = vocab, decode, path

    @functools.cached_property
    def logits(self):
        return self.logits_of(self.tokens)

    @functools.cached_property
    def long_logits(self):
        return self.logits_of(self.long)[-16:]

    def driver(self):
        # One program for all tests of a model: that rows of one kind alone run the same is tested without a model.
        return Driver(self.model, one_program=True)


def reference(name):
    return dict(np.load(DATA / name / "reference.npz"))


def oracle(name):
    arrays = reference(name)
    case = Case(DATA / name, *(arrays[key][0].astype(np.int32) for key in ("tokens", "long_tokens")))
    if name == "nemotron_h":
        config = json.loads((DATA / name / "config.json").read_text())
        tensors = {key: value.astype(np.float64) for key, value in load_file(DATA / name / "model.safetensors").items()}
        case.logits_of = functools.partial(float64.nemotron_h, config, tensors)
    else:
        case.logits, case.long_logits = arrays["logits"], arrays["long_last_logits"]
    return case


# Sizes, head ratios, layer patterns and options other than the published-like ones of the checkpoints above.
TINY = {
    "falcon_mamba": (tiny.falcon_mamba, float64.falcon_mamba),
    "jamba": (tiny.jamba, float64.jamba),
    "granitemoehybrid": (tiny.granitemoehybrid, float64.granitemoehybrid),
    "falcon_h1": (tiny.falcon_h1, float64.falcon_h1),
    "published nemotron_h": (tiny.nemotron_h, float64.nemotron_h),
}


@pytest.fixture(scope="module", params=["mamba", "mamba2", "nemotron_h", *TINY])
def case(request, tmp_path_factory):
    if request.param not in TINY:
        return oracle(request.param)
    make, decode = TINY[request.param]
    path = tmp_path_factory.mktemp("checkpoint")
    config, tensors = tiny.write(path, make)
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    tokens = np.random.default_rng(7).integers(0, tiny.VOCAB, 150, dtype=np.int32)
    return Case(path, tokens[:69], tokens, functools.partial(decode, config, tensors), tiny.VOCAB)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=ATOL, rtol=0)


def prefill(driver, slot, tokens, sizes):
    ends = np.cumsum(sizes)
    assert ends[-1] == len(tokens)
    return np.concatenate([driver.step(prefill={slot: part})[slot] for part in np.split(tokens, ends[:-1])])


@pytest.mark.parametrize("sizes", [(69,), (64, 5), (37, 32), (20, 3, 41, 5), (1, 1, 67)])
def test_prompt_in_chunks(case, sizes):
    logits = prefill(case.driver(), 0, case.tokens, sizes)
    close(logits, case.logits)
    assert 0.3 < np.std(case.logits) < 30
    assert logits.argmax(1).tolist() == case.logits.argmax(1).tolist()


@pytest.mark.parametrize("sizes", [(150,), (64, 64, 22), (90, 60)])
def test_prompt_of_several_chunks(case, sizes):
    close(prefill(case.driver(), 0, case.long, sizes)[-16:], case.long_logits)


def test_decode_and_verify(case):
    """Over a block boundary, by rows of one token and by drafts of which some are wrong."""
    driver, at = case.driver(), 37
    logits = [prefill(driver, 1, case.tokens[:at], (32, 5))]
    for accepted in itertools.cycle([1, 2, 1, 3, 3]):
        if at + 3 > len(case.tokens):
            break
        right = case.tokens[at : at + accepted]
        row = right if accepted == 1 and at % 2 else [*right, *((case.tokens[at + accepted : at + 3] + 1) % case.vocab)]
        logits.append(driver.step(decode={1: row}, accepted={1: accepted})[1][:accepted])
        at += accepted
    close(np.concatenate(logits), case.logits[:at])


def test_resumes_from_a_block_in_another_slot(case):
    """And a prompt in its middle beside a verify row, and a slot that is used again."""
    driver, tokens = case.driver(), case.tokens
    first = driver.step(prefill={0: tokens[:64], 2: case.long[:70]})
    close(first[0], case.logits[:64])
    driver.add(3, computed=64, like=0)
    out = driver.step(
        decode={0: [tokens[64], tokens[65], 7]}, prefill={3: tokens[64:67], 2: case.long[70:]}, accepted={0: 2}
    )
    close(out[0][:2], case.logits[64:66])
    close(out[3], case.logits[64:67])
    close(out[2][-16:], case.long_logits)
    driver.add(2)
    out = driver.step(decode={0: tokens[66:67], 3: tokens[67:68]}, prefill={2: tokens[:40]})
    close(out[0], case.logits[66:67])
    close(out[3], case.logits[67:68])
    close(out[2], case.logits[:40])


@pytest.mark.parametrize("sizes", [(37,), (32, 5), (11, 26)])
@pytest.mark.parametrize("name", ["mamba", "mamba2", "nemotron_h"])
def test_states_after_the_prompt(name, sizes):
    case, arrays = oracle(name), reference(name)
    driver = case.driver()
    prefill(driver, 2, case.tokens[:37], sizes)
    conv, recurrent = (np.asarray(pool)[:, driver.blocks(2)[1]] for pool in driver.pool.states[0])
    layers = [key.split("/L")[1].split(".")[0] for key in arrays if key.startswith("prompt_state") and "conv" in key]
    of = lambda part: np.stack([arrays[f"prompt_state/L{layer}.{part}"][0] for layer in layers])
    windows, states = of("conv0")[..., 1:].swapaxes(1, 2), of("rec0").reshape(recurrent.shape)
    if name == "nemotron_h":
        trace = []
        case.logits_of(case.tokens[:37], trace=trace)
        windows, states = (np.stack([layer[n][-k:] for layer in trace]) for n, k in ((0, 3), (1, 1)))
        states = states[:, 0]
        held = np.asarray(driver.kv.keys)[0, driver.pages[2, : -(-37 // PAGE_SIZE)]]
        close(held.reshape(-1, *held.shape[2:])[:37].swapaxes(0, 1), arrays["prompt_state/L3.k"][0])
    close(conv[:, :3], windows)
    close(recurrent, states)


def test_float64_is_transformers_but_for_the_clamp():
    case, arrays = oracle("nemotron_h"), reference("nemotron_h")
    np.testing.assert_allclose(case.logits_of(case.tokens, least_dt=1e-3), arrays["logits"], atol=1e-5)
    assert np.abs(case.logits - arrays["logits"]).max() > 1e-4


@pytest.mark.parametrize("name", ["mamba", "mamba2", "nemotron_h"])
def test_greedy_tokens_are_those_of_transformers(name):
    case, eos = oracle(name), 2
    # Those were generated without an end.
    assert np.delete(case.logits[36:-1], eos, axis=1).argmax(1).tolist() == [t - (t > eos) for t in case.tokens[37:]]


@pytest.mark.parametrize(("name", "theirs"), [("mamba", 9.2e-3), ("nemotron_h", 1.4e-2)])
def test_bfloat16(name, theirs):
    """The rms error is that of transformers' own bfloat16 logits."""
    case = oracle(name)
    case.model = load_model(DATA / name, "bfloat16")
    logits = prefill(case.driver(), 0, case.tokens, (69,))
    assert theirs / 4 < np.sqrt(np.mean((logits - case.logits) ** 2)) < 1.5 * theirs


def test_engine_without_attention():
    """States are named by pages of no bytes: what was computed is found again, by requests that are preempted as well."""
    case = oracle("mamba")
    config = EngineConfig(
        block_size=16, kv_page_size=16, num_state_blocks=6, max_model_len=128, max_num_seqs=2,
        max_num_batched_tokens=32, num_speculative_tokens=2, checked=True,
    )  # fmt: skip
    engine = Engine(case.model, config)
    assert engine.sizes.kv_page_bytes == 0
    tokens, cached = case.tokens.tolist(), []
    for begin, end in ((37, 69), (37, 69), (66, 69)):
        (output,) = engine.generate(tokens[:begin], SamplingParams(max_tokens=end - begin, ignore_eos=True))
        assert list(output.token_ids) == tokens[begin:end]
        cached.append(output.num_cached_tokens)
    assert cached == [0, 32, 64]
    outputs = engine.generate([tokens[:37], tokens[:21]], SamplingParams(max_tokens=32, ignore_eos=True))
    assert list(outputs[0].token_ids) == tokens[37:]
    assert engine.stats.preemptions > 0
    assert engine.stats.null_reads == 0


def test_names_in_memory(tmp_path):
    """transformers' own prefix in place of the published one."""
    shutil.copy(DATA / "mamba" / "config.json", tmp_path)
    tensors = load_file(DATA / "mamba" / "model.safetensors")
    renamed = {name.replace("backbone.", "model."): value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    models = load_model(tmp_path), load_model(DATA / "mamba")
    ours, theirs = (jax.tree.leaves(nnx.state(model, nnx.Param)) for model in models)
    assert all(map(np.array_equal, ours, theirs))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (tiny.falcon_mamba, {"hidden_act": "gelu"}, "hidden_act must be one of ('silu',), got 'gelu'"),
        (tiny.granitemoehybrid, {"layer_types": ["mamba"]}, "layer_types must name 3 layers"),
        (tiny.granitemoehybrid, {"position_embedding_type": "alibi"}, "position_embedding_type must be one of"),
        (tiny.falcon_h1, {"mlp_bias": True}, "mlp_bias must be one of (False,), got True"),
        (tiny.jamba, {"attn_layer_period": 1, "attn_layer_offset": 0}, "layers_block_type must name 4 layers"),
        (tiny.jamba, {"layer_types": ["mamba"] * 3}, "layers_block_type must name 4 layers"),
        (tiny.jamba, {"sliding_window": 128}, "sliding_window must be one of (), got 128"),
        (tiny.nemotron_h, {"hybrid_override_pattern": "MX"}, "layers_block_type must name layers of"),
        (tiny.nemotron_h, {"hybrid_override_pattern": "*-"}, "layers_block_type must name layers of"),
        (tiny.nemotron_h, {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be one of ('relu2',), got 'silu'"),
        (tiny.falcon_mamba, {"time_step_rank": 4}, "'backbone.layers.0.mixer.dt_proj.weight' must have shape [96, 4]"),
    ],
)
def test_configurations_that_are_not_supported(tmp_path, make, change, message):
    config, _ = tiny.write(tmp_path, make)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(tmp_path)


def test_options_change_what_is_loaded(tmp_path):
    """A norm in Falcon-H1's mixers, and Granite without experts."""
    for make, options in (
        (tiny.falcon_h1, {"mamba_rms_norm": True}),
        (tiny.granitemoehybrid, {"num_local_experts": 0}),
    ):
        _, tensors = tiny.write(tmp_path, make, **options)
        loaded = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(load_model(tmp_path), nnx.Param)))
        assert loaded == sum(value.size for value in tensors.values())
