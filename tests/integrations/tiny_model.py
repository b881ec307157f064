"""Writes the directory of a tiny model, as it comes from Hugging Face."""

import json

import numpy as np
from safetensors.numpy import save_file


def write_tensors(path, config, shapes, draw):
    """Writes config.json and the float32 tensors that `draw(name, shape)` returns. Returns the path."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = {name: draw(name, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors")
    return path
