"""Every op refuses arguments that break its contract, by their names, and takes NumPy arrays."""

import dataclasses
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels import grouped
from kernels.every_op import LAYERS, OPS, ROWS, SHAPES, arguments, needed, on_device

import pallas_kernels
from pallas_kernels import Mailboxes, RowCheckpoints, Run
from pallas_kernels.product_chain import Norm


def test_ops_are_found():
    assert len(OPS) >= 9


OF_ROWS = [name for name in OPS if name != "state_copy"]


def changed(given, **fields):
    """Returns arguments whose rows have other fields."""
    return given | dict(rows=dataclasses.replace(given["rows"], **fields))


@pytest.mark.parametrize("name", OPS)
def test_numpy_arrays_give_what_jax_arrays_give(name):
    """Whole numbers of any width are taken, and so is a layer of NumPy's, as a number or as an array."""
    given = arguments(OPS[name])
    widened = lambda x: x.astype(np.int64) if getattr(x, "dtype", None) == np.int32 else x
    wide = jax.tree.map(widened, given)
    others = [given, wide]
    if "rows" in given:
        wide = changed(wide, chunks=given["rows"].chunks, layer=np.int64(1))
        others = [given, wide, changed(given, layer=np.array(1))]
    expected = jax.tree.leaves(OPS[name](**on_device(given)))
    for got in others:
        for a, b in zip(expected, jax.tree.leaves(OPS[name](**got)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", OF_ROWS)
def test_query_start_loc_of_another_length_is_refused(name):
    given = on_device(arguments(OPS[name]))
    for short in (jnp.array([0, 5], jnp.int32), jnp.array([0, 1, 2, 5], jnp.int32)):
        with pytest.raises(
            ValueError, match=rf"{name}: rows\.query_start_loc must have 3 entries, .* got {short.size}"
        ):
            OPS[name](**changed(given, query_start_loc=short))
        with pytest.raises(ValueError, match=r"rows\.query_start_loc must have 3 entries"):
            jax.jit(lambda loc, given=given: OPS[name](**changed(given, query_start_loc=loc)))(short)


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize(
    "layer",
    [-1, LAYERS, np.int64(LAYERS), np.array(LAYERS), np.array(-1), 10**12, True, None, 1.0, "1", np.array([1])],
    ids=repr,
)
def test_layer_out_of_range_is_refused(name, layer):
    with pytest.raises(ValueError, match=rf"{name}: rows\.layer must be "):
        OPS[name](**changed(on_device(arguments(OPS[name])), layer=layer))


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("chunks", [3, (), np.zeros(3)], ids=lambda value: type(value).__name__)
def test_chunks_of_another_type_are_refused(name, chunks):
    with pytest.raises(ValueError, match=rf"{name}: rows\.chunks must be Chunks or None, got"):
        OPS[name](**changed(on_device(arguments(OPS[name])), chunks=chunks))


def wrongs(value):
    """Returns values that no array of this shape and dtype may be replaced by."""
    wrong = ["a", 3, [1], object(), value.reshape(-1)[0], value.astype(jnp.complex64)]
    return [*wrong, np.full(value.shape, 2**40), np.array(["a"]), np.zeros(value.shape, object)]


@pytest.mark.parametrize("name", OPS)
def test_every_wrong_argument_is_refused_by_its_name(name):
    """Each array in turn is of another type, dtype or number of axes, and each option of another type."""
    op, given = OPS[name], on_device(arguments(OPS[name]))
    for key, value in given.items():
        if hasattr(value, "dtype"):
            for other in [*wrongs(value), None]:
                if not (other is None and key in ("bias", "values")):
                    with pytest.raises(ValueError, match=rf"{name}: {key} must be"):
                        op(**given | {key: other})
            continue
        with pytest.raises(ValueError, match=rf"{name}: {key} must be"):
            op(**given | {key: 3})
        for field in dataclasses.fields(value):
            array = getattr(value, field.name)
            if hasattr(array, "dtype") and field.name != "layer":
                for other in wrongs(array):
                    with pytest.raises(ValueError, match=rf"{name}: {key}\.{field.name} must be"):
                        op(**given | {key: dataclasses.replace(value, **{field.name: other})})
    for key, parameter in inspect.signature(op).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            with pytest.raises(ValueError, match=f"{key} must be"):
                op(**given | {key: object()})


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_field_that_the_docstring_names_is_needed(name):
    """An op refuses rows that lack one of these fields, by its name, and reads no other field."""
    text = inspect.getdoc(OPS[name])
    named = text[re.search(r"rows,\s+with ", text).start() :].split(".")[0]
    assert {*needed(OPS[name])} == {"layer", *re.findall(r"`(\w+)`", named)}


@pytest.mark.parametrize("name", ["causal_conv1d_prefill", "gated_delta_rule_prefill", "ssd", "selective_scan"])
def test_checkpoints_of_no_columns_are_none(name):
    given, empty = on_device(arguments(OPS[name])), jnp.zeros((ROWS, 0), jnp.int32)
    run = Run(implementation="triton", interpret=True)
    without, with_none = (
        jax.make_jaxpr(lambda given=given: OPS[name](**given, run=run))()
        for given in (given, changed(given, checkpoints=RowCheckpoints(offset=empty, block=empty)))
    )
    assert str(with_none) == str(without)


@pytest.mark.parametrize(
    ("name", "axis", "message"),
    [
        ("selective_scan", "groups", "the number of groups of B must divide x's 2 heads, got 0"),
        ("selective_state_update", "groups", "the number of groups of B must divide x's 2 heads, got 0"),
        ("ssd", "groups", "the number of groups of B must divide x's 2 heads, got 0"),
        ("gated_delta_rule_recurrent", "key_heads", "the number of heads of k must divide v's 2, got 0"),
        ("gated_delta_rule_prefill", "key_heads", "the number of heads of k must divide v's 2, got 0"),
    ],
)
def test_no_groups_are_refused(monkeypatch, name, axis, message):
    monkeypatch.setitem(SHAPES, axis, 0)
    with pytest.raises(ValueError, match=f"{name}: {message}"):
        OPS[name](**on_device(arguments(OPS[name])))


def test_no_public_function_has_more_than_twelve_parameters():
    public = {name: value for name, value in vars(pallas_kernels).items() if inspect.isfunction(value)}
    assert len(public) >= 30
    assert {name for name, function in public.items() if len(inspect.signature(function).parameters) > 12} == set()


# For each argument that names a dtype: the op, and a call that leaves that argument open.
ONES = {n: np.ones((4,) * n, np.float32) for n in (1, 2, 3)}
NAMES = {
    ("add_rms_norm", "out_dtype"): dict(x=ONES[2], addend=ONES[3], weight=ONES[1], epsilon=1e-6),
    ("linear", "out_dtype"): dict(x=ONES[2], weight=ONES[2]),
    ("mixture_of_experts", "out_dtype"): dict(
        x=ONES[2],
        up=ONES[3],
        down=ONES[3],
        chosen=np.zeros((4, 1), np.int32),
        weights=ONES[2][:, :1],
        activation="relu2",
    ),
    ("choose_experts", "logits_dtype"): dict(logits=ONES[2], top_k=1),
    ("routed_experts_sums", "logits_dtype"): dict(
        x=ONES[2][:1], logits=ONES[2][:1], up=ONES[3], down=ONES[3], top_k=1, activation="relu2"
    ),
}


@pytest.mark.parametrize(("op", "argument"), NAMES, ids=str)
def test_names_of_dtypes_are_checked(op, argument):
    call, given = functools.partial(grouped.call, getattr(pallas_kernels, op)), NAMES[op, argument]
    for wrong in ("bf16", "half_float", "int8", ""):
        with pytest.raises(
            ValueError, match=f"{argument} must be the name of a floating-point dtype or None, got '{wrong}'"
        ):
            call(**given, **{argument: wrong})
    wanted, named = (jax.tree.leaves(call(**given, **{argument: name})) for name in (None, "float32"))
    assert [x.dtype for x in wanted] == [x.dtype for x in named]


def test_names_of_dtypes_of_norms_are_checked():
    x, addend, weight = ONES[2], ONES[3], ONES[1]
    epoch, boxes = jnp.int32(1), Mailboxes.create(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), "x", 100)
    wanted = "out_dtype must be the name of a floating-point dtype or None, got 'int8'"
    with pytest.raises(ValueError, match=f"^all_reduce_rms_norm: {wanted}"):
        pallas_kernels.all_reduce_rms_norm(x, addend, weight, boxes, epoch, epsilon=1e-6, out_dtype="int8")
    with pytest.raises(ValueError, match=f"^product_chain: step 0: {wanted}"):
        pallas_kernels.product_chain(x, (Norm(jnp.ones(4), 1e-6, out_dtype="int8"),), x)
    with pytest.raises(ValueError, match="step 0: out_dtype must be str or None, got 8"):
        pallas_kernels.product_chain(x, (Norm(jnp.ones(4), 1e-6, out_dtype=8),), x)
