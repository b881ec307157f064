"""Models with Mamba layers and no reference agree with the recurrence in float64; and what only Mamba models do."""

import functools
import itertools
import json
import re
import shutil
from typing import NamedTuple

import depth
import jax
import numpy as np
import pytest
from fakes import weights
from fakes.driver import DATA, Driver, close, every_split
from flax import nnx
from oracles import models as oracles
from safetensors.numpy import load_file, save_file

from mamba_align_jax import StatePool
from mamba_align_jax.kv import KVPages
from mamba_align_jax.models import load_model
from mamba_align_jax.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")


class Case(NamedTuple):
    """A model, two token sequences, and the right logits of each."""

    model: CausalLM
    tokens: np.ndarray
    logits: np.ndarray
    long: np.ndarray
    long_logits: np.ndarray

    def driver(self):
        # At the quick depth most models run no decode rows, and so need not compile them.
        return Driver(self.model, one_program=depth.is_full())


# Their sizes, head ratios, layer patterns and options differ from those of the models in tests/data.
TINY = {
    "falcon_mamba": (weights.falcon_mamba, oracles.falcon_mamba),
    "jamba": (weights.jamba, oracles.jamba),
    "granitemoehybrid": (weights.granitemoehybrid, oracles.granitemoehybrid),
    "falcon_h1": (weights.falcon_h1, oracles.falcon_h1),
    "zamba2": (weights.zamba2, oracles.zamba2),
    "published nemotron_h": (weights.nemotron_h, oracles.nemotron_h),
}


@pytest.fixture(scope="module", params=TINY)
def case(request, tmp_path_factory):
    make, decode = TINY[request.param]
    path = tmp_path_factory.mktemp("checkpoint")
    weights.write(path, make)
    long = np.random.default_rng(7).integers(0, weights.VOCAB, 150, dtype=np.int32)
    decode = functools.partial(decode, *oracles.read(path))
    return Case(load_model(path), long[:69], decode(long[:69]), long, decode(long)[-16:])


def prefill(driver, slot, tokens, sizes):
    ends = np.cumsum(sizes)
    assert ends[-1] == len(tokens)
    return np.concatenate([driver.step(prefill={slot: part})[slot] for part in np.split(tokens, ends[:-1])])


@pytest.mark.parametrize("sizes", [(69,), (64, 5), (20, 3, 41, 5)])
def test_prompt_in_chunks_matches_the_oracle(case, sizes):
    logits = prefill(case.driver(), 0, case.tokens, sizes)
    close(logits, case.logits)
    assert 0.3 < np.std(case.logits) < 30
    assert logits.argmax(1).tolist() == case.logits.argmax(1).tolist()


def test_every_split_of_a_prompt_matches_the_oracle(case):
    for driver, slot, logits in every_split(case.model, case.tokens[:37]):
        close(logits, case.logits[:37])
        close(driver.step(decode={slot: case.tokens[37:40]})[slot], case.logits[37:40])


@pytest.mark.parametrize("sizes", [(150,), (90, 60)])
def test_prompt_of_several_chunks_matches_the_oracle(case, sizes):
    close(prefill(case.driver(), 0, case.long, sizes)[-16:], case.long_logits)


def test_decode_and_verify_rows_match_the_oracle(case):
    """The rows pass a block boundary with single tokens and with drafts, some of them wrong."""
    driver, at = case.driver(), 37
    logits = [prefill(driver, 1, case.tokens[:at], (32, 5))]
    for accepted in itertools.cycle([1, 2, 1, 3, 3]):
        if at + 3 > len(case.tokens):
            break
        right = case.tokens[at : at + accepted]
        row = (
            right
            if accepted == 1 and at % 2
            else [*right, *((case.tokens[at + accepted : at + 3] + 1) % weights.VOCAB)]
        )
        logits.append(driver.step(decode={1: row}, accepted={1: accepted})[1][:accepted])
        at += accepted
    close(np.concatenate(logits), case.logits[:at])


def test_request_resumes_from_a_block_of_another_slot(case):
    """A prompt runs in two chunks next to a verify row, and a slot is used again."""
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


@pytest.mark.gpu
def test_compiled_kernels_match_the_oracle(case):
    with jax.default_matmul_precision("highest"):
        test_prompt_in_chunks_matches_the_oracle(case, (20, 3, 41, 5))
        test_prompt_of_several_chunks_matches_the_oracle(case, (90, 60))
        test_decode_and_verify_rows_match_the_oracle(case)
        test_request_resumes_from_a_block_of_another_slot(case)


def test_oracle_is_transformers_except_for_the_clamp():
    arrays = dict(np.load(DATA / "nemotron_h" / "reference.npz"))
    decode = functools.partial(oracles.nemotron_h, *oracles.read(DATA / "nemotron_h"), arrays["tokens"][0])
    np.testing.assert_allclose(decode(min_dt=1e-3), arrays["logits"], atol=1e-5)
    assert np.abs(decode() - arrays["logits"]).max() > 1e-4
    # transformers generated its tokens without an end token. The sequences differ from the first one on.
    mended = oracles.without_clamp(DATA / "nemotron_h", arrays)["tokens"][0]
    assert arrays["tokens"][0][:48].tolist() == mended[:48].tolist()
    assert mended[48] == 2


def test_bfloat16_logits_are_close():
    """The bfloat16 logits of transformers have an rms error of 0.0092."""
    arrays = np.load(DATA / "mamba" / "reference.npz")
    driver = Driver(load_model(DATA / "mamba", "bfloat16"))
    logits = prefill(driver, 0, arrays["tokens"][0].astype(np.int32), (69,))
    assert 0.002 < np.sqrt(np.mean((logits - arrays["logits"]) ** 2)) < 0.012


class Probe(nnx.Module):
    """A layer without mixers, which records the dtype of its inputs."""

    mixers = ()

    def __call__(self, x, step, carry):
        self.taken = str(x.settled().dtype)
        return x, carry


@pytest.mark.parametrize(
    ("name", "residual"), [("mamba", "float32"), ("mamba2", "float32"), ("nemotron_h", "bfloat16")]
)
def test_residual_stream_has_the_dtype_of_the_configuration(name, residual):
    """The residual stream of a bfloat16 model is float32 if config.json says `residual_in_fp32`."""
    model = load_model(DATA / name, "bfloat16")
    model.layers = nnx.List([Probe()])
    hidden, *_ = model(jax.numpy.arange(3), None, StatePool(states=()), KVPages.create(model.kv_spec(), 2, 16))
    assert (model.layers[0].taken, hidden.dtype) == (residual, "bfloat16")


def test_names_of_transformers_load(tmp_path):
    """transformers has another prefix than the published weights."""
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
        (weights.falcon_mamba, {"hidden_act": "gelu"}, "hidden_act must be one of ('silu',), got 'gelu'"),
        (weights.granitemoehybrid, {"layer_types": ["mamba"]}, "layer_types must name num_hidden_layers = 3 layers"),
        (weights.granitemoehybrid, {"position_embedding_type": "alibi"}, "position_embedding_type must be one of"),
        (weights.falcon_h1, {"mlp_bias": True}, "mlp_bias must be one of (False,), got True"),
        (weights.jamba, {"attn_layer_period": 1, "attn_layer_offset": 0}, "layer_types must have a 'mamba' layer"),
        (weights.jamba, {"layer_types": ["mamba"] * 3}, "layer_types must name num_hidden_layers = 4 layers"),
        (weights.zamba2, {"hidden_act": "silu"}, "hidden_act must be one of ('gelu',), got 'silu'"),
        (weights.zamba2, {"use_long_context": True}, "use_long_context must be one of (False,), got True"),
        (weights.zamba2, {"layers_block_type": ["mamba"] * 3}, "layer_types must name num_hidden_layers = 4 layers"),
        (weights.zamba2, {"layers_block_type": None}, "config.json must have 'layers_block_type'"),
        (weights.zamba2, {"num_attention_heads": 7}, "2 * hidden_size must be a multiple of num_attention_heads = 7"),
        (weights.jamba, {"sliding_window": 128}, "sliding_window must be one of (), got 128"),
        (weights.nemotron_h, {"hybrid_override_pattern": "MX"}, "layers_block_type must name layers of"),
        (weights.nemotron_h, {"hybrid_override_pattern": "*-"}, "layers_block_type must name layers of"),
        (weights.nemotron_h, {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be one of ('relu2',), got 'silu'"),
        (
            weights.falcon_mamba,
            {"time_step_rank": 4},
            "'backbone.layers.0.mixer.dt_proj.weight' must have shape [96, 4]",
        ),
    ],
)
def test_unsupported_configuration_is_refused(tmp_path, make, change, message):
    config, _ = weights.write(tmp_path, make)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(tmp_path)


def test_options_change_what_is_loaded(tmp_path):
    """Falcon-H1's mixers may have a norm, and Granite may have no experts."""
    for make, options in (
        (weights.falcon_h1, {"mamba_rms_norm": True}),
        (weights.granitemoehybrid, {"num_local_experts": 0}),
        (weights.zamba2, {"num_mem_blocks": 2}),
    ):
        _, tensors = weights.write(tmp_path, make, **options)
        loaded = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(load_model(tmp_path), nnx.Param)))
        assert loaded == sum(value.size for value in tensors.values())
