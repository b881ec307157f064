"""A writable copy of a small model of tests/data, for tests that break or change its files."""

import json

from safetensors.numpy import load_file, save_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelDirectory:
    """The files of a copy in `path`. `config` and `tensors` are what the original holds."""

    def __init__(self, original, path):
        self.path = path
        self.config = json.loads((original / "config.json").read_text())
        self.tensors = load_file(original / WEIGHTS)
        self.write_config()
        self.write_tensors(self.tensors)

    def write_config(self, **change):
        """Writes config.json with changed fields; `...` leaves one out."""
        fields = self.config | change
        self.write_json("config.json", {name: value for name, value in fields.items() if value is not ...})

    def write_json(self, name, value):
        (self.path / name).write_text(json.dumps(value))

    def write_tensors(self, tensors, name=WEIGHTS):
        save_file(tensors, self.path / name)
