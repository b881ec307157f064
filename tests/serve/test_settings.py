"""What an operator chooses is checked, and an error names the field."""

import math
from dataclasses import fields

import pytest

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.errors import FieldError
from mamba_align_jax.serve.api.sampling import wrong_value
from mamba_align_jax.serve.settings import Limits, Settings

# For each field, values that it must not take.
BAD_SETTINGS = {
    "model_name": ("", None, 5, b"x", "\ud800"),
    "model_aliases": (None, 5, ("",), (5,), b"x"),
    "seed": (-1, 0.5, "0", True),
    "api_keys": ("sk", None, 5, ("",), ("ä",), ("a b\n",), (" a",), (5,), {"sk"}),
    "admin_keys": ("sk", None, 5, ("",), ("ä",), ("a b\n",), (" a",), (5,), {"sk"}),
    "sampling_defaults": ({"top_p": 2}, {"top_p": None}),
    "min_priority": (0.5, None, "0", True),
    "warmup": ("all", None, 5, ["none"]),
    "allowed_hosts": (None, 5, (5,), ("",), b"x"),
    "tool_call_parser": ("some", None, 5, ["hermes"]),
    "reasoning_parser": ("some", None, 5, ["think"]),
    "limits": (None, {}, Limits),
}


def test_every_setting_is_checked():
    assert BAD_SETTINGS.keys() == {item.name for item in fields(Settings)}


@pytest.mark.parametrize("field", BAD_SETTINGS)
def test_a_wrong_setting_is_named(field):
    for value in BAD_SETTINGS[field]:
        with pytest.raises(FieldError) as raised:
            Settings(**{field: value})
        # Sampling parameters have names of their own.
        assert raised.value.field == ("top_p" if field == "sampling_defaults" else field), value


@pytest.mark.parametrize("field", [item.name for item in fields(Limits)])
def test_a_wrong_limit_is_named(field):
    for value in (-1, math.nan, math.inf, "1", None, True, *([] if field.endswith("_s") else [0, 1.5])):
        with pytest.raises(FieldError) as raised:
            Limits(**{field: value})
        assert raised.value.field == field, value


def test_settings_never_show_their_keys():
    assert "secret" not in repr(Settings(api_keys=("secret",)))
    with pytest.raises(FieldError) as raised:
        Settings(api_keys=("secret\n",))
    assert "secret" not in f"{raised.value!s}{raised.value.got}"


def test_the_api_names_the_field_of_an_error_and_none_without():
    with pytest.raises(FieldError) as raised:
        SamplingParams(top_k=-1)
    assert wrong_value(raised.value).param == "top_k"
    assert wrong_value(FieldError("prompt_token_ids", "shorter")).param == "prompt"
    assert wrong_value(FieldError("grammar", "shorter")).param == "response_format"
    assert wrong_value(ValueError("top_k must be something that no one has checked")).param is None
