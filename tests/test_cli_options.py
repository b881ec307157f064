"""A command's options come from a YAML file as well, and its help can be asked for in parts."""

import pytest

from mamba_align_jax.cli import commands as cli
from mamba_align_jax.data import BYTE_MODEL

# As users of `vllm serve --config` write it.
CONFIG = """
model: org/name
served-model-name: [a, b]
port: 8123
max_num_seqs: 4
max-model-len: 32k
mamba-cache-mode: all
enable-prefix-caching: true
access-log: true
generation-config: vllm
api-key: null
speculative-config:
  method: mtp
  num_speculative_tokens: 2
"""


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """The options with which a command would have served."""
    found = []
    monkeypatch.setattr(cli, "find_model", lambda model, revision, outlines: (BYTE_MODEL, model))
    monkeypatch.setattr("mamba_align_jax.serve.command.run", lambda options, load: found.append(options) or 0)
    return found


@pytest.fixture
def served(found, tmp_path):
    """Runs `mamba-align serve` with a file and further arguments, and returns the options with which it would serve."""

    def serve(text, *arguments):
        file = tmp_path / "options.yaml"
        file.write_text(text)
        assert cli.main(["serve", *arguments, "--config", str(file)]) == 0
        return found.pop()

    return serve


def test_a_file_has_options_by_vllms_keys(served):
    options = served(CONFIG)
    assert (options.model_name, options.served_model_name, options.api_key) == ("org/name", ["a", "b"], [])
    assert (options.port, options.max_num_seqs, options.max_model_len, options.prefix_cache) == (8123, 4, 32_000, "all")
    assert (options.access_log, options.generation_config, options.enable_prefix_caching) == (True, "vllm", True)
    assert options.speculative_config == '{"method": "mtp", "num_speculative_tokens": 2}'
    assert options.host == "127.0.0.1"


def test_options_of_the_command_line_win(served):
    options = served(
        CONFIG, "org/other", "--port", "1", "--served-model-name", "c", "--no-access-log", "--max-num-seqs=5"
    )
    assert (options.model_name, options.port, options.served_model_name) == ("org/other", 1, ["c"])
    assert (options.access_log, options.max_num_seqs, options.max_model_len) == (False, 5, 32_000)
    assert served(CONFIG, "--model", "org/third").model_name == "org/third"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port: x", "argument --port: invalid int value: 'x'"),
        ("ports: 3", "unrecognized arguments: --ports=3"),
        ("max-num-seqs: false", "unrecognized arguments: --no-max-num-seqs"),
        ("block-size: 16", "--block-size of vLLM is not taken here"),
    ],
)
def test_a_wrong_option_in_a_file_is_named(tmp_path, capsys, text, said):
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--config", str(file)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [("- port", "must have options as keys, got list"), ("a: [", "must be YAML, got"), (None, "No such")],
)
def test_a_file_without_options_is_refused_in_a_line(tmp_path, capsys, text, said):
    file = tmp_path / "options.yaml"
    if text is not None:
        file.write_text(text)
    assert cli.main(["serve", "--config", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize(
    ("part", "flags", "others"),
    [
        ("--help=max-num-seqs", ["--max-num-seqs"], ["--max-model-len", "usage:"]),
        ("--help=max_num", ["--max-num-seqs", "--max-num-batched-tokens"], ["--port"]),
        (
            "--help=cache events",
            ["cache events:", "--kv-events ", "--events-topic"],
            ["--max-num-seqs", "--coordinator"],
        ),
        ("--help=nothing-like-it", ["usage: mamba-align serve", "--port", "--coordinator"], []),
        ("--help", ["usage: mamba-align serve", "--port", "--coordinator"], []),
    ],
)
def test_the_help_can_be_asked_for_in_parts(capsys, part, flags, others):
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", part])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    assert [flag for flag in flags if flag not in shown] == []
    assert [flag for flag in others if flag in shown] == []
