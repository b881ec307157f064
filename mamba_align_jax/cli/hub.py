"""A model's directory, from what a user calls the model: a directory, or a model of the Hugging Face Hub."""

import json
import re
from pathlib import Path
from typing import NamedTuple

# What describes a model, beside its weights: see `models/config_files.py` and `engine/text`.
_DESCRIPTION = (
    "config.json",
    "hf_quant_config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(?:@(?P<revision>\S+))?", re.ASCII)


class FoundModel(NamedTuple):
    """A model's directory, and the name by which it is served."""

    directory: Path
    name: str


def find_model(
    model: str, revision: str | None = None, endpoint: str | None = None, *, outlines: Path | None = None
) -> FoundModel:
    """Returns the directory of a model. A model of the Hub is downloaded, unless huggingface_hub's cache has it.

    Only files that this library reads are downloaded: configurations, the tokenizer, and the safetensors files that the
    index names.

    Args:
        model: A directory; or ORG/NAME or ORG/NAME@REVISION, if there is no such directory.
        revision: A branch, a tag or a commit of a model of the Hub; None takes the model's own, or else the newest.
        endpoint: The Hub's address; None takes huggingface_hub's own, which HF_ENDPOINT may set.
        outlines: An empty folder. It receives a model of the Hub whose weights need not be read: of files with weights that
            the cache lacks, only the headers are downloaded. None downloads the weights.

    Raises:
        ValueError: there is neither such a directory nor such a model, or it can't be downloaded. The text says what helps.
    """
    directory, parts = Path(model), _HUB_NAME.fullmatch(model)
    if directory.is_dir() or parts is None:
        if revision is not None:
            raise ValueError(f"--revision must come with a model of the Hub, ORG/NAME, got {model!r}")
        if not directory.exists():
            raise ValueError(f"model must be a directory, or ORG/NAME of the Hugging Face Hub, got {model!r}")
        return FoundModel(directory, directory.resolve().name)
    name, revision = parts["name"], revision or parts["revision"]
    by_hand = f"hf download {name}{f' --revision {revision}' if revision else ''} --local-dir DIR"
    try:
        return FoundModel(_download(name, revision, endpoint, outlines), name)
    except ImportError as error:
        raise ValueError(
            f"{model} is no directory here, and to download it needs the extra 'hub': "
            f"pip install 'mamba-align-jax[hub]' ({error})"
        ) from error
    except (OSError, ValueError) as error:
        # The first lines of huggingface_hub's errors say what is wrong; the others are advice of several kinds.
        reason = " ".join([line for line in str(error).splitlines() if line][:2]).rstrip(". ") or type(error).__name__
        raise ValueError(
            f"{model} is no directory here and can't be downloaded: {reason}. To download it elsewhere or later: {by_hand}"
        ) from error


def _download(name: str, revision: str | None, endpoint: str | None, outlines: Path | None) -> Path:
    from huggingface_hub import snapshot_download

    def fetch(files: list[str], revision: str | None) -> Path:
        return Path(snapshot_download(name, revision=revision, allow_patterns=files, endpoint=endpoint))

    directory = fetch([*_DESCRIPTION, _INDEX], revision)
    index, weights = directory / _INDEX, {_SINGLE}
    if index.is_file():
        try:
            weights = set(json.loads(index.read_text(encoding="utf8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"its {_INDEX} names no files") from error
    if outlines is not None:
        return _outline(name, directory, sorted(weights), endpoint, outlines)
    # The directory has the commit's name, so the weights are of the same one.
    fetch(sorted(weights), directory.name)
    missing = sorted(file for file in weights if not (directory / file).is_file())
    if missing:
        raise ValueError(f"it has no {missing[0]}, or only a part of it was downloaded before")
    return directory


def _outline(name: str, directory: Path, weights: list[str], endpoint: str | None, folder: Path) -> Path:
    """Puts a model into a folder: what describes it, and files of weights that have a header and then a hole.

    Returns:
        The folder.
    """
    from huggingface_hub import HfApi

    for file in directory.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    for file in weights:
        if (folder / file).exists():
            continue
        found = HfApi(endpoint=endpoint).parse_safetensors_file_metadata(name, file, revision=directory.name)
        fields = lambda tensor: dict(dtype=tensor.dtype, shape=tensor.shape, data_offsets=list(tensor.data_offsets))
        header = json.dumps({name: fields(tensor) for name, tensor in found.tensors.items()}).encode()
        end = max((tensor.data_offsets[1] for tensor in found.tensors.values()), default=0)
        with (folder / file).open("wb") as target:
            target.write(len(header).to_bytes(8, "little") + header)
            target.truncate(8 + len(header) + end)
    return folder
