"""A broken file gets one clear line with its name and that of the field or the tensor, and the command line status 2."""

import functools
import itertools
import json
import re
import struct

import numpy as np
import pytest
from fakes import delta_net_weights, weights
from fakes.driver import DATA
from fakes.model_directory import INDEX, WEIGHTS, ModelDirectory
from safetensors.numpy import load_file, save_file

from mamba_align_jax.cli.commands import main
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.engine.text.tokenizer import load_tokenizer
from mamba_align_jax.models import ARCHITECTURES, load_model, outline_model
from mamba_align_jax.models.config_files import (
    read_config,
    read_generation_config,
    read_sampling_defaults,
    read_tokenizer_end,
)
from mamba_align_jax.models.weights import find_tensors, has_draft_head, stored_dtype

CONV = "backbone.layers.0.mixer.conv1d.weight"


@pytest.fixture
def directory(tmp_path):
    return ModelDirectory(DATA / "mamba", tmp_path)


def refused(path, message, capsys):
    """Asserts that the library, an outline and the command line refuse the directory in one line."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        load_model(path)
    field = re.match(r"config\.json: (\w+) must ", message)
    if field:
        assert (raised.value.owner, raised.value.field) == ("config.json", field[1])
    assert main(["generate", "--prompt", "x", "--model", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mamba-align: ")
    assert message in error
    assert error.count("\n") == 1


def header(text, data=b""):
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    return struct.pack("<Q", len(text)) + text + data


TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BROKEN = {
    "empty": (b"", "0 bytes that are empty"),
    "short": (b"\x01\x02", "2 bytes that are empty"),
    "garbage": (bytes(range(100, 200)), "100 bytes that are empty, cut off or something else"),
    "git-lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a git-lfs pointer"),
    "no JSON": (header(b"{'a': 1}"), "a header that is no JSON object"),
    "no text": (header(b"\xff\xfe{}"), "a header that is no JSON object"),
    "deep": (header(b"[" * 200_000), "a header that is no JSON object"),
    "a list": (header([1]), "a header that is no JSON object"),
    "no offsets": (
        header({"a": {"dtype": "F32", "shape": [2]}}),
        "tensor 'a' without a dtype, a shape or data_offsets",
    ),
    "no object": (header({"a": 1}), "tensor 'a' without a dtype"),
    "a name as shape": (header({"a": TENSOR | {"shape": "2"}}, bytes(8)), "tensor 'a' without a dtype"),
    "negative": (header({"a": TENSOR | {"shape": [-2]}}, bytes(8)), "tensor 'a' without a dtype"),
    "huge": (header({"a": TENSOR | {"shape": [2**62]}}, bytes(8)), "tensor 'a' without a dtype"),
    "dtype": (header({"a": TENSOR | {"dtype": "F4"}}, bytes(8)), "tensor 'a' of dtype F4, which can't be read"),
    "size": (header({"a": TENSOR | {"shape": [3]}}, bytes(8)), "tensor 'a' in 8 bytes instead of 12"),
    "overlap": (header({"a": TENSOR, "b": TENSOR}, bytes(8)), "tensor 'b' at byte"),
    "hole": (header({"a": TENSOR | {"data_offsets": [4, 12]}}, bytes(12)), "tensor 'a' at byte"),
    "cut off": (header({"a": TENSOR}, bytes(7)), "it is cut off or too long"),
    "too long": (header({"a": TENSOR}, bytes(9)), "it is cut off or too long"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_file_that_is_no_safetensors_file_is_refused(directory, capsys, case):
    data, message = BROKEN[case]
    (directory.path / WEIGHTS).write_bytes(data)
    refused(directory.path, f"{WEIGHTS} must be a safetensors file, got", capsys)
    refused(directory.path, message, capsys)


@pytest.mark.parametrize("kept", [7, 100, -1])
def test_truncated_weights_are_refused(directory, capsys, kept):
    whole = (directory.path / WEIGHTS).read_bytes()
    (directory.path / WEIGHTS).write_bytes(whole[:kept])
    refused(directory.path, "cut off", capsys)


def test_weights_that_shrink_after_their_header_was_read_are_refused(directory):
    from mamba_align_jax.models.tensor_files import stored_tensors

    found = stored_tensors(directory.path)
    (directory.path / WEIGHTS).write_bytes((directory.path / WEIGHTS).read_bytes()[:-4])
    last = max(found.values(), key=lambda tensor: tensor.start)
    with pytest.raises(ValueError, match=f"tensor '{last.name}' is cut off"):
        last.read()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', "\x00", "null", "[" * 200_000])
def test_json_file_that_holds_no_object_is_refused(directory, capsys, name, text):
    (directory.path / name).write_text(text)
    refused(directory.path, f"{name} must hold a JSON object, got", capsys)


@pytest.mark.parametrize("index", [{}, {"weight_map": None}, {"weight_map": [WEIGHTS]}, {"weight_map": {"a": 1}}])
def test_index_without_weight_map_is_refused(directory, capsys, index):
    directory.write_json(INDEX, index)
    refused(directory.path, f"{INDEX}: weight_map must be an object that names the file of each tensor", capsys)


def test_index_that_names_other_directories_or_wrong_files_is_refused(directory, capsys):
    for name in (f"../{WEIGHTS}", "", ".."):
        directory.write_json(INDEX, {"weight_map": {CONV: name}})
        refused(directory.path, f"{INDEX}: weight_map must name files of the same directory, got {name!r}", capsys)
    directory.write_json(INDEX, {"weight_map": {"backbone.extra": WEIGHTS}})
    refused(directory.path, f"{INDEX}: weight_map must name the file that holds 'backbone.extra'", capsys)


def test_index_that_is_a_link_to_nothing_is_refused(directory, capsys):
    (directory.path / INDEX).symlink_to(directory.path / "none")
    refused(directory.path, f"{INDEX} must be a file, got a link to nothing", capsys)


def cut(array, axis, change=-1):
    """Returns an array of another size along an axis."""
    return np.resize(array, (*array.shape[:axis], array.shape[axis] + change, *array.shape[axis + 1 :]))


EXPERT, SHARED = "model.layers.0.mlp.experts.1.{}_proj.weight", "model.layers.0.mlp.shared_expert.{}_proj.weight"
MOE = functools.partial(delta_net_weights.qwen3_5_moe, fused=False)
OLMO = "model.layers.0.linear_attn.{}_conv1d.weight"
# Tensors of which a parameter is made together, and changes to some after which the parameter would have its shape.
TOGETHER = {
    "an expert of one channel": (MOE, {EXPERT.format("down"): lambda array: array[:, :1]}),
    "a vector as expert": (MOE, {EXPERT.format("down"): lambda array: array[0]}),
    "rows of up in gate": (
        MOE,
        {EXPERT.format("gate"): lambda array: cut(array, 0), EXPERT.format("up"): lambda array: cut(array, 0, 1)},
    ),
    "a short shared expert": (MOE, {SHARED.format("gate"): lambda array: cut(array, 0)}),
    "a short shared product": (MOE, {SHARED.format("down"): lambda array: cut(array, 1)}),
    "two planes of taps": (delta_net_weights.olmo_hybrid, {OLMO.format("k"): lambda array: cut(array, 1, 1)}),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_tensors_whose_shapes_do_not_fit_together_are_refused(tmp_path, capsys, case):
    make, changes = TOGETHER[case]
    weights.write(tmp_path, make)
    load_model(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    changed = {name: np.ascontiguousarray(change(tensors[name])) for name, change in changes.items()}
    save_file(tensors | changed, tmp_path / WEIGHTS)
    refused(tmp_path, "must make an array of shape", capsys)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pickled_weights_are_refused_with_the_way_to_convert_them(directory, capsys, name):
    (directory.path / WEIGHTS).rename(directory.path / name)
    refused(directory.path, "pytorch_model.bin, which is a pickle and may run code; convert it", capsys)


SIZES = ["64", 64.0, 0, -64, True, [64], {}, 2**40, 1e400]


@pytest.mark.parametrize("value", SIZES, ids=repr)
@pytest.mark.parametrize(
    "name", ["hidden_size", "vocab_size", "num_hidden_layers", "state_size", "max_position_embeddings"]
)
def test_size_that_is_no_positive_integer_is_refused(directory, capsys, name, value):
    directory.write_config(**{name: value})
    refused(directory.path, f"config.json: {name} must be an integer from 1 to", capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": ["mamba"]}, "model_type must be one of"),
        ({"model_type": 3}, "model_type must be one of"),
        ({"layer_norm_epsilon": "1e-5"}, "layer_norm_epsilon must be a finite number, got"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon must be a finite number, got NaN"),
        ({"layer_norm_epsilon": 10**400}, "layer_norm_epsilon must be a finite number, got"),
        ({"layer_norm_epsilon": -1.0}, "layer_norm_epsilon must be above 0, got -1.0"),
        ({"use_conv_bias": "yes"}, "use_conv_bias must be true or false, got"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, got 1"),
        ({"time_step_rank": "some"}, "time_step_rank must be an integer from 1 to 16777216, got"),
        ({"expand": "2", "intermediate_size": ...}, "expand must be a finite number, got"),
        ({"expand": 0, "intermediate_size": ...}, "expand must be above 0, got 0"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer from 0 to 2147483647 or a list of integers"),
        ({"eos_token_id": [2, None]}, "eos_token_id must be an integer from 0 to 2147483647 or a list of integers"),
        ({"eos_token_id": -1}, "eos_token_id must be an integer from 0 to 2147483647 or a list of integers"),
        ({"text_config": "a"}, "text_config must be an object, got 'a'"),
        ({"text_config": [1]}, "text_config must be an object, got [1]"),
        ({"dtype": ["float32"]}, "dtype must be"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object, got 'fp8'"),
    ],
)  # fmt: skip
def test_field_of_a_wrong_type_is_refused(directory, capsys, change, message):
    directory.write_config(**change)
    refused(directory.path, f"config.json: {message}", capsys)


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (weights.jamba, {"attn_layer_period": 0}, "attn_layer_period must be an integer from 1 to 16777216, got 0"),
        (weights.jamba, {"num_key_value_heads": 7}, "num_attention_heads must be a multiple of num_key_value_heads = 7"),
        (weights.jamba, {"num_experts_per_tok": 99}, "num_experts_per_tok must be from 1 to num_experts ="),
        (weights.jamba, {"num_experts_per_tok": 0}, "num_experts_per_tok must be from 1 to num_experts ="),
        (weights.granitemoehybrid, {"num_experts_per_tok": 99}, "num_experts_per_tok must be from 1 to num_local_experts ="),
        (weights.granitemoehybrid, {"logits_scaling": 0}, "logits_scaling must be above 0, got 0"),
        (weights.granitemoehybrid, {"layer_types": "mamba"}, "layer_types must be a list of strings, got"),
        (weights.granitemoehybrid, {"mamba_n_groups": 5}, "mamba_n_heads must be a multiple of mamba_n_groups = 5"),
        (weights.falcon_h1, {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 finite numbers, got [1.0]"),
        (weights.falcon_h1, {"mlp_multipliers": "ab"}, "mlp_multipliers must be a list of 2 finite numbers"),
        (weights.falcon_h1, {"num_attention_heads": 2**24}, "num_attention_heads must be an integer from 1 to 4096, got"),
        (weights.falcon_h1, {"rope_theta": -1}, "rope_theta must be above 0, got -1"),
        (weights.falcon_h1, {"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
        (weights.falcon_h1, {"rope_parameters": {"rope_theta": "1"}}, "rope_theta must be a finite number, got"),
        (weights.nemotron_h, {"hybrid_override_pattern": 5}, "hybrid_override_pattern must be a string, got 5"),
        (weights.nemotron_h, {"num_experts_per_tok": 99}, "num_experts_per_tok must be from 1 to n_routed_experts ="),
        (weights.nemotron_h, {"moe_intermediate_size": 0}, "moe_intermediate_size must be at least 1 for n_routed"),
        (weights.nemotron_h, {"moe_intermediate_size": None}, "moe_intermediate_size must be at least 1 for n_routed"),
        (weights.nemotron_h, {"n_group": 0}, "n_group must be an integer from 1 to 16777216, got 0"),
        (weights.nemotron_h, {"n_routed_experts": 8, "n_group": 8}, "n_group must cut 8 experts into groups of two or more"),
        (weights.nemotron_h, {"n_routed_experts": 8, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 4},
         "num_experts_per_tok must be at most 2, those of topk_group groups, got 4"),
        (weights.nemotron_h, {"sliding_window": 4096}, "sliding_window must be one of (), got 4096"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_together_are_refused(tmp_path, capsys, make, change, message):
    config, _ = weights.write(tmp_path, make)
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    refused(tmp_path, f"config.json: {message}", capsys)


def test_a_tensor_that_no_memory_could_hold_is_refused_by_its_shape(tmp_path, capsys):
    config, _ = weights.write(tmp_path, weights.falcon_h1)
    config |= {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 2**16}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must have shape \[\d+, 268435456\], got"):
        load_model(tmp_path)


@pytest.mark.parametrize("path", [None, 5, b"x", ["x"]], ids=repr)
def test_a_path_of_another_type_is_refused_by_every_function_that_takes_one(path):
    readers = (load_model, outline_model, load_tokenizer, load_chat_template, read_config, read_generation_config)
    for read in (*readers, read_sampling_defaults, read_tokenizer_end, find_tensors, has_draft_head, stored_dtype):
        with pytest.raises(ValueError, match="path must be str or Path, got"):
            read(path)


VALUES = ["a", "auto", 1.5, 0, -1, True, [], {}, 2**24, 2**40, 4096, 3, 7, [1, 2], ["a"], {"a": 1}, 1e-300, -0.5]
FAMILIES = {
    **{path.parent.name: path for path in sorted(DATA.glob("*/config.json"))},
    **{
        make.__name__: make
        for make in (weights.falcon_mamba, weights.jamba, weights.granitemoehybrid, weights.falcon_h1)
    },
}


def fields_of(name):
    given = FAMILIES[name]
    return weights.SHARED | given()[0] if callable(given) else json.loads(given.read_text())


def refusal(function, *arguments):
    """What the ValueError says that a call raises; None if it raises nothing."""
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", FAMILIES)
def test_any_value_of_any_field_is_taken_or_refused_by_name(name):
    config = fields_of(name)
    make = ARCHITECTURES[config["model_type"]].Config.from_dict
    for field, value in itertools.product(config, VALUES):
        said = refusal(make, config | {field: value})
        assert said is None or said.startswith("config.json"), (field, value)


@pytest.mark.deep
@pytest.mark.parametrize("name", FAMILIES)
def test_configuration_that_is_taken_makes_a_model_or_names_a_tensor(name, tmp_path):
    config = fields_of(name)
    if callable(FAMILIES[name]):
        weights.write(tmp_path, FAMILIES[name])
    else:
        ModelDirectory(FAMILIES[name].parent, tmp_path)
    make, tried = ARCHITECTURES[config["model_type"]].Config.from_dict, set()
    for field, value in itertools.product(config, (0, 3, 7, 4096, 1e-300, [1, 2], True)):
        changed = config | {field: value}
        if refusal(make, changed) is None and make(changed) not in tried:
            tried.add(make(changed))
            (tmp_path / "config.json").write_text(json.dumps(changed))
            said = refusal(outline_model, tmp_path)
            assert said is None or re.match(r"config\.json|tensor", said), (field, value)


def test_more_layers_than_the_files_have_are_refused(directory, capsys):
    directory.write_config(num_hidden_layers=4000)
    refused(directory.path, "num_hidden_layers must be at most the number of layers in the files, 3, got 4000", capsys)


def test_buffer_of_the_rotation_is_ignored(directory):
    stray = {"backbone.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    directory.write_tensors(directory.tensors | stray)
    load_model(directory.path)


def test_tensor_of_integers_is_refused(directory, capsys):
    directory.write_tensors(directory.tensors | {CONV: directory.tensors[CONV].astype(np.int8)})
    refused(directory.path, f"tensor '{CONV}' must have a dtype of ['BF16', 'F16', 'F32', 'F64'], got I8", capsys)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (np.nan, None, "of dtype float32, got 1 others, for instance nan"),
        (np.inf, None, "of dtype float32, got 1 others, for instance inf"),
        (1e5, "float16", "of dtype float16, got 1 others, for instance 100000"),
        (3.4e38, "bfloat16", "of dtype bfloat16, got 1 others, for instance 3.4e+38"),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(directory, value, dtype, message):
    for name in (CONV, "backbone.embeddings.weight", "backbone.layers.1.mixer.in_proj.weight"):
        wrong = directory.tensors[name].copy()
        wrong.flat[5] = value
        directory.write_tensors(directory.tensors | {name: wrong})
        with pytest.raises(ValueError, match=re.escape(f"tensor {name!r} must hold finite values {message}")):
            load_model(directory.path, dtype)
        assert load_model(directory.path, dtype, check_values=False).dtype == (dtype or "float32")


def test_outline_and_info_read_no_weights(directory, capsys, monkeypatch):
    def read(*arguments, **keywords):
        raise AssertionError("weights were read")

    monkeypatch.setattr(np, "fromfile", read)
    model = outline_model(directory.path)
    assert model.layers[0].mixer.A_log.shape == (128, 8)
    assert main(["info", "--model", str(directory.path)]) == 0
    assert "3 mamba1" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="weights were read"):
        load_model(directory.path)


def test_tensor_of_two_names_is_refused(directory, capsys):
    directory.write_tensors({"model.language_model.x": np.ones(2, np.float32), "model.x": np.ones(2, np.float32)})
    refused(directory.path, "must not both be in the files", capsys)


def test_index_decides_which_file_a_tensor_comes_from(directory):
    """A tensor may also be in another file, for instance after weights were cut anew."""
    wrong = {name: np.zeros_like(value) for name, value in directory.tensors.items()} | {
        "other": np.ones(2, np.float32)
    }
    for first, second in (("a", "b"), ("b", "a")):
        save_file(directory.tensors, directory.path / f"{first}.safetensors")
        save_file(wrong, directory.path / f"{second}.safetensors")
        places = dict.fromkeys(directory.tensors, f"{first}.safetensors") | {CONV: f"{second}.safetensors"}
        directory.write_json(INDEX, {"weight_map": places})
        model = load_model(directory.path)
        assert not np.asarray(model.layers[0].mixer.conv1d.weight[...]).any()
        assert np.array_equal(model.embed_tokens.embedding[...], directory.tensors["backbone.embeddings.weight"])
