"""A model's end tokens and sampling defaults come from config.json and generation_config.json."""

import re

import numpy as np
import pytest
from fakes.driver import DATA
from fakes.model_directory import ModelDirectory

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cli.commands import main
from mamba_align_jax.models import load_model

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

GENERATION = "generation_config.json"


@pytest.fixture
def directory(tmp_path):
    return ModelDirectory(DATA / "mamba", tmp_path)


@pytest.mark.parametrize(
    ("ours", "theirs", "wanted"),
    [
        (2, ..., 2),
        ([2], ..., 2),
        ([7, 5], ..., (7, 5)),
        (2, None, 2),
        (2, 2, 2),
        (2, 5, (2, 5)),
        (2, [5, 2], (2, 5)),
        ([2, 3], [3, 4], (2, 3, 4)),
        (None, [5, 6], (5, 6)),
        (..., 0, 0),
        (..., [], None),
        (..., ..., None),
    ],
)
def test_end_tokens_of_both_files_count(directory, ours, theirs, wanted):
    directory.write_config(eos_token_id=ours)
    if theirs is not ...:
        directory.write_json(GENERATION, {"eos_token_id": theirs})
    assert load_model(directory.path).config.eos_token_id == wanted


@pytest.mark.parametrize(
    ("config", "tokenizer", "wanted"),
    [
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}}, None, (2, 7)),
        (
            {"eos_token": {"content": "<|im_end|>"}, "added_tokens_decoder": {"7": {"content": "<|im_end|>"}}},
            None,
            (2, 7),
        ),
        (
            {"eos_token": "<|im_end|>"},
            {"added_tokens": [{"id": 2, "content": "</s>"}, {"id": 7, "content": "<|im_end|>"}]},
            (2, 7),
        ),
        (
            {"eos_token": "</s>"},
            {"added_tokens": [{"id": 2, "content": "</s>"}, {"id": 7, "content": "<|im_end|>"}]},
            2,
        ),
        ({"eos_token": "<|im_end|>"}, {"added_tokens": [{"id": 2, "content": "</s>"}, 3]}, 2),
        ({"eos_token": "<|im_end|>"}, {"added_tokens": 3}, 2),
        ({"eos_token": "<|im_end|>"}, None, 2),
        ({"eos_token": None}, {"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}, 2),
        ({}, None, 2),
    ],
)
def test_end_token_of_the_tokenizer_counts(directory, config, tokenizer, wanted):
    """Tuned copies of a model often end their answers with a token that only their tokenizer names. vLLM stops there."""
    directory.write_json("tokenizer_config.json", config)
    if tokenizer is not None:
        directory.write_json("tokenizer.json", tokenizer)
    assert load_model(directory.path).config.eos_token_id == wanted


def test_wrong_tokenizer_config_is_refused(directory):
    directory.write_json("tokenizer_config.json", [])
    with pytest.raises(ValueError, match=r"tokenizer_config.json must hold a JSON object"):
        load_model(directory.path)


def test_generation_stops_at_any_end_token(directory):
    """The first entry of a list is not the only one that ends an answer."""
    arrays = np.load(DATA / "mamba" / "reference.npz")
    prompt, answer = arrays["tokens"][0, :37].tolist(), arrays["tokens"][0, 37:].tolist()
    number = next(n for n in range(3, len(answer)) if answer[n] not in answer[:n] and answer[n] != 255)
    sizes = EngineConfig(max_num_seqs=1, max_model_len=128, num_speculative_tokens=2)
    config = [255, answer[number]]
    for files in ({"eos_token_id": config}, {"eos_token_id": 255}):
        directory.write_config(**files)
        directory.write_json(GENERATION, {"eos_token_id": config[1:]})
        engine = Engine.from_pretrained(directory.path, sizes)
        (output,) = engine.generate(prompt, SamplingParams(max_tokens=30))
        assert list(output.token_ids) == answer[: number + 1]
        # As in vLLM, only what the caller has named is a reason.
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
    (output,) = engine.generate(prompt, SamplingParams(max_tokens=30, ignore_eos=True))
    assert list(output.token_ids) == answer[:30]
    (output,) = engine.generate(prompt, SamplingParams(max_tokens=30, stop_token_ids=answer[:1]))
    assert (list(output.token_ids), output.stop_reason) == (answer[:1], answer[0])


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, dict(temperature=0.0)),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, dict(temperature=0.0, top_k=20)),
        ({"do_sample": True}, dict(temperature=1.0)),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]},
            dict(temperature=0.6, top_k=20, top_p=0.95),
        ),
        (
            {"do_sample": True, "temperature": None, "top_k": 0, "max_new_tokens": 9},
            dict(temperature=1.0, max_tokens=9),
        ),
        (
            {"do_sample": True, "repetition_penalty": 1.05, "min_p": 0.1},
            dict(temperature=1.0, repetition_penalty=1.05, min_p=0.1),
        ),
        ({"repetition_penalty": 1.2, "min_p": 0}, dict(repetition_penalty=1.2)),
    ],
)
def test_sampling_defaults_are_offered(directory, fields, wanted):
    directory.write_json(GENERATION, fields)
    assert SamplingParams.from_generation_config(directory.path) == SamplingParams(**wanted)
    changed = SamplingParams.from_generation_config(str(directory.path), temperature=0.25, seed=3)
    assert changed == SamplingParams(**(wanted | dict(temperature=0.25, seed=3)))


def test_sampling_defaults_that_can_not_be_followed_are_named(directory, caplog):
    neutral = {"no_repeat_ngram_size": 0, "typical_p": None, "num_beams": 1}
    directory.write_json(GENERATION, {"do_sample": True, **neutral})
    SamplingParams.from_generation_config(directory.path)
    assert caplog.text == ""
    directory.write_json(GENERATION, {"do_sample": True, "num_beams": 4, "typical_p": 0.9, "min_p": 0.05})
    SamplingParams.from_generation_config(directory.path)
    assert "leaves them out: num_beams=4, typical_p=0.9" in caplog.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "0.6"}, "generation_config.json: temperature must be a finite number"),
        ({"temperature": float("nan")}, "generation_config.json: temperature must be a finite number"),
        ({"do_sample": True, "temperature": -1}, "temperature must be"),
        ({"top_k": 2.5}, "generation_config.json: top_k must be an integer"),
        ({"top_p": 7}, "top_p must be"),
        ({"min_p": 2}, "min_p must be"),
        ({"repetition_penalty": 0}, "repetition_penalty must be"),
        ({"do_sample": "yes"}, "generation_config.json: do_sample must be true or false"),
        ({"max_new_tokens": -1}, "generation_config.json: max_new_tokens must be an integer"),
        ({"eos_token_id": "2"}, "generation_config.json: eos_token_id must be an integer"),
    ],
)
def test_wrong_sampling_defaults_are_refused(directory, fields, message):
    directory.write_json(GENERATION, fields)
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams.from_generation_config(directory.path)


def test_missing_sampling_defaults_are_refused(directory):
    with pytest.raises(ValueError, match=re.escape("must hold a generation_config.json, got")):
        SamplingParams.from_generation_config(directory.path)


def test_info_shows_end_tokens_and_sampling_defaults(directory, capsys):
    directory.write_json(GENERATION, {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": [5, 6]})
    assert main(["info", "--model", str(directory.path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "end tokens │ 2, 5, 6 │" in out
    assert "sampling defaults │ temperature 0.6, top_k 20 │" in out


@pytest.mark.parametrize("inner", [{}, {"eos_token_id": None}])
def test_null_in_a_nested_configuration_does_not_hide_end_tokens_outside(tmp_path, inner):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    text = {name: value for name, value in directory.config.items() if name != "eos_token_id"} | inner
    directory.write_json("config.json", {"model_type": "qwen3_5", "text_config": text, "eos_token_id": [7, 9]})
    assert load_model(tmp_path).config.eos_token_id == (7, 9)


def test_end_tokens_inside_and_outside_of_a_nested_configuration_count(tmp_path):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    text = directory.config | {"eos_token_id": 5}
    directory.write_json("config.json", {"model_type": "qwen3_5", "text_config": text, "eos_token_id": [7, 9]})
    assert load_model(tmp_path).config.eos_token_id == (7, 9, 5)


def test_null_is_no_nested_configuration(tmp_path):
    directory = ModelDirectory(DATA / "qwen3_5_text", tmp_path)
    before = load_model(tmp_path).config
    directory.write_config(text_config=None)
    assert load_model(tmp_path).config == before
