"""docs/errors.md says the truth: each input in its tables gets the error that stands beside it."""

import pickle
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from fakes.speller import Speller
from hypothesis import example, given, settings
from hypothesis import strategies as st

import mamba_align_jax
import pallas_kernels
from mamba_align_jax import AlignConfig, Engine, EngineConfig
from mamba_align_jax._values import shown
from mamba_align_jax.cache.block_pool import BlockPool
from mamba_align_jax.errors import FieldError
from mamba_align_jax.kv import KVSpec

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
ROWS = re.findall(r"^\| `(.+?)` \| `(.+?)` \|$", PAGE.read_text(), re.MULTILINE)
SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=2, max_model_len=32, num_state_blocks=10, num_kv_pages=10)


@pytest.fixture(scope="module")
def names():
    model = Speller()
    given = {name: getattr(mamba_align_jax, name) for name in mamba_align_jax.__all__}
    return (
        given
        | vars(pallas_kernels)
        | dict(model=model, engine=Engine(model, EngineConfig(**SIZES, max_waiting=2)), jnp=jnp, np=np)
        | dict(BlockPool=BlockPool, KVSpec=KVSpec, align=AlignConfig(model.state_groups(), 8))
    )


def test_page_has_rows():
    assert len(ROWS) > 30


@pytest.mark.parametrize(("given", "error"), ROWS)
def test_input_gets_the_error_of_the_page(names, given, error):
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - the text is compared below
        eval(given, dict(names))
    assert str(raised.value) == error
    assert not names["engine"].has_unfinished


@pytest.mark.parametrize(
    ("error", "parts", "text"),
    [
        (FieldError("top_k", "at least 0", "-1"), ("", "top_k"), "top_k must be at least 0, got -1"),
        (FieldError("KVSpec: dtype", "a name", "5"), ("KVSpec", "dtype"), "KVSpec: dtype must be a name, got 5"),
        (FieldError("GroupSpec 'a: b': ring", "None", "1"), ("GroupSpec 'a: b'", "ring"), None),
        (FieldError("stop", "not be empty", must="must"), ("", "stop"), "stop must not be empty"),
        (FieldError("Pool: size", "{fit}", "{}", "must"), ("Pool", "size"), "Pool: size must {fit}, got {}"),
    ],
)
def test_an_error_says_its_parts_and_goes_to_other_processes(error, parts, text):
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert (each.owner, each.field) == parts
        assert (each.wanted, each.got) == (error.wanted, error.got)
        assert str(each) == str(error)
        assert text is None or str(each) == text
    assert error.renamed("--size").field == "--size"
    assert str(error.renamed("--size")).partition(" must ")[2] == str(error).partition(" must ")[2]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.frozensets(st.integers()),
    lambda one: st.lists(one) | st.tuples(one) | st.tuples(one, one) | st.dictionaries(st.text(), one) | st.just(set()),
)


@given(VALUES)
@settings(max_examples=30, deadline=None)
@example([[]] * 100)
@example({1, 2, 3})
@example({"a": "b" * 300})
def test_errors_show_what_python_writes(value):
    text = repr(value)
    assert shown(value) == (text if len(text) <= 200 else text[:200] + "...")


@pytest.mark.parametrize("wrap", [list, tuple, set, lambda many: dict.fromkeys(many), lambda many: [[*many]]])
def test_of_a_large_value_only_the_beginning_is_written(wrap):
    class Counted:
        written = 0

        def __repr__(self):
            Counted.written += 1
            return "one"

    assert len(shown(wrap(Counted() for _ in range(10_000)))) <= 203
    assert Counted.written <= 200
    assert len(shown("\x00" * 10**6)) == 203
