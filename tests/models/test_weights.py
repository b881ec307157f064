"""Models are read from and written to Hugging Face folders; a refusal names what is wrong."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fakes import delta_net_weights, weights
from fakes.draft_head_weights import head_tensors
from fakes.driver import DATA
from flax import nnx
from safetensors.numpy import load_file, save_file

from mamba_align_jax.kv import KVSpec
from mamba_align_jax.models import load_model, qwen3_5
from mamba_align_jax.models.weights import save_weights

CHECKPOINT = DATA / "qwen3_5_text"
EMBEDDING, NORM = "model.embed_tokens.weight", "model.layers.1.linear_attn.norm.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"


@pytest.fixture(scope="module")
def tensors():
    return load_file(CHECKPOINT / "model.safetensors")


@pytest.fixture
def write(tmp_path, tensors):
    """Writes the model with changed fields of its configuration and changed tensors; None removes one."""

    def write(config=None, change=None, nest=False, rename=None):
        fields = json.loads((CHECKPOINT / "config.json").read_text()) | (config or {})
        fields = {name: value for name, value in fields.items() if value is not None}
        if nest:
            fields = {"model_type": "qwen3_5", "text_config": fields, "vision_config": {}}
        (tmp_path / "config.json").write_text(json.dumps(fields))
        changed = {name: value for name, value in (tensors | (change or {})).items() if value is not None}
        save_file({(rename or str)(name): value for name, value in changed.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write


def same(model, other):
    a, b = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, other))
    return len(a) == len(b) and all(x.dtype == y.dtype and jnp.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT)


def test_configuration_gives_states_and_pages(model):
    assert (model.dtype, model.kv_spec()) == ("float32", KVSpec(1, 2, 32, 32, "float32"))
    assert (model.config.eos_token_id, model.config.max_position_embeddings, model.config.vocab_size) == (2, 1024, 256)
    (group,) = model.state_groups("bfloat16")
    conv, recurrent = group.states
    assert (group.name, group.num_layers) == ("gdn", 3)
    assert (conv.width, conv.channels, conv.dtype) == (4, 192, "float32")
    assert (recurrent.shape, recurrent.dtype) == ((4, 32, 16), "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, f"tensor '{NORM}' is missing, 1 in all"),
        ({NORM: np.zeros(31, np.float32)}, f"tensor '{NORM}' must have shape [32], got [31]"),
        ({CONV: np.zeros((191, 1, 4), np.float32)}, f"tensor '{CONV}' must have shape [192, 1, 4], got [191, 1, 4]"),
        (
            {EMBEDDING: np.zeros((256, 65), np.float32)},
            f"tensor '{EMBEDDING}' must have shape [256, 64], got [256, 65]",
        ),
        (
            {"model.layers.4.mlp.up_proj.weight": np.zeros(2, np.float32)},
            "'model.layers.4.mlp.up_proj.weight' has no place",
        ),
    ],
)
def test_tensor_that_does_not_fit_is_refused(write, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(write(change=change))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen9"}, "], got 'qwen9'"),
        ({"model_type": None}, "got None"),
        ({"hidden_size": None}, "config.json must have 'hidden_size'"),
        ({"hidden_act": "gelu"}, "hidden_act must be one of ('silu',), got 'gelu'"),
        ({"attention_bias": True}, "attention_bias must be one of (False,), got True"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings must be one of (False,), got True"),
        ({"num_experts": 8}, "config.json must have 'num_experts_per_tok'"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_type must be one of ('default', 'linear', "),
        ({"rope_scaling": {"type": "yarn"}}, "a rotation of rope_type 'yarn' must have 'factor'"),
        ({"attn_output_gate": False}, "attn_output_gate must be one of (True,), got False"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type must be one of ('silu', 'swish'), got 'sigmoid'"),
        ({"layer_types": ["linear_attention"]}, "layer_types must name num_hidden_layers = 4 layers"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types must have a 'linear_attention' layer"),
        ({"dtype": "float64"}, "dtype must be one of ('float32', 'bfloat16', 'float16'), got 'float64'"),
    ],
)
def test_unsupported_configuration_is_refused(write, config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_model(write(config))


def test_missing_file_is_refused(tmp_path, write):
    with pytest.raises(ValueError, match=re.escape("must hold a config.json")):
        load_model(tmp_path / "nowhere")
    (write() / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape("must hold model.safetensors")):
        load_model(tmp_path)


def test_published_names_load(model, write):
    """The hub nests the text model, with the prefix `model.language_model.`, next to a draft head and a vision tower."""
    extra = {"mtp.norm.weight": np.ones(3, np.float32), "model.visual.pos_embed.weight": np.ones(3, np.float32)}
    outside = ("lm_head.", *extra)
    rename = lambda name: name if name.startswith(outside) else name.replace("model.", "model.language_model.", 1)
    path = write({"mtp_num_hidden_layers": 0}, extra, nest=True, rename=rename)
    assert same(load_model(path), model)


def test_draft_head_is_loaded_if_there_is_one(tmp_path, write):
    named, head = {"mtp_num_hidden_layers": 1}, head_tensors(json.loads((CHECKPOINT / "config.json").read_text()))
    model = load_model(write(named, head))
    assert np.array_equal(model.mtp.fc.weight[...], head["mtp.fc.weight"])
    save_weights(model, qwen3_5, tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(np.array_equal(saved[name], value) for name, value in head.items())
    assert same(load_model(tmp_path / "saved"), model)
    assert same(load_model(write({"mtp_num_hidden_layers": None}, head)), model)
    fields = json.loads((tmp_path / "saved" / "config.json").read_text()) | {"mtp_num_hidden_layers": None}
    (tmp_path / "saved" / "config.json").write_text(json.dumps(fields))
    assert same(load_model(tmp_path / "saved"), model)
    assert load_model(write({"mtp_num_hidden_layers": 0}, head)).mtp is None
    without = load_model(write(named))
    assert without.mtp is None
    assert without.config.mtp_num_hidden_layers == 0
    with pytest.raises(ValueError, match=r"mtp_num_hidden_layers must be one of \(0, 1\), got 2"):
        load_model(write({"mtp_num_hidden_layers": 2}, head))
    with pytest.raises(ValueError, match=r"tensor 'mtp.norm.weight' is missing, 1 in all"):
        load_model(write(named, head | {"mtp.norm.weight": None}))
    with pytest.raises(ValueError, match=r"tensor 'mtp.extra.weight' has no place"):
        load_model(write(named, head | {"mtp.extra.weight": np.ones(3, np.float32)}))


def test_nested_configuration_takes_the_outer_fields(tensors, write):
    moved = dict.fromkeys(("model_type", "eos_token_id", "tie_word_embeddings"))
    path = write(moved, {"lm_head.weight": None}, nest=True)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True, "eos_token_id": [9, 10]}))
    tied = load_model(path)
    assert tied.lm_head is None
    assert tied.config.eos_token_id == (9, 10)
    hidden = jnp.eye(2, 64)
    np.testing.assert_allclose(tied.logits(hidden), tensors[EMBEDDING].T[:2], rtol=1e-6)


def test_head_that_equals_tied_embeddings_is_left_out(write, tensors, caplog):
    assert load_model(write({"tie_word_embeddings": True}, {"lm_head.weight": tensors[EMBEDDING]})).lm_head is None
    assert caplog.text == ""


def test_head_that_differs_from_tied_embeddings_is_used_with_a_warning(write, model, tensors, caplog):
    """Adapters that were merged into a model with tied embeddings leave such heads. Other loaders use them as well."""
    path = write({"tie_word_embeddings": True})
    untied = load_model(path)
    assert f"{path}: tie_word_embeddings is true, but lm_head.weight differs from the embeddings" in caplog.text
    assert same(untied, model)
    assert untied.config.tie_word_embeddings is False
    hidden = jnp.eye(2, 64)
    np.testing.assert_allclose(untied.logits(hidden), tensors["lm_head.weight"].T[:2], rtol=1e-6)
    nearly = tensors[EMBEDDING].copy()
    nearly[-1, -1] += 1
    assert load_model(write({"tie_word_embeddings": True}, {"lm_head.weight": nearly})).lm_head is not None


def test_weights_in_several_files_load(model, tensors, tmp_path):
    shutil.copy(CHECKPOINT / "config.json", tmp_path)
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same(load_model(tmp_path), model)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="must hold model-00002-of-00002"):
        load_model(tmp_path)


@pytest.mark.parametrize(("stored", "asked", "got"), [("bfloat16", None, "bfloat16"), ("float32", "bfloat16", "bfloat16"),
                                                      ("bfloat16", "float32", "float32")])  # fmt: skip
def test_weights_have_the_dtype_that_was_asked_for(tensors, write, stored, asked, got):
    change = {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()} if stored == "bfloat16" else {}
    model = load_model(write({"dtype": stored}, change), dtype=asked)
    assert model.dtype == got
    assert model.embed_tokens.embedding[...].dtype == got
    assert model.layers[0].linear_attn.in_proj_qkvzba.weight[...].dtype == got
    rounded = tensors[EMBEDDING].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(np.asarray(model.embed_tokens.embedding[...], np.float32), rounded)
    # Vectors are used in float32 arithmetic only.
    assert model.layers[0].linear_attn.A_log[...].dtype == "float32"


def test_tensors_of_one_parameter_may_have_different_dtypes(write, tensors, tmp_path):
    """Each is converted from its own dtype to that of the model, so none is rounded to another one's."""
    projection = "model.layers.0.linear_attn.in_proj_{}.weight"
    change = {projection.format("z"): np.float16, projection.format("b"): ml_dtypes.bfloat16}
    model = load_model(write(change={name: tensors[name].astype(dtype) for name, dtype in change.items()}), "float32")
    found = np.split(np.asarray(model.layers[0].linear_attn.in_proj_qkvzba.weight[...]), [
        sum(len(tensors[projection.format(part)]) for part in ("qkv", "z", "b", "a")[:count]) for count in (1, 2, 3)
    ])  # fmt: skip
    for part, array in zip(("qkv", "z", "b", "a"), found, strict=True):
        name = projection.format(part)
        assert np.array_equal(array, tensors[name].astype(change.get(name, np.float32)).astype(np.float32))
    path = tmp_path / "experts"
    path.mkdir()
    weights.write(path, functools.partial(delta_net_weights.qwen3_5_moe, fused=False))
    tensors = load_file(path / "model.safetensors")
    first, second = (f"model.layers.0.mlp.experts.{number}.down_proj.weight" for number in (0, 1))
    save_file(tensors | {first: tensors[first].astype(ml_dtypes.bfloat16)}, path / "model.safetensors")
    assert np.array_equal(load_model(path, "float32").layers[0].mlp.experts.down[...][1], tensors[second])


def test_a_model_is_not_saved_where_other_weights_would_be_loaded(tmp_path, model):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"path must be a directory without model.safetensors.index.json, got"):
        save_weights(model, qwen3_5, tmp_path)
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_model_loads_unchanged(tmp_path, tensors, dtype):
    model = load_model(CHECKPOINT, dtype)
    save_weights(model, qwen3_5, tmp_path)
    again = load_model(tmp_path)
    assert again.config == model.config
    assert same(again, model)
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: value.shape for name, value in saved.items()} == {name: v.shape for name, v in tensors.items()}
    if dtype == "float32":
        assert all(np.array_equal(saved[name], tensors[name]) for name in tensors)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "qwen3_5_text"
    assert config["rope_parameters"]["rope_theta"] == 1e7
