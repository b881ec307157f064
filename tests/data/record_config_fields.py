"""Records the fields of the published configuration classes, with their defaults, in config_fields.json.

It needs transformers, whose configuration classes need no torch, and which nothing here needs:
`python tests/data/record_config_fields.py`. test_config_fields.py says for every field what the loader does with it.
"""

import dataclasses
import json
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The supported types that a configuration class of transformers has. The classes of Qwen3.5 nest the text model's.
TYPES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2"),
    *("lfm2_moe", "mamba", "mamba2", "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "zamba2",
)


def fields(kind):
    """The defaults of a class's fields, and the other names under which it takes some."""
    cls = CONFIG_MAPPING[kind]
    defaults = {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(cls)
        if not field.name.startswith("_")
    }
    return {"fields": dict(sorted(defaults.items())), "other_names": dict(sorted(cls.attribute_map.items()))}


if __name__ == "__main__":
    recorded = {"transformers": transformers.__version__, "types": {kind: fields(kind) for kind in TYPES}}
    text = json.dumps(recorded, indent=1)
    Path(__file__).with_name("config_fields.json").write_text(text + "\n")
