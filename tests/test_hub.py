"""A model of the Hugging Face Hub is downloaded, from a small server that speaks its API, or an error says what helps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fakes.hub import hub

from mamba_align_jax.cli.hub import find_model
from mamba_align_jax.models.tensor_files import stored_tensors

QUICK = Path(__file__).parent / "data" / "mamba"
WEIGHTS = {"model.safetensors.index.json": json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}).encode(),
           "1.safetensors": b"1", "2.safetensors": b"2"}  # fmt: skip
UNUSED = {"README.md": b"", "consolidated.safetensors": b"", "original/3.safetensors": b"", "pytorch_model.bin": b""}
SMALL = {"config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"new"}
REPOSITORIES = {
    ("org/sharded", "main"): SMALL | WEIGHTS | UNUSED,
    ("org/sharded", "v1"): SMALL | WEIGHTS | {"chat_template.jinja": b"old"},
    ("org/broken", "main"): SMALL | {"model.safetensors.index.json": b"[]"},
    ("org/pickled", "main"): {"config.json": b"{}", "pytorch_model.bin": b""},
    ("org/quick", "main"): {file.name: file.read_bytes() for file in QUICK.iterdir()},
}


@pytest.fixture
def address(monkeypatch, tmp_path):
    """The address of a server. What is downloaded from it lies in a folder that is empty before each test."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with hub(REPOSITORIES) as (address, sent):
        yield address, sent


def test_only_what_a_model_needs_is_downloaded_and_once(address):
    address, sent = address
    directory, name = find_model("org/sharded", endpoint=address)
    assert name == "org/sharded"
    assert sorted(sent) == sorted(SMALL | WEIGHTS) == sorted(file.name for file in directory.iterdir())
    assert find_model("org/sharded", endpoint=address).directory == directory
    assert len(sent) == len(SMALL | WEIGHTS)


def test_a_command_takes_a_model_of_the_hub(address, tmp_path):
    command = [sys.executable, "-m", "mamba_align_jax", "info", "org/quick"]
    address = {"HF_ENDPOINT": address[0], "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=os.environ | address, capture_output=True, text=True)
    assert (done.returncode, "3 mamba1" in done.stdout) == (0, True), done.stderr


def test_what_weights_weigh_is_known_from_their_headers_alone(address, tmp_path):
    address, sent = address
    folder = tmp_path / "outlines"
    folder.mkdir()
    directory, name = find_model("org/quick", endpoint=address, outlines=folder)
    assert (directory, name, "model.safetensors" in sent, "config.json" in sent) == (folder, "org/quick", False, True)
    outline, whole = (stored_tensors(where) for where in (folder, QUICK))
    assert {name: (tensor.kind, tensor.shape) for name, tensor in outline.items()} == {
        name: (tensor.kind, tensor.shape) for name, tensor in whole.items()
    }
    # Weights that were downloaded before are taken as they are.
    there = find_model("org/quick", endpoint=address).directory / "model.safetensors"
    other = tmp_path / "others"
    other.mkdir()
    find_model("org/quick", endpoint=address, outlines=other)
    assert (other / "model.safetensors").resolve() == there.resolve()


@pytest.mark.parametrize("asked", [("org/sharded@v1",), ("org/sharded", "v1")])
def test_a_revision_is_downloaded_by_either_name(address, asked):
    directory, name = find_model(*asked, endpoint=address[0])
    assert ((directory / "chat_template.jinja").read_text(), name) == ("old", "org/sharded")


def test_what_was_downloaded_is_used_without_the_hub(address):
    directory = find_model("org/sharded", endpoint=address[0]).directory
    assert find_model("org/sharded", endpoint="http://127.0.0.1:9").directory == directory


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("org/none", "404 Client Error. Repository Not Found for url: "),
        ("org/sharded@none", "404 Client Error. Revision Not Found for url: "),
        ("org/broken", "its model.safetensors.index.json names no files"),
        ("org/pickled", "it has no model.safetensors"),
    ],
)
def test_an_error_of_the_hub_is_said_in_a_line_with_the_command_that_helps(address, model, reason):
    with pytest.raises(ValueError, match=f"^{model} is no directory here and can't be downloaded: {reason}") as raised:
        find_model(model, endpoint=address[0])
    name, _, revision = model.partition("@")
    command = f"hf download {name}{revision and f' --revision {revision}'} --local-dir DIR"
    assert str(raised.value).endswith(command)
    assert "\n" not in str(raised.value)


def test_a_machine_without_a_network_is_told_the_command_to_run_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"Connection refused.*hf download org/none --local-dir DIR$"):
        find_model("org/none", endpoint="http://127.0.0.1:9")


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install 'mamba-align-jax\[hub\]'"):
        find_model("org/none")


def test_a_directory_is_taken_before_a_model_of_the_hub_and_has_no_revision(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert find_model("org/name") == (Path("org/name"), "name")
    with pytest.raises(ValueError, match="--revision must come with a model of the Hub"):
        find_model("org/name", "v1")
    with pytest.raises(
        ValueError, match="model must be a directory, or ORG/NAME of the Hugging Face Hub, got '/nowhere'"
    ):
        find_model("/nowhere")
