"""Every op refuses arguments that break its contract, by their names, and takes NumPy arrays."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernels.every_op import LAYERS, OPS, ROWS, SHAPES, arguments, on_device

import pallas_kernels
from pallas_kernels import Mailboxes
from pallas_kernels.product_chain import Norm

OPS.pop("token_rows", None)


def test_ops_are_found():
    assert len(OPS) >= 9


@pytest.mark.parametrize("name", OPS)
def test_numpy_arrays_give_what_jax_arrays_give(name):
    """Whole numbers of any width are taken, and so is a layer of NumPy's, as a number or as an array."""
    given = arguments(OPS[name])
    wide = {key: x.astype(np.int64) if getattr(x, "dtype", None) == np.int32 else x for key, x in given.items()}
    wide |= {"layer": np.int64(1)} if "layer" in given else {}
    without_axes = given | ({"layer": np.array(1)} if "layer" in given else {})
    expected = jax.tree.leaves(OPS[name](**on_device(given)))
    for got in (OPS[name](**given), OPS[name](**wide), OPS[name](**without_axes)):
        for a, b in zip(expected, jax.tree.leaves(got), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("name", [name for name in OPS if name != "state_copy"])
def test_query_start_loc_of_another_length_is_refused(name):
    given = on_device(arguments(OPS[name]))
    for short in (jnp.array([0, 5], jnp.int32), jnp.array([0, 1, 2, 5], jnp.int32)):
        with pytest.raises(ValueError, match=f"{name}: query_start_loc must have 3 entries, .* got {short.size}"):
            OPS[name](**given | dict(query_start_loc=short))
        with pytest.raises(ValueError, match="query_start_loc must have 3 entries"):
            jax.jit(lambda loc, given=given: OPS[name](**given | dict(query_start_loc=loc)))(short)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "layer" in inspect.signature(op).parameters])
@pytest.mark.parametrize(
    "layer",
    [-1, LAYERS, np.int64(LAYERS), np.array(LAYERS), np.array(-1), 10**12, True, None, 1.0, "1", np.array([1])],
    ids=repr,
)
def test_layer_out_of_range_is_refused(name, layer):
    with pytest.raises(ValueError, match=f"{name}: layer must be "):
        OPS[name](**on_device(arguments(OPS[name])) | dict(layer=layer))


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if "chunks" in inspect.signature(op).parameters])
@pytest.mark.parametrize("chunks", [None, 3, (), np.zeros(3)], ids=lambda value: type(value).__name__)
def test_chunks_of_another_type_are_refused(name, chunks):
    with pytest.raises(ValueError, match=f"{name}: chunks must be Chunks, got"):
        OPS[name](**on_device(arguments(OPS[name])) | dict(chunks=chunks))


@pytest.mark.parametrize("name", OPS)
def test_every_wrong_argument_is_refused_by_its_name(name):
    """Each array in turn is of another type, dtype or number of axes, and each option of another type."""
    op, given = OPS[name], on_device(arguments(OPS[name]))
    for key, value in given.items():
        if key in ("layer", "chunks", "max_query_tokens"):
            continue
        wrong = [None, "a", 3, [1], object(), value.reshape(-1)[0], value.astype(jnp.complex64)]
        wrong += [np.full(value.shape, 2**40), np.array(["a"]), np.zeros(value.shape, object)]
        for other in wrong:
            if not (other is None and key in ("bias", "values")):
                with pytest.raises(ValueError, match=rf"{name}: {key} must be"):
                    op(**given | {key: other})
    for key, parameter in inspect.signature(op).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            with pytest.raises(ValueError, match=f"{key} must be|implementation must be"):
                op(**given | {key: object()})


@pytest.mark.parametrize(
    "name", [name for name, op in OPS.items() if "checkpoint_offset" in inspect.signature(op).parameters]
)
def test_checkpoints_of_no_columns_are_none(name):
    given, empty = on_device(arguments(OPS[name])), jnp.zeros((ROWS, 0), jnp.int32)
    how = dict(implementation="triton", interpret=True)
    without, with_none = (
        jax.make_jaxpr(lambda checkpoints=checkpoints: OPS[name](**given, **checkpoints, **how))()
        for checkpoints in ({}, dict(checkpoint_offset=empty, checkpoint_block=empty))
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
    call, given = getattr(pallas_kernels, op), NAMES[op, argument]
    for wrong in ("bf16", "half_float", "int8", ""):
        with pytest.raises(
            ValueError, match=f"{argument} must be the name of a floating-point dtype or None, got '{wrong}'"
        ):
            call(**given, **{argument: wrong})
    wanted, named = (jax.tree.leaves(call(**given, **{argument: name})) for name in (None, "float32"))
    assert [x.dtype for x in wanted] == [x.dtype for x in named]


def test_names_of_dtypes_of_norms_are_checked():
    x, addend, weight = ONES[2], ONES[3], ONES[1]
    turn, boxes = jnp.int32(1), Mailboxes.create(jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]), "x", 100)
    wanted = "out_dtype must be the name of a floating-point dtype or None, got 'int8'"
    with pytest.raises(ValueError, match=f"^all_reduce_rms_norm: {wanted}"):
        pallas_kernels.all_reduce_rms_norm(x, addend, weight, boxes, turn, epsilon=1e-6, out_dtype="int8")
    with pytest.raises(ValueError, match=f"^product_chain: step 0: {wanted}"):
        pallas_kernels.product_chain(x, (Norm(jnp.ones(4), 1e-6, out_dtype="int8"),), x)
    with pytest.raises(ValueError, match="step 0: out_dtype must be str or None, got 8"):
        pallas_kernels.product_chain(x, (Norm(jnp.ones(4), 1e-6, out_dtype=8),), x)
