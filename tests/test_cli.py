"""Tests of the command line, over tiny random models and the bundled one."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from mamba_align_jax.cli import commands as cli
from mamba_align_jax.cli.commands import main
from mamba_align_jax.data import BYTE_MODEL, encode
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.engine.running.trace import TracedStep, write_trace
from mamba_align_jax.models import load_model

DATA = Path(__file__).parent / "data"
TINY = str(DATA / "qwen3_5_text")
QUICK = str(DATA / "mamba")  # compiles faster


@pytest.mark.deep
def test_demo_serves_every_mode_and_caches_in_align_modes(tmp_path, capsys):
    file = tmp_path / "demo.json"
    assert main(["demo", "--model", QUICK, "--json", str(file)]) == 0
    runs = {run["mode"]: run for run in json.loads(file.read_text())["runs"]}
    assert list(runs) == ["none", "align/pre_copy", "align/copy_free"]
    assert all(run["identical"] is True for run in runs.values())
    assert runs["none"]["cached_tokens"] == 0
    for mode in ("align/pre_copy", "align/copy_free"):
        assert runs[mode]["cached_tokens"] >= 0.6 * runs[mode]["prompt_tokens"]
        assert runs[mode]["prefill_tokens"] + runs[mode]["cached_tokens"] == runs[mode]["prompt_tokens"]
    assert runs["align/copy_free"]["state_bytes_copied"] < runs["align/pre_copy"]["state_bytes_copied"]
    assert "align/copy" in capsys.readouterr().out


@pytest.mark.deep
def test_demo_returns_status_1_if_a_token_is_wrong(monkeypatch):
    monkeypatch.setattr(Reference, "tau", lambda self, logits: -1e9)
    assert main(["demo", "--model", QUICK]) == 1


@pytest.mark.deep
def test_generate_prints_the_prompt_and_its_continuation(capsys):
    assert main(["generate", "--prompt", "def ", "--max-tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("def ")


def test_info_prints_state_sizes_and_layers(capsys, monkeypatch):
    # On a terminal a progress bar is shown on stderr, which must not reach stdout.
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["info", TINY]) == 0
    out = capsys.readouterr().out
    # Three layers of 3 x 192 float32 window and 4 x 32 x 16 float32 state.
    assert "31,488" in out
    assert "3 gdn, 1 attention" in out


def test_info_plans_for_another_gpu_without_loading_weights(capsys):
    assert main(["info", "--model", TINY, "--json", "--gpu-memory-gb", "80", "--max-num-seqs", "7"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["client_bytes"] == 0.92 * 80e9
    assert found["state_bytes"] + found["page_bytes"] > 0.9 * found["client_bytes"]
    assert found["chosen"]["async_stepping"]["value"] is True
    assert "max_num_seqs" not in found["chosen"]
    assert (found["longest_requests"], found["layers"]) == (7, {"gdn": 3, "attention": 1})


def test_a_16_bit_model_runs_in_float32_on_a_cpu(capsys):
    """Each token would take 20 times as long in bfloat16, because whole pools would be converted."""
    for arguments, dtype in (([], "float32"), (["--gpu-memory-gb", "80"], "bfloat16")):
        assert main(["info", "--json", *arguments]) == 0
        assert json.loads(capsys.readouterr().out)["dtype"] == dtype


def test_info_counts_the_bytes_of_weights_that_are_quantised_while_they_are_read(capsys):
    """Of bfloat16 weights, products need half of their bytes then, and embeddings and the head as many as before."""
    found = []
    for weights_dtype in ("bfloat16", "fp8"):
        assert main(["info", "--json", "--gpu-memory-gb", "80", "--weights-dtype", weights_dtype]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [each["weights_dtype"] for each in found] == ["bfloat16", "fp8"]
    assert 0.5 < found[1]["weight_bytes"] / found[0]["weight_bytes"] < 0.7


def test_info_works_for_a_model_without_attention(capsys):
    assert main(["info", "--model", str(DATA / "mamba")]) == 0
    assert "3 mamba1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--prompt", "x", "--model", "/nowhere"],
        ["generate", "--prompt", ""],
        ["generate", "--prompt", "x", "--max-tokens", "-1"],
        ["generate", "--prompt", "x", "--max-tokens", "100000000"],
        ["demo", "--json", "/nowhere/demo.json"],
        ["info", "--mamba-block-size", "3", "--kv-page-size", "2"],
        ["info", "--gpu-memory-utilization", "1.5"],
        ["info", "--gpu-memory-gb", "0.001"],
    ],
)
def test_bad_input_prints_one_line_and_returns_status_2(arguments, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("mamba-align: ")
    assert (printed.err.count("\n"), printed.out) == (1, "")


@pytest.mark.deep
@pytest.mark.usefixtures("optimized_programs")
def test_the_bundled_model_predicts_held_out_documentation():
    """It takes at most 2.2 bits per byte on sections of the language reference that it was not trained on."""
    model = load_model(BYTE_MODEL, "float32")
    # Weights are stored in 16 bits. The draft head has a size limit of its own.
    head = sum(2 * leaf.size for leaf in jax.tree.leaves(nnx.state(model.mtp)))
    assert sum(file.stat().st_size for file in BYTE_MODEL.iterdir()) - head <= 10e6
    assert head <= 1.5e6
    reference = Reference(model)
    text = (DATA / "heldout_docs.txt").read_bytes()
    bits = []
    for start in range(0, len(text) - 1024, 1024):
        tokens = np.frombuffer(text[start : start + 1024], np.uint8).astype(int)
        logits = reference.logits(tokens.tolist()).astype(np.float64)[:-1]
        log_total = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
        bits.append((log_total - logits[np.arange(1023), tokens[1:]]) / np.log(2))
    assert np.mean(bits) <= 2.2


@pytest.mark.deep
def test_the_bundled_model_writes_words_and_accepts_drafts():
    """After the start of a docstring, most of what it writes are words that occur in Python's own documentation."""
    from mamba_align_jax import Engine, EngineConfig, SamplingParams
    from mamba_align_jax.data import decode

    engine = Engine.from_pretrained(
        BYTE_MODEL, EngineConfig(max_num_seqs=1, max_model_len=512, num_speculative_tokens=3), dtype="float32"
    )
    prompt = 'def parse(text):\n    """Parse a configuration file and return '
    (output,) = engine.generate(encode(prompt), SamplingParams(max_tokens=160, ignore_eos=True))
    assert engine.stats.accepted_tokens[0] > 0
    assert Reference(load_model(BYTE_MODEL, "float32")).judge(output.prompt_token_ids, output.token_ids).right
    words = [word.strip(".,:;()\"'`") for word in decode(output.token_ids).split()[:-1]]
    known = set((DATA / "heldout_docs.txt").read_text().replace("(", " ").replace(")", " ").split())
    spoken = [word for word in words if word.isalpha()]
    assert len(spoken) >= 10
    assert sum(word in known for word in spoken) >= 0.7 * len(spoken)


def test_bench_times_each_mode_and_writes_its_rows(tmp_path, capsys, monkeypatch):
    # A narrow terminal would wrap the names of the modes.
    monkeypatch.setattr(cli, "_CONSOLE", Console(width=200))
    file = tmp_path / "bench.jsonl"
    sizes = (
        "--runs=2",
        "--prompts=4",
        "--concurrency=1",
        "--prefix=64",
        "--suffix=8",
        "--output=4",
        "--max-num-batched-tokens=64",
    )
    modes = "--mode=none", "--mode=align/copy_free"
    assert main(["bench", "--model", QUICK, *sizes, *modes, "--mamba-block-size=32", f"--json={file}"]) == 0
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["mode"], row["runs"], row["requests"]) for row in rows] == [("none", 2, 4), ("align/copy_free", 2, 4)]
    assert rows[0]["hit_rate_of_attainable"] == 0 < rows[1]["hit_rate_of_attainable"]
    assert "align/copy_free" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--runs=0", "--runs must be at least 1, got 0"),
        ("--seed=-1", "--seed must be at least 0, got -1"),
        ("--rate=0", "OpenLoop: rate must be finite and greater than 0, got 0.0"),
    ],
)
def test_bench_refuses_bad_options_before_it_makes_an_engine(option, message, capsys):
    assert main(["bench", "--model", QUICK, option]) == 2
    assert message in capsys.readouterr().err


def test_the_command_line_imports_nothing_outside_the_wheel():
    """The wheel holds mamba_align_jax and pallas_kernels; `bench` must not need the repository's other folders."""
    package = Path(cli.__file__).parents[1]
    repository = package.parent
    outside = {path.stem for path in repository.iterdir()} - {package.name, "pallas_kernels"}
    assert {"benchmarks", "tests", "examples"} <= outside
    for file in [
        package / "__main__.py",
        *(file for room in ("cli", "load") for file in (package / room).rglob("*.py")),
    ]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}: a relative import"
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & outside, file


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    """As in `mamba-align trace FILE | head -1`."""
    file = tmp_path / "trace"
    with write_trace(file) as write:
        for number in range(20_000):
            write(TracedStep(step=number, copied_bytes=0, null_reads=1, rows=()))
    command = [sys.executable, "-m", "mamba_align_jax", "trace", str(file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline().split()[0] == b"step"
    process.stdout.close()
    with process:
        assert (process.stderr.read(), process.wait()) == (b"", 0)


def test_an_interrupt_ends_a_command_without_a_traceback(monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_load_engine", interrupt)
    # What shells say of a process that SIGINT has ended.
    assert main(["generate", "--prompt", "x"]) == 130
