"""`mamba-align serve`: its options reach the engine and the server, and a signal drains it."""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fakes.speller import Speller

from mamba_align_jax import Engine, SamplingParams
from mamba_align_jax.cli.commands import main
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.config import EngineConfig
from mamba_align_jax.serve import command
from mamba_align_jax.serve.settings import Limits
from mamba_align_jax.serve.vllm_flags import NAMES

# Its programs are compiled quickly. It has no tokenizer.
QUICK = Path(__file__).parents[1] / "data" / "mamba"


def options(*arguments, model=BYTE_MODEL):
    parser = argparse.ArgumentParser()
    parser.set_defaults(model=model, model_name=model.name)
    command.add_options(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("kind", "prefix"), [(EngineConfig, "--"), (Limits, "--limit-")])
def test_the_help_has_each_field(kind, prefix):
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    shown = " ".join(parser.format_help().split())
    found = [item for item in fields(kind) if item.metadata]
    assert {item.name for item in fields(kind)} - {item.name for item in found} <= {
        *("prompt_lookup_max", "prompt_lookup_min", "checked", "memory_fraction")
    }
    for item in found:
        assert (f"--{NAMES[item.name]}" if item.name in NAMES else prefix + item.name).replace("_", "-") + " " in shown
        assert item.metadata["about"] in shown


def test_the_help_has_the_words_of_the_engines_docstring():
    described = " ".join(EngineConfig.__doc__.split()).lower()
    assert [item.name for item in fields(EngineConfig) if item.metadata.get("about", "").lower() not in described] == []


def test_the_help_says_the_defaults_of_the_command():
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    shown = " ".join(parser.format_help().split())
    assert "Number of connections that have calls at once (default: 1024)" in shown
    assert "Number of requests that run at once (default: chosen for the model and the device)" in shown
    assert "Number of requests that may wait to run for the first time (default: 1024)" in shown


def test_options_are_the_engines_and_the_servers(tmp_path):
    file = tmp_path / "keys"
    file.write_text("sk-b\n\n sk-c \n")
    given = options(
        *("--max-num-seqs", "3", "--async-scheduling", "--speculation", "mtp"),
        *("--api-key", "sk-a", "--api-key-file", str(file), "--limit-body-bytes", "100", "--limit-call-s", "7.5"),
        *("--window-layout", "DS", "--state-layout", "VK", "--kv-page-size", "32"),
        *("--policy", "deferred", "--fold-length", "32"),
        *(
            "--served-model-name",
            "name",
            "other",
            "--seed",
            "9",
            "--mamba-cache-mode",
            "all",
            "--mamba-block-size",
            "64",
        ),
        *("--max-model-len", "32k", "--min-priority", "-3", "--warmup", "none", "--port", "0"),
    )
    settings = command.make_settings(given)
    assert settings.api_keys == ("sk-a", "sk-b", "sk-c")
    assert settings.admin_keys == ()
    assert (settings.limits.body_bytes, settings.limits.call_s, settings.limits.choices) == (100, 7.5, 16)
    assert (settings.model_name, settings.model_aliases, settings.seed) == ("name", ("other",), 9)
    assert (settings.model_name, settings.min_priority, settings.warmup) == ("name", -3, "none")
    found = []

    def load(config):
        found.append(config)
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        command.run(given, load)
    assert found == [
        EngineConfig(
            max_num_seqs=3,
            max_model_len=32_000,
            prefix_cache="all",
            block_size=64,
            async_stepping=True,
            speculation="mtp",
            max_waiting=1024,
            window_layout="DS",
            state_layout="VK",
            kv_page_size=32,
            policy="deferred",
            fold_length=32,
        )
    ]


def test_a_listener_comes_before_the_saved_cache(tmp_path):
    """A new listener empties the cache."""
    calls = []

    def enough(directory):
        calls.append("restored")
        raise RuntimeError("enough")

    engine = SimpleNamespace(on_cache_event=lambda listener: calls.append("listens"), load_cache=enough)
    given = options("--state-events", f"ipc://{tmp_path}/events", "--save-cache", str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match="enough"):
        command.run(given, lambda config: engine)
    assert calls == ["listens", "restored"]


def test_without_options_the_settings_are_the_defaults():
    assert command.make_settings(options()).model_name == "byte_model"
    assert command.make_settings(options()).limits == Limits()


@pytest.mark.parametrize(
    ("arguments", "file", "found"),
    [
        ([], {"do_sample": True, "temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_k": 20}),
        # As in vLLM, a file without a temperature changes none, whatever it says of `do_sample`.
        ([], {"eos_token_id": 2, "top_p": 0.9}, {"top_p": 0.9}),
        ([], {"do_sample": False}, {}),
        (["--generation-config", "neutral"], {"temperature": 0.7}, {}),
        (["--generation-config", "vllm"], {"temperature": 0.7}, {}),
    ],
)
def test_sampling_defaults_are_the_models(tmp_path, arguments, file, found):
    (tmp_path / "generation_config.json").write_text(json.dumps(file))
    assert command.make_settings(options(*arguments, model=tmp_path)).sampling_defaults == found


def test_a_chat_template_is_a_file_or_a_text_and_knows_the_models_tokens(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "chat_template": "own"}))
    (tmp_path / "file.jinja").write_text("{{ bos_token }} file")
    for given, text in (
        ([str(tmp_path / "file.jinja")], "<s> file"),
        (["{{ bos_token }} text"], "<s> text"),
        ([], "own"),
    ):
        template = command.make_template(options(*given and ["--chat-template", *given], model=tmp_path))
        assert template.render([]) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--limit-choices", "0"], "mamba-align: limit_choices must be at least 1, got 0"),
        (["--api-key", "a b\n"], "api_keys must be"),
        (["--api-key-file", "/nowhere"], "No such file"),
        (["--api-key-file", "/dev/null"], "api_key_file must have a key"),
        (["--max-num-seqs", "0"], "max_num_seqs must be None or at least 1"),
        (["--mamba-block-size", "0"], "mamba_block_size must be None or at least 1"),
        (["--chat-template", "/nowhere"], "No such file"),
        (["--chat-template", "{% endfor %}"], "the chat template must"),
        (["--seed", "-1"], "seed must be None or at least 0"),
        (["--port", "-1"], "port must be at least 0, got -1"),
        (["--port", "65536"], "port must be at most 65535, got 65536"),  # the system would take port 0
    ],
)
def test_wrong_options_are_said_in_a_line(capsys, arguments, said):
    assert main(["serve", "--port", "0", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_cache_that_is_not_kept_is_not_saved(tmp_path, capsys):
    assert main(["serve", "--port", "0", "--save-cache", str(tmp_path / "new"), "--mamba-cache-mode", "none"]) == 2
    assert "mamba_cache_mode must be 'align' or 'all' with --save-cache, got 'none'" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_cache_is_restored_at_the_start_and_saved_at_the_end(tmp_path, capsys, monkeypatch):
    """The server itself is left out. A file that is damaged is kept under another name, or else nothing is saved."""
    engines, prompt, at_stop = [], list(range(1, 20)), []

    def load(config):
        engines.append(Engine(Speller(), dataclasses.replace(config, num_state_blocks=20, num_kv_pages=20)))
        return engines[-1]

    def serve(server):
        engines[-1].generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        for call in at_stop:
            call()

    monkeypatch.setattr("mamba_align_jax.serve.server.make_server", lambda *_, **__: None)
    monkeypatch.setattr("mamba_align_jax.serve.server.run", serve)
    sizes = (
        "--max-num-seqs",
        "2",
        "--max-model-len",
        "64",
        "--mamba-block-size",
        "16",
        "--max-num-batched-tokens",
        "32",
    )
    given = options("--save-cache", str(tmp_path / "cache"), "--port", "0", *sizes, model=QUICK)
    said = []
    for _ in range(3):
        assert command.run(given, load) == 0
        said.append(capsys.readouterr().err)
        file, *aside = sorted((tmp_path / "cache").iterdir())
        if len(said) == 2:
            assert not aside
            damaged = file.read_bytes()[:-1]
            file.write_bytes(damaged)
    assert [engine.stats.cached_tokens for engine in engines] == [0, 16, 0]
    assert "again" not in said[0]
    assert "are cached again: 1 states" in said[1]
    assert re.search("the saved cache is skipped: .* must be a bundle of [0-9]+ bytes, as its header says", said[2])
    assert all("the cached prefixes are saved in" in each for each in said)
    assert [one.read_bytes() for one in aside] == [damaged]
    assert f"it is kept as {aside[0]}" in said[2]
    file.write_bytes(damaged)

    def refuse(self, target):
        raise PermissionError("no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        assert command.run(given, load) == 0
    assert "the cache will not be saved: no" in capsys.readouterr().err
    assert file.read_bytes() == damaged
    at_stop.append(file.mkdir)
    assert command.run(given, load) == 0
    assert len(list(file.parent.iterdir())) == 3, "the damaged file was set aside once more"
    assert "the cache is not saved: IsADirectoryError" in capsys.readouterr().err


def test_what_exists_when_the_server_is_ready_is_not_collected_again():
    code = "import gc; from mamba_align_jax.serve.command import freeze; before = len(gc.get_objects()); freeze();"
    code += " print(gc.get_freeze_count() > before / 2, len(gc.get_objects()) < before / 10)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.deep)])
def test_a_signal_lets_streams_finish_and_ends_the_process(number, tmp_path):
    arguments = ["serve", "--model", str(QUICK), "--port", "0", "--warmup", "none", "--max-model-len", "256"]
    arguments += ["--save-cache", str(tmp_path), "--limit-drain-s", "300"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mamba_align_jax", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    )
    try:
        lines = iter(process.stderr.readline, "")
        port = next(found[1] for line in lines if (found := re.search(r"http://127.0.0.1:(\d+)", line)))
        call = {"prompt": [1, 2, 3], "max_tokens": 100, "stream": True, "return_token_ids": True, "ignore_eos": True}
        url = f"http://127.0.0.1:{port}/v1/completions"
        with httpx.stream("POST", url, json=call, timeout=300, trust_env=False) as response:
            events = response.iter_lines()
            first = next(events)
            process.send_signal(number)
            rest = [first, *events]
        assert rest[-2:] == ["data: [DONE]", ""]
        found = [json.loads(line.removeprefix("data: ")) for line in rest if line.startswith("data: {")]
        assert sum(len(one["choices"][0]["token_ids"]) for one in found) == 100
        assert process.wait(300) == 0
        said = process.stderr.read()
        assert "Traceback" not in said
        assert f"the cached prefixes are saved in {tmp_path}" in said
        assert len([*tmp_path.iterdir()]) == 1
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
