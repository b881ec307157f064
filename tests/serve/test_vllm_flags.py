"""Options of `vllm serve` mean here what they mean there, or are refused with what to use instead."""

import argparse
import json
import re

import pytest

from mamba_align_jax._options import whole_number
from mamba_align_jax.cli.commands import main
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.serve import command
from mamba_align_jax.serve.replies.forms import REASONING_FORMS, TOOL_FORMS
from mamba_align_jax.serve.vllm_flags import REFUSED, VLLM_REASONING_FORMS, VLLM_TOOL_FORMS


def config(*arguments):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return command.make_config(parser.parse_args(arguments))


def speculation(**fields):
    return config("--speculative-config", json.dumps(fields))


def test_a_command_of_vllm_is_taken():
    arguments = (
        "--max-model-len 32k --max-num-seqs 16 --max-num-batched-tokens 8K --mamba-cache-mode all --dtype auto -tp 1"
    )
    arguments += " --enable-prefix-caching --mamba-block-size 528 --kv-page-size 16 --async-scheduling --host 0.0.0.0"
    sizes = dict(max_model_len=32_000, max_num_seqs=16, max_num_batched_tokens=8192, block_size=528, kv_page_size=16)
    expected = EngineConfig(**sizes, prefix_cache="all", async_stepping=True, max_waiting=1024)
    assert config(*arguments.split()) == expected


def test_without_prefix_caching_nothing_is_cached():
    assert config("--no-enable-prefix-caching", "--mamba-cache-mode", "align").prefix_cache == "none"
    assert config("--enable-prefix-caching").prefix_cache == config().prefix_cache
    with pytest.raises(ValueError, match="mamba_cache_mode must be 'align' or 'all' with --enable-prefix-caching"):
        config("--enable-prefix-caching", "--mamba-cache-mode", "none")


@pytest.mark.parametrize(
    ("given", "lookup"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 4}, (4, 4)),
        ({"prompt_lookup_min": 3}, (3, 3)),
        ({"prompt_lookup_max": 4, "prompt_lookup_min": 1}, (4, 1)),
    ],
)
def test_ngram_looks_up_prompts(given, lookup):
    found = speculation(method="ngram", num_speculative_tokens=3, **given)
    assert (found.speculation, found.num_speculative_tokens) == ("prompt_lookup", 3)
    assert (found.prompt_lookup_max, found.prompt_lookup_min) == lookup


@pytest.mark.parametrize("method", ["mtp", "qwen3_next_mtp"])
def test_mtp_drafts_with_the_models_head(method):
    found = speculation(method=method, num_speculative_tokens=2)
    assert (found.speculation, found.num_speculative_tokens) == ("mtp", 2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "mtp"}, "must have num_speculative_tokens"),
        ({"method": "eagle3", "num_speculative_tokens": 2}, "must have the method 'mtp' or 'ngram', got 'eagle3'"),
        ({"num_speculative_tokens": 2}, "must have the method"),
        ({"method": "mtp", "num_speculative_tokens": 2, "model": "x"}, "fields of method 'mtp' only, got model too"),
        ({"method": "mtp", "num_speculative_tokens": "2"}, "num_speculative_tokens must be a whole number"),
    ],
)
def test_another_speculation_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        speculation(**fields)


@pytest.mark.parametrize("text", ["{", "[]", "3"])
def test_speculation_is_a_json_object(text):
    with pytest.raises(ValueError, match="speculative_config must be a JSON object"):
        config("--speculative-config", text)


def test_parsers_have_vllms_names_too():
    """As in the commands that vLLM's documentation has for Qwen3.5 and Kimi."""
    parser = argparse.ArgumentParser()
    parser.set_defaults(model=BYTE_MODEL, model_name="bytes")
    command.add_options(parser)
    for names, found in (
        ([], ("auto", "auto")),
        (["qwen3_coder", "qwen3"], ("qwen3_xml", "think")),
        (["kimi_k2", "kimi_k2"], ("kimi", "kimi")),
        (["hermes", "none"], ("hermes", "none")),
    ):
        options = zip(("--tool-call-parser", "--reasoning-parser"), names, strict=False)
        given = ["--enable-auto-tool-choice", *(text for option in options for text in option)]
        settings = command.make_settings(parser.parse_args(given))
        assert (settings.tool_call_parser, settings.reasoning_parser) == found
    for names, forms in ((VLLM_TOOL_FORMS, TOOL_FORMS), (VLLM_REASONING_FORMS, REASONING_FORMS)):
        assert {*names.values()} <= forms.keys()
        assert not names.keys() & forms.keys()


def test_what_means_something_else_is_refused_with_what_to_use_instead(capsys):
    assert len(REFUSED) > 20
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    taken = set(re.findall(r"--[\w-]+", parser.format_help()))
    for option, instead in REFUSED.items():
        assert option not in taken
        assert set(re.findall(r"--[\w-]+", instead)) <= taken, instead
        for value in ([], ["1"]):
            with pytest.raises(SystemExit) as ended:
                main(["serve", option, *value])
            assert ended.value.code == 2
            assert f"{option} of vLLM is not taken here: {instead}" in capsys.readouterr().err


def test_suffixes_of_numbers_are_vllms():
    given = {"7": 7, "32k": 32_000, "25.6k": 25_600, "32K": 32_768, "1M": 2**20, "1m": 10**6, "2G": 2**31, "1t": 10**12}
    assert {text: whole_number(text) for text in given} == given
    for wrong in ("", "k", "1.5K", "0.0001k", "1.5", "1/2k", "-1k", "1kk", "x"):
        with pytest.raises(ValueError, match=r".*"):
            whole_number(wrong)


def test_a_model_that_a_list_has_taken_is_missed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "run", lambda *_: 0)
    for option in ("--served-model-name", "--api-key"):
        assert main(["serve", option, "name", str(tmp_path)]) == 2
        assert "the model must stand before --served-model-name and --api-key" in capsys.readouterr().err
