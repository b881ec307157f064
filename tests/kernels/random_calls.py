"""Random calls of every op, and float64's word on their results.

A generator draws the sizes, dtypes, options and layouts of a call from a seed. A call whose arrays are only described can be
traced and lowered anywhere, also with sizes of real models, and `spoilt` makes a nearly valid one of it. A call whose arrays
hold values can run, and knows how to compare its results with the oracle.
"""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernels import (
    attention_batches,
    chains,
    deferred_mamba2_rows,
    deferred_rows,
    delta_rule_claims,
    grouped,
    rotations,
    state_space_rows,
)
from kernels.common import assert_close, assert_untouched
from oracles import ops as oracle

import pallas_kernels as ops
from benchmarks.workloads import gated_delta_rule_deferred as deferred_cases
from benchmarks.workloads import product_chain as chain_cases
from benchmarks.workloads import selective_state_deferred as deferred_mamba2_cases
from pallas_kernels.all_reduce import config as all_reduce_config
from pallas_kernels.causal_conv1d import config as conv_config
from pallas_kernels.gated_delta_rule import config as delta_config
from pallas_kernels.gated_delta_rule.deferred import config as deferred_config
from pallas_kernels.least_kept import config as least_kept_config
from pallas_kernels.linear import config as linear_config
from pallas_kernels.mixture_of_experts import config as experts_config
from pallas_kernels.mixture_of_experts._activations import ACTIVATIONS
from pallas_kernels.paged_attention import config as attention_config
from pallas_kernels.product_chain import Norm
from pallas_kernels.rms_norm import config as rms_norm_config
from pallas_kernels.rotary import config as rotary_config
from pallas_kernels.selective_scan import config as scan_config
from pallas_kernels.selective_state_update import config as update_config
from pallas_kernels.selective_state_update.deferred import config as deferred_mamba2_config
from pallas_kernels.ssd import config as ssd_config
from pallas_kernels.state_copy import config as copy_config

FLOATS = "bfloat16", "float32", "float16"
LAYER, LAYERS = 1, 2
PADDING = 3  # tokens after the last row, which hold NaN


class Draw:
    """Random choices.

    Attributes:
        random: Decides what the call is.
        rng: Draws values.
        runs: Whether the call is small and right enough to run.
        has_values: Whether arrays have values. They are only described otherwise. It changes no choice.
    """

    def __init__(self, seed: int, *, runs: bool = False, has_values: bool = False) -> None:
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.runs, self.has_values = runs or has_values, has_values

    def one(self, *options: Any) -> Any:
        return self.random.choice(options)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def size(self, *usual: int, small: int = 64) -> int:
        """One of some usual sizes, or any size up to a small one."""
        return self.one(*usual) if self.chance(0.7) else self.random.randint(1, small)

    def array(self, dtype: str, *shape: int, scale: float = 1.0) -> Any:
        if not self.has_values:
            return jax.ShapeDtypeStruct(shape, dtype)
        return (scale * self.rng.standard_normal(shape, np.float32)).astype(dtype)

    def tokens(self, dtype: str, lengths: list[int], *shape: int, scale: float = 1.0) -> Any:
        """Inputs of packed rows. Those of padding are NaN."""
        x = self.array(dtype, sum(lengths) + PADDING, *shape, scale=scale)
        if self.has_values:
            x[sum(lengths) :] = np.nan
        return x

    def lengths(self, most: int, rows: int = 6) -> list[int]:
        return [self.random.randint(0, most) if self.chance(0.5) else most for _ in range(self.random.randint(1, rows))]

    def layer(self) -> Any:
        return LAYER if self.chance(0.5) else np.int32(LAYER)[...]


@dataclasses.dataclass
class Call:
    """A call of an op.

    Attributes:
        function: The op.
        arguments: Arrays, which are values or are described, and the op's options.
        compare: Compares arguments and results, whose arrays are NumPy's, with the oracle. None if it can't be done.
        implementations: Those that the op has.
        config: The class of a launch configuration, and its fields; None is the op's own choice.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    compare: Callable[[dict[str, Any], Any], None] | None
    implementations: tuple[str, ...] = ("xla", "triton")
    config: tuple[type, dict[str, Any]] | None = None

    def split(self) -> tuple[dict[str, Any], Callable[..., Any]]:
        """Returns the arrays, and a function of them that makes the call."""
        has_arrays = lambda x: any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
        arrays = {name: x for name, x in self.arguments.items() if has_arrays(x)}
        options = {name: x for name, x in self.arguments.items() if name not in arrays}

        def run(arrays: dict[str, Any], **more: Any) -> Any:
            if self.config is not None:
                more["config"] = built(self.config)
            return grouped.call(self.function, **arrays, **options, **more)

        return arrays, run


def built(config: Any) -> Any:
    """Makes a launch configuration of a class and its fields, whose values may be such pairs."""
    if not isinstance(config, tuple) or len(config) != 2 or not isinstance(config[0], type):
        return config
    return config[0](**{name: built(value) for name, value in config[1].items()})


def pair_of(config: Any) -> Any:
    """Returns the class and the fields of a launch configuration."""
    if not dataclasses.is_dataclass(config):
        return config
    fields = {field.name: pair_of(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return type(config), fields


def configured(draw: Draw, config: Any) -> Any:
    """Returns None for the op's own choice or, of a call that does not run, a configuration with other numbers."""
    if draw.runs or draw.chance(0.7):
        return None
    return changed(draw, pair_of(config))


def changed(draw: Draw, config: Any) -> Any:
    """Changes some numbers of a configuration. Most are halved or doubled, a few can't be right."""
    kind, fields = config
    for name, value in fields.items():
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], type):
            fields[name] = changed(draw, value)
        elif isinstance(value, bool):
            fields[name] = draw.one(value, not value)
        elif isinstance(value, int) and draw.chance(0.3):
            usual = max(1, value // 2), 2 * value, max(1, value // 4)
            fields[name] = draw.one(*usual) if draw.chance(0.85) else draw.one(0, -1, 3, 48)
    return kind, fields


def spoilt(draw: Draw, call: Call) -> Call:
    """Changes one argument, an axis or the dtype of an array, or an option. The call may still be right."""
    arguments = dict(call.arguments)
    name = draw.one(*(name for name in arguments if name not in ("capacity", "devices")))
    leaves, tree = jax.tree.flatten(arguments[name])
    if not leaves or (len(leaves) > 1 and draw.chance(0.1)):
        arguments[name] = None
        return dataclasses.replace(call, arguments=arguments)
    number = draw.random.randrange(len(leaves))
    leaves[number] = _spoilt(draw, leaves[number])
    arguments[name] = None if leaves[number] is None and len(leaves) == 1 else jax.tree.unflatten(tree, leaves)
    return dataclasses.replace(call, arguments=arguments)


def _spoilt(draw: Draw, value: Any) -> Any:
    """Returns another value of an argument."""
    if hasattr(value, "dtype"):
        shape, dtype = list(value.shape), str(value.dtype)
        how = draw.one("axis", "axis", "axis", "dtype", "fewer", "more", "none")
        if how == "axis" and shape:
            axis = draw.random.randrange(len(shape))
            shape[axis] = draw.one(0, shape[axis] + 1, max(shape[axis] - 1, 0), 2 * shape[axis], shape[axis] // 2, 1)
        elif how == "fewer" and shape:
            shape = shape[1:]
        elif how == "more":
            shape = [draw.one(1, 2), *shape]
        elif how == "none":
            return None
        else:
            dtype = draw.one(*FLOATS, "int32", "bool", "float8_e4m3fn")
        return jax.ShapeDtypeStruct(tuple(shape), dtype)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.one(0, -1, value + 1, 2 * value, 1000)
    if isinstance(value, float):
        return draw.one(0.0, -1.0, 1e30)
    return draw.one(None, "unknown", *FLOATS, "int8")


def float64(x: Any) -> Any:
    return None if x is None else np.asarray(x).astype(np.float64)


def starts(lengths: list[int], padding: int = 1) -> np.ndarray:
    """Returns query_start_loc. Rows of padding follow."""
    ends = np.cumsum([0, *lengths])
    return np.array([*ends, *[ends[-1]] * padding], np.int32)


def each_row(given: dict[str, Any]) -> Any:
    """Yields each row with tokens, and the slice of its tokens."""
    loc = given["query_start_loc"]
    return [(r, slice(loc[r], loc[r + 1])) for r in range(len(loc) - 1) if loc[r] < loc[r + 1]]


def pool_of(draw: Draw, dtype: str, blocks: int, read: np.ndarray, *state: int) -> Any:
    """A pool that is NaN except for the blocks that rows read."""
    if not draw.has_values:
        return jax.ShapeDtypeStruct((LAYERS, blocks, *state), dtype)
    pool = np.full((LAYERS, blocks, *state), np.nan, np.float32)
    for block in set(read.tolist()) - {0}:
        pool[:, block] = draw.rng.standard_normal((LAYERS, *state), np.float32)
    return pool.astype(dtype)


def blocks_of(draw: Draw, rows: int, each: int) -> tuple[int, np.ndarray, np.ndarray]:
    """Returns how many blocks there are, which one each row reads, and the `each` ones that it may write.

    Some rows read or write nothing, and some write the block that they read.
    """
    read = np.array([0 if draw.chance(0.2) else 1 + r for r in range(rows)], np.int32)
    write = np.arange(1 + rows, 1 + rows + rows * each, dtype=np.int32).reshape(rows, each)
    for r in range(rows):
        write[r, draw.random.randrange(each)] = draw.one(0, read[r], write[r, 0] + each - 1)
        if len(set(write[r]) - {0}) < np.count_nonzero(write[r]):
            write[r, 1:] = 0
    return 1 + rows + rows * each, read, write


def state_before(given: dict[str, Any], row: int, layout: str = "VK") -> np.ndarray:
    state = float64(given["pool"][LAYER, given["read_block"][row]])
    state = state if given["read_block"][row] else np.zeros_like(state)
    return state if layout == "VK" else state.swapaxes(-1, -2)


def compare_states(
    given: dict[str, Any], results: Any, run: Any, terms: Any, *, layout: str = "VK", coarse: Any = None
) -> None:
    """Compares outputs and kept states of rows, and what is kept as it was.

    Args:
        given: The arguments.
        results: The outputs and the pool.
        run: run(row, tokens, state) returns the oracle's outputs and states.
        terms: terms(tokens) is the number of products in a sum.
        layout: The layout of the states.
        coarse: The dtype to which the op rounds on the way, if it is coarser than the pool's.
    """
    out, after = results
    before, written, end = given["pool"], set(), 0
    for row, tokens in each_row(given):
        end = tokens.stop
        wanted, states = run(row, tokens, state_before(given, row, layout))
        number = terms(len(wanted))
        assert_close(out[tokens], wanted, out.dtype, number, f"row {row}")
        if "write_blocks" in given:
            kept = [(t + 1, block) for t, block in zip(range(len(states)), given["write_blocks"][row], strict=False)]
        else:
            kept = [(len(states), given["write_block"][row])]
            if given.get("checkpoint_offset") is not None:
                kept += zip(given["checkpoint_offset"][row], given["checkpoint_block"][row], strict=True)
        for count, block in kept:
            if block:
                written.add(int(block))
                found = float64(after[LAYER, block])
                found = found if layout == "VK" else found.swapaxes(-1, -2)
                dtype = coarse or after.dtype
                assert_close(found, states[count - 1], dtype, number, f"state of row {row} after {count}")
    assert not float64(out[end:]).any()
    assert_untouched(before[LAYER:], after[LAYER:], written)
    assert_untouched(before[:LAYER], after[:LAYER], written=())


def state_copy(draw: Draw) -> Call:
    is_shift, rows, dtype = draw.chance(0.5), draw.size(1, 3, 8, small=20), draw.one(*FLOATS)
    state = (draw.size(3, 4, 6, small=9), draw.size(64, 1000, 8192)) if is_shift else None
    state = state or tuple(draw.size(16, 24, 128, small=40) for _ in range(draw.one(2, 3)))
    layout = draw.one("SD", "DS")
    blocks, read, write = blocks_of(draw, rows, 1)
    window_row = draw.rng.integers(0, state[0], rows).astype(np.int32) if is_shift else None
    pool = pool_of(draw, dtype, blocks, read, *(state[::-1] if is_shift and layout == "DS" else state))

    def compare(given, pool):
        turn = lambda x: x.swapaxes(2, 3) if is_shift and layout == "DS" else x
        before, wanted, after = turn(given["pool"]), np.array(turn(given["pool"])), turn(np.asarray(pool))
        for r, (source, destination) in enumerate(zip(read, write[:, 0], strict=True)):
            first = window_row[r] if is_shift else 0
            if destination and (source != destination or first):
                moved = before[:, source] if source else np.zeros_like(before[:, 0])
                wanted[:, destination, : moved.shape[1] - first] = moved[:, first:]
        after, wanted = (np.ascontiguousarray(x).view(np.uint8) for x in (after, wanted))
        np.testing.assert_array_equal(after, wanted)

    arguments = dict(pool=pool, source=read, destination=write[:, 0], window_row=window_row, layout=layout)
    config = configured(draw, copy_config.default_config(jnp.dtype(dtype).itemsize))
    return Call(ops.state_copy, arguments, compare, config=config)


def _convolution(draw: Draw, most: int, each: int) -> tuple[dict[str, Any], tuple[int, ...], int]:
    """Returns the arguments that both ops have, the sizes of their results, and the rows of windows that may be skipped."""
    width, skipped, channels = draw.one(2, 3, 4, 5), draw.one(0, 0, 1, 3, 8), draw.size(40, 128, 1000, small=300)
    if not draw.runs and draw.chance(0.3):
        channels = 8192
    dtype, layout, lengths = draw.one(*FLOATS), draw.one("SD", "DS"), draw.lengths(min(most, skipped + 1))
    lengths = draw.lengths(most) if most > 9 else lengths
    rows = len(lengths) + 1
    blocks, read, write = blocks_of(draw, rows, each)
    block = width - 1 + skipped, channels
    weight = draw.array(draw.one("float32", dtype), width, channels)
    first = draw.random.randint(1, channels)
    parts = draw.one(None, tuple(n for n in (first, channels - first) if n))
    return (
        dict(
            x=draw.tokens(dtype, lengths, channels),
            pool=pool_of(draw, dtype, blocks, read, *(block if layout == "SD" else block[::-1])),
            layer=draw.layer(),
            weight=weight,
            bias=draw.one(None, draw.array("float32", channels)),
            query_start_loc=starts(lengths),
            read_block=read,
            window_row=draw.rng.integers(0, skipped + 1, rows).astype(np.int32),
            write_block=write[:, 0],
            activation=draw.one("silu", None),
            parts=parts,
            layout=layout,
        ),
        write,
        skipped,
    )


def _convolved(given: dict[str, Any], row: int, tokens: slice) -> tuple[np.ndarray, np.ndarray, Any]:
    """Returns the oracle's outputs of a row, all its inputs, and the pool as [layers, blocks, window, channels]."""
    before = given["pool"] if given["layout"] == "SD" else given["pool"].swapaxes(2, 3)
    taps, first, block = given["weight"].shape[0] - 1, given["window_row"][row], given["read_block"][row]
    history = float64(before[LAYER, block, first : first + taps])
    history = history if block else np.zeros_like(history)
    bias, weight = float64(given["bias"]), float64(given["weight"])
    x = float64(given["x"][tokens, : weight.shape[1]])
    return *oracle.causal_conv1d(x, history, weight, bias, given["activation"] == "silu"), before


def _compare_convolution(given: dict[str, Any], results: Any, kept: Any) -> None:
    """kept(row, inputs) yields each block that the row writes, and the windows' rows that it then has."""
    out, after = results
    out = np.concatenate(out, axis=1) if isinstance(out, tuple) else out
    after, written, end = after if given["layout"] == "SD" else after.swapaxes(2, 3), set(), 0
    before = given["pool"] if given["layout"] == "SD" else given["pool"].swapaxes(2, 3)
    for row, tokens in each_row(given):
        wanted, inputs, _ = _convolved(given, row, tokens)
        assert_close(out[tokens], wanted, out.dtype, given["weight"].shape[0], f"row {row}")
        end = tokens.stop
        for block, window in kept(row, inputs):
            if block:
                written.add(int(block))
                np.testing.assert_array_equal(float64(after[LAYER, block, : len(window)]), window)
    assert not float64(out[end:]).any()
    assert_untouched(np.ascontiguousarray(before[LAYER:]), np.ascontiguousarray(after[LAYER:]), written)


def causal_conv1d_update(draw: Draw) -> Call:
    arguments, write, _ = _convolution(draw, 9, 2)
    if draw.chance(0.3):
        arguments |= dict(boundary_row=np.zeros_like(write[:, 0]), boundary_block=write[:, 1])

    def compare(given, results):
        taps = given["weight"].shape[0] - 1

        def kept(row, inputs):
            yield given["write_block"][row], inputs[1:]
            if "boundary_block" in given:
                whole = given["pool"] if given["layout"] == "SD" else given["pool"].swapaxes(2, 3)
                block = given["read_block"][row]
                window = float64(whole[LAYER, block, :taps])
                yield given["boundary_block"][row], window if block else np.zeros_like(window)

        if "boundary_block" not in given:  # rows without tokens keep boundaries too
            _compare_convolution(given, results, kept)

    config = configured(draw, conv_config.default_config(arguments["layout"]))
    return Call(ops.causal_conv1d_update, arguments, compare, config=config)


def causal_conv1d_prefill(draw: Draw) -> Call:
    arguments, write, _ = _convolution(draw, draw.one(40, 130), 3)
    wide = arguments["x"].shape[1]
    if draw.chance(0.3):
        lengths = np.diff(arguments["query_start_loc"])[:-1].tolist()
        arguments["x"] = draw.tokens(str(arguments["x"].dtype), lengths, wide + draw.one(1, 64))
    if draw.chance(0.5):
        offsets = [sorted(draw.random.randint(0, n) for _ in range(2)) for n in np.diff(arguments["query_start_loc"])]
        arguments |= dict(checkpoint_offset=np.array(offsets, np.int32), checkpoint_block=write[:, 1:])

    def compare(given, results):
        taps = given["weight"].shape[0] - 1

        def kept(row, inputs):
            yield given["write_block"][row], inputs[len(inputs) - taps :]
            if "checkpoint_block" in given:
                for offset, block in zip(given["checkpoint_offset"][row], given["checkpoint_block"][row], strict=True):
                    yield block, inputs[offset : offset + taps]

        _compare_convolution(given, results, kept)

    config = configured(draw, conv_config.default_prefill_config(arguments["layout"]))
    return Call(ops.causal_conv1d_prefill, arguments, compare, config=config)


@dataclasses.dataclass(frozen=True)
class DeltaCase(deferred_cases.Case):
    """The sizes of a gated delta rule. `kda` means a decay per key channel, which deferred states have not."""

    kda: bool = False

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """The shape of one token's log decays."""
        return (self.value_heads, self.key_dim) if self.kda else (self.value_heads,)


def _delta_case(draw: Draw) -> Any:
    """The sizes of a gated delta rule."""
    key_heads, repeats, is_kda = draw.one(1, 1, 2, 3, 4), draw.one(1, 1, 2, 3, 8), draw.chance(0.3)
    dims = (64, 96, 128, 128, 192, 256)
    return DeltaCase(
        "random",
        tuple(draw.lengths(draw.one(1, 1, 4, 8))),
        group=draw.one(8, 16, 16, 32, 32, 5),
        key_heads=key_heads,
        value_heads=key_heads * repeats,
        key_dim=draw.size(*dims, small=40),
        value_dim=draw.size(*dims, small=40),
        dtype=draw.one("bfloat16", *FLOATS),
        state_dtype=draw.one(*FLOATS),
        ring_dtype=draw.one(*FLOATS),
        kda=is_kda,
    )


def _delta_states(draw: Draw, case: Any, each: int) -> tuple[dict[str, Any], np.ndarray]:
    rows, layout = len(case.lengths) + 1, draw.one("VK", "VK", "KV")
    blocks, read, write = blocks_of(draw, rows, each)
    dims = (case.value_dim, case.key_dim) if layout == "VK" else (case.key_dim, case.value_dim)
    pool = pool_of(draw, case.state_dtype, blocks, read, case.value_heads, *dims)
    where = dict(pool=pool, layer=draw.layer(), query_start_loc=starts(list(case.lengths)), read_block=read)
    scale = draw.one(None, 0.125)
    # Keys that are not normalised must be short, or states grow without a bound.
    return where | dict(layout=layout, scale=scale, use_qk_l2norm=draw.runs or draw.chance(0.8)), write


def _split(given: dict[str, Any], key_heads: int, key_dim: int, value_heads: int) -> list[np.ndarray]:
    qkv, keys = float64(given["qkv"]), key_heads * key_dim
    cut = lambda x, heads: x.reshape(len(x), heads, -1)
    return [
        *(cut(x, key_heads) for x in (qkv[:, :keys], qkv[:, keys : 2 * keys])),
        cut(qkv[:, 2 * keys :], value_heads),
    ]


def _compare_delta(given: dict[str, Any], results: Any, inputs: list[Any], terms: Any, coarse: Any = None) -> None:
    key_dim = inputs[0].shape[-1]
    scale = given["scale"] or key_dim**-0.5

    def run(_, tokens, state):
        return oracle.gated_delta_rule(*(x[tokens] for x in inputs), state, scale, given["use_qk_l2norm"])

    compare_states(given, results, run, terms, layout=given["layout"], coarse=coarse)


def gated_delta_rule_update(draw: Draw) -> Call:
    case, lengths = _delta_case(draw), None
    lengths, window = list(case.lengths), max(1, *case.lengths, 0)
    states, write = _delta_states(draw, case, window)
    arguments = dict(
        qkv=draw.tokens(case.dtype, lengths, case.channels),
        a=draw.tokens(draw.one(case.dtype, "float32"), lengths, *case.gate_shape),
        b=draw.tokens(draw.one(case.dtype, "float32"), lengths, case.value_heads),
        A_log=draw.array(draw.one("float32", "float32", "bfloat16"), case.value_heads),
        dt_bias=draw.array("float32", *case.gate_shape),
        write_blocks=write,
        lower_bound=draw.one(None, None, -5.0),
        allow_neg_eigval=draw.chance(0.3),
        **states,
    )

    def compare(given, results):
        q, k, v = _split(given, case.key_heads, case.key_dim, case.value_heads)
        beta_max = 2 if given["allow_neg_eigval"] else 1
        names = "a", "b", "A_log", "dt_bias"
        gates = oracle.gates(*(given[name] for name in names), given["lower_bound"], beta_max)
        _compare_delta(given, results, [q, k, v, *gates], lambda n: 4 * (n + 1) * case.key_dim)

    itemsize = jnp.dtype(case.state_dtype).itemsize
    config = configured(draw, delta_config.default_config(len(lengths) + 1, window, itemsize, states["layout"]))
    return Call(ops.gated_delta_rule_update, arguments, compare, ("xla", "triton", "mosaic_gpu"), config)


def _delta_inputs(draw: Draw, case: Any, lengths: list[int]) -> dict[str, Any]:
    keys = lambda: draw.tokens(case.dtype, lengths, case.key_heads, case.key_dim)
    g, beta = (draw.tokens("float32", lengths, *shape) for shape in (case.gate_shape, case.gate_shape[:1]))
    if draw.has_values:
        g, beta = -np.abs(g), 1 / (1 + np.exp(-beta))
    return dict(
        q=keys(), k=keys(), v=draw.tokens(case.dtype, lengths, case.value_heads, case.value_dim), g=g, beta=beta
    )


def gated_delta_rule_recurrent(draw: Draw) -> Call:
    case = _delta_case(draw)
    lengths, window = list(case.lengths), max(1, *case.lengths, 0)
    states, write = _delta_states(draw, case, window)
    arguments = _delta_inputs(draw, case, lengths) | states | dict(write_blocks=write)

    def compare(given, results):
        inputs = [float64(given[name]) for name in ("q", "k", "v", "g", "beta")]
        _compare_delta(given, results, inputs, lambda n: 4 * (n + 1) * case.key_dim)

    itemsize = jnp.dtype(case.state_dtype).itemsize
    config = configured(draw, delta_config.default_config(len(lengths) + 1, window, itemsize, states["layout"]))
    return Call(ops.gated_delta_rule_recurrent, arguments, compare, config=config)


def chunked(op: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an op cut its rows into chunks, from `num_computed_tokens` on."""

    def run(num_computed_tokens, chunk_size, **arguments):
        inputs = arguments.get("v", arguments.get("x"))
        # Chunks that are wrong are refused by `chunk_rows`, and chunks of other rows by the op.
        tokens = 1 if inputs is None else max(1, *inputs.shape[:1])
        chunks = ops.chunk_rows(arguments["query_start_loc"], num_computed_tokens, tokens, chunk_size)
        return grouped.call(op, chunks=chunks, **arguments)

    return run


def _chunks(draw: Draw, lengths: list[int], write: np.ndarray, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Returns where chunks end, and checkpoints at ends of chunks."""
    size = draw.one(*sizes)
    computed = np.array([draw.one(0, size, draw.random.randint(0, 3 * size)) for _ in [*lengths, 0]], np.int32)
    plan = dict(num_computed_tokens=computed, chunk_size=size, write_block=write[:, 0])
    if draw.chance(0.4):
        offsets, blocks = np.zeros((len(computed), 2), np.int32), np.zeros((len(computed), 2), np.int32)
        for r, (n, start) in enumerate(zip(lengths, computed, strict=False)):
            ends = [end for end in range(1, n + 1) if (start + end) % size == 0][:2]
            offsets[r, : len(ends)], blocks[r, : len(ends)] = ends, write[r, 1 : 1 + len(ends)]
        plan |= dict(checkpoint_offset=offsets, checkpoint_block=blocks)
    return plan


def gated_delta_rule_prefill(draw: Draw) -> Call:
    case = _delta_case(draw)
    lengths = draw.lengths(draw.one(1, 70, 150), rows=3)
    case = dataclasses.replace(case, lengths=tuple(lengths), dtype=draw.one("bfloat16", "bfloat16", *FLOATS))
    states, write = _delta_states(draw, case, 3)
    arguments = _delta_inputs(draw, case, lengths) | states
    arguments |= _chunks(draw, lengths, write, (64,) if draw.runs or draw.chance(0.8) else (1, 16, 32, 48, 128))

    def compare(given, results):
        inputs = [float64(given[name]) for name in ("q", "k", "v", "g", "beta")]
        coarse = jnp.bfloat16 if case.kda and case.dtype == "bfloat16" else None
        _compare_delta(given, results, inputs, lambda n: 16 * (64 + case.key_dim), coarse)

    default = delta_config.default_prefill_config(
        case.value_heads * case.value_dim * len(lengths), case.key_dim, jnp.dtype(case.dtype).itemsize, case.kda
    )
    op = chunked(ops.gated_delta_rule_prefill)
    return Call(op, arguments, compare, ("xla", "triton", "mosaic_gpu"), configured(draw, default))


def gated_delta_rule_gates(draw: Draw) -> Call:
    case, dtype = _delta_case(draw), draw.one(*FLOATS)
    lengths = list(case.lengths)
    arguments = dict(
        a=draw.tokens(dtype, lengths, *case.gate_shape),
        b=draw.tokens(dtype, lengths, case.value_heads),
        A_log=draw.array("float32", case.value_heads),
        dt_bias=draw.array("float32", *case.gate_shape),
        lower_bound=draw.one(None, -5.0),
        allow_neg_eigval=draw.chance(0.5),
    )

    def compare(given, results):
        beta_max = 2 if given["allow_neg_eigval"] else 1
        names = "a", "b", "A_log", "dt_bias"
        wanted = oracle.gates(*(given[name] for name in names), given["lower_bound"], beta_max)
        for found, own in zip(results, wanted, strict=True):
            assert_close(found[:-PADDING], own[:-PADDING], jnp.float32, 16, "gates")

    return Call(ops.gated_delta_rule_gates, arguments, compare, ())


def _deferred(draw: Draw, case: Any) -> dict[str, Any]:
    """Returns the arguments that all ops of deferred states have."""
    rows = len(case.lengths)
    shapes = case.pool_shapes(LAYERS, 9, max(rows, 1))
    pools = {name: draw.array(dtype, *shape) for name, (shape, dtype) in shapes.items()}
    names = "slot", "base", "position", "read_block", "fold_block"
    where = {name: np.zeros(rows, np.int32) for name in names} | dict(query_start_loc=starts(list(case.lengths), 0))
    most = draw.one(1, max(1, *case.lengths, 0), (case.group + 1) // 2)
    return pools | where | dict(layer=draw.layer(), max_query_tokens=most)


def gated_delta_rule_deferred(draw: Draw) -> Call:
    case = dataclasses.replace(_delta_case(draw), kda=False)
    lengths, itemsize = list(case.lengths), jnp.dtype(case.state_dtype).itemsize
    arguments = dict(
        qkv=draw.tokens(case.dtype, lengths, case.channels),
        a=draw.tokens(draw.one(case.dtype, "float32"), lengths, *case.gate_shape),
        b=draw.tokens(draw.one(case.dtype, "float32"), lengths, case.value_heads),
        A_log=draw.array("float32", case.value_heads),
        dt_bias=draw.array(draw.one("float32", case.dtype), *case.gate_shape),
        lower_bound=draw.one(None, -5.0),
        allow_neg_eigval=draw.chance(0.3),
        scale=draw.one(None, 0.125),
        use_qk_l2norm=draw.chance(0.8),
        **_deferred(draw, case),
    )
    default = deferred_config.default_config(len(lengths), itemsize)
    implementations = "xla", "triton", "mosaic_gpu"
    return Call(ops.gated_delta_rule_deferred, arguments, None, implementations, configured(draw, default))


def selective_state_deferred(draw: Draw) -> Call:
    groups = draw.one(1, 1, 2, 3)
    case = deferred_mamba2_cases.Case(
        "random",
        tuple(draw.lengths(draw.one(1, 4, 8))),
        group=draw.one(8, 16, 16, 32, 5),
        heads=groups * draw.one(1, 2, 3, 8, 40),
        head_dim=draw.size(64, 64, 128, small=80),
        state_dim=draw.size(64, 128, 128, 256, small=80),
        groups=groups,
        dtype=draw.one("bfloat16", *FLOATS),
        state_dtype=draw.one(*FLOATS),
    )
    lengths, heads = list(case.lengths), draw.array("float32", case.heads)
    arguments = dict(
        xBC=draw.tokens(case.dtype, lengths, case.channels),
        dt=draw.tokens(draw.one(case.dtype, "float32"), lengths, case.heads),
        A=heads,
        D=draw.one(None, heads),
        dt_bias=draw.one(None, heads),
        dt_softplus=draw.chance(0.8),
        **_deferred(draw, case),
    )
    default = deferred_mamba2_config.default_config(case.state_dim, jnp.dtype(case.state_dtype).itemsize)
    implementations = "xla", "triton", "mosaic_gpu"
    return Call(ops.selective_state_deferred, arguments, None, implementations, configured(draw, default))


# The rows by which results of deferred states are compared.
DEFERRED = dict(
    gated_delta_rule_deferred=deferred_rows,
    selective_state_deferred=deferred_mamba2_rows,
)


def deferred_kind(draw: Draw, op: str) -> tuple[Any, Any]:
    """Returns a kind of deferred states, whose sizes have the name "random", and the sizes."""
    dtype, state = draw.one("bfloat16", "bfloat16", *FLOATS), draw.one(*FLOATS)
    if op == "gated_delta_rule_deferred":
        case = _delta_case(draw)
        dims = delta_rule_claims.Dims(
            case.key_heads, case.value_heads, min(case.key_dim, 192), min(case.value_dim, 192)
        )
        options = dict(
            ring=draw.one("float32", "bfloat16"),
            length=draw.one(8, 16, 16, 32),
            l2norm=draw.chance(0.7),
            lower_bound=draw.one(None, -5.0),
            beta_max=draw.one(1, 2),
        )
        return deferred_rows.Kind("random", dtype, state, **options), dims
    groups, given = draw.one(1, 1, 2), draw.one(("D", "dt_bias"), (), ("D",))
    sizes = draw.size(64, 128, small=80), draw.size(16, 64, 128, small=80), groups
    dims = state_space_rows.Dims(groups * draw.one(1, 2), *sizes)
    return DEFERRED[op].Kind("random", dtype, state, draw.one(16, 16, 32), given, draw.chance(0.8)), dims


def _mamba(draw: Draw, lengths: list[int], each: int, *, is_mamba1: bool, sizes: tuple[int, ...]) -> tuple[Any, Any]:
    """Returns the arguments of an op of Mamba, and the blocks that rows may write."""
    heads, head_dim, groups, state_dim = sizes
    rows, dtype, state_dtype = len(lengths) + 1, draw.one("bfloat16", *FLOATS), draw.one(*FLOATS)
    blocks, read, write = blocks_of(draw, rows, each)
    channel, per = (heads, head_dim), (heads, head_dim) if is_mamba1 else (heads,)
    A = draw.array("float32", *per, *((state_dim,) if is_mamba1 else ()))
    fixed, group = lambda: draw.array("float32", *per), (groups, state_dim)
    return (
        dict(
            x=draw.tokens(dtype, lengths, *channel),
            dt=draw.tokens(draw.one(dtype, "float32"), lengths, *per),
            A=-np.exp(A) if draw.has_values else A,
            B=draw.tokens(dtype, lengths, *group),
            C=draw.tokens(dtype, lengths, *group),
            pool=pool_of(draw, state_dtype, blocks, read, *channel, state_dim),
            layer=draw.layer(),
            query_start_loc=starts(lengths),
            read_block=read,
            D=draw.one(None, fixed()),
            z=draw.tokens(dtype, lengths, *channel) if draw.chance(0.4) else None,
            dt_bias=draw.one(None, fixed()),
            # Without it, step sizes must not be negative.
            dt_softplus=draw.runs or draw.chance(0.8),
        ),
        write,
    )


def _compare_mamba(given: dict[str, Any], results: Any, terms: Any) -> None:
    packed = {name: float64(given[name]) for name in ("x", "dt", "B", "C", "z") if given[name] is not None}
    fixed = {name: float64(given[name]) for name in ("A", "D", "dt_bias")}

    def run(_, tokens, state):
        own = {name: x[tokens] for name, x in packed.items()}
        return oracle.selective_state_update(**own, **fixed, state=state, dt_softplus=given["dt_softplus"])

    compare_states(given, results, run, terms)


def selective_state_update(draw: Draw) -> Call:
    is_mamba1, groups = draw.chance(0.3), draw.one(1, 1, 2, 3)
    few = (1, 2) if draw.runs else (1, 2, 3, 16)
    sizes = (groups * draw.one(*few), draw.size(64, 64, 128, small=80), groups, draw.size(64, 128, 256, small=80))
    if is_mamba1:
        sizes = 1, draw.size(64, 1000, *(() if draw.runs else (8192,)), small=80), 1, draw.size(16, small=64)
    lengths = draw.lengths(draw.one(1, 1, 4, 7), rows=3 if draw.runs else 6)
    window = max(1, *lengths, 0)
    arguments, write = _mamba(draw, lengths, window, is_mamba1=is_mamba1, sizes=sizes)
    arguments["write_blocks"] = write
    compare = functools.partial(_compare_mamba, terms=lambda n: 4 * (n + 1) * sizes[3])
    itemsize = arguments["pool"].dtype.itemsize
    config = configured(draw, update_config.default_config(window, sizes[3], itemsize))
    return Call(ops.selective_state_update, arguments, compare, ("xla", "triton", "mosaic_gpu"), config)


def ssd(draw: Draw) -> Call:
    groups = draw.one(1, 1, 2)
    heads = groups * draw.one(*((1,) if draw.runs else (1, 2, 3, 16)))
    sizes = heads, draw.size(64, 64, 128, small=80), groups, draw.size(64, 128, 128, 256, small=80)
    lengths = draw.lengths(draw.one(1, 20, 70) if draw.runs else draw.one(1, 70, 200, 2048), rows=2)
    arguments, write = _mamba(draw, lengths, 3, is_mamba1=False, sizes=sizes)
    chunk_sizes = (64,) if draw.chance(0.7) else (16, 32, 128, 256, *(() if draw.runs else (1, 8, 48, 512)))
    arguments |= _chunks(draw, lengths, write, chunk_sizes)
    if draw.chance(0.2):
        arguments["D"] = draw.array("float32", *sizes[:2])
    size = arguments["chunk_size"]
    compare = functools.partial(_compare_mamba, terms=lambda n: 16 * (size + sizes[3]))
    itemsize = arguments["x"].dtype.itemsize
    default = ssd_config.default_config(heads * sizes[1] * len(lengths), sizes[3], size, itemsize)
    return Call(chunked(ops.ssd), arguments, compare, ("xla", "triton", "mosaic_gpu"), configured(draw, default))


def selective_scan(draw: Draw) -> Call:
    groups = draw.one(1, 1, 1, 2)
    wide = (1000,) if draw.runs else (1000, 8192)
    head_dim = draw.size(64, *wide, small=80)
    sizes = groups * draw.one(1, 1, 2), head_dim, groups, draw.size(16, 16, 96, small=40)
    lengths = draw.lengths(draw.one(1, 5, 20) if head_dim < 1000 else 2, rows=3)
    arguments, write = _mamba(draw, lengths, 3, is_mamba1=True, sizes=sizes)
    arguments |= dict(write_block=write[:, 0])
    if draw.chance(0.4):
        offsets = [sorted(draw.random.randint(1, max(n, 1)) for _ in range(2)) for n in [*lengths, 0]]
        arguments |= dict(checkpoint_offset=np.array(offsets, np.int32), checkpoint_block=write[:, 1:])
    compare = functools.partial(_compare_mamba, terms=lambda n: 4 * (n + 1) * sizes[3])
    config = configured(draw, scan_config.default_config(sizes[3], arguments["pool"].dtype.itemsize))
    return Call(ops.selective_scan, arguments, compare, config=config)


def _product(draw: Draw) -> tuple[Any, ...]:
    tokens, dtype = draw.one(1, 1, 3, 16, 17, 64, 65, 100), draw.one("bfloat16", *FLOATS)
    inputs, outputs = draw.size(256, 1000, 2560, small=600), draw.size(64, 333, 2048, small=300)
    if not draw.runs and draw.chance(0.3):
        inputs, outputs = draw.one(2560, 4096, 9216), draw.one(12352, 18432, 248320)
    weight = draw.array(draw.one(dtype, dtype, dtype, "float32"), outputs, inputs, scale=inputs**-0.5)
    return draw.array(dtype, tokens, inputs), weight, inputs, outputs


def linear(draw: Draw) -> Call:
    x, weight, inputs, outputs = _product(draw)
    is_gated = draw.chance(0.3) and outputs % 2 == 0
    width = outputs // (1 + is_gated)
    first = draw.random.randint(1, width)
    parts = draw.one(None, (width,), tuple(n for n in (first, width - first) if n))
    arguments = dict(x=x, weight=weight, bias=draw.one(None, draw.array("float32", outputs)), is_gated=is_gated)
    arguments |= dict(parts=parts, out_dtype=draw.one(None, None, *FLOATS))

    def compare(given, results):
        wanted = oracle.linear(*(float64(given[name]) for name in ("x", "weight", "bias")), is_gated)
        found = np.concatenate([float64(part) for part in results], axis=1)
        # XLA rounds the products of many tokens before it adds the bias and gates them.
        coarse = max((results[0].dtype, given["weight"].dtype), key=lambda dtype: jnp.finfo(dtype).eps)
        roundings = 4 if len(found) > linear_config.MAX_TOKENS else 1
        assert_close(found / roundings, wanted / roundings, coarse, inputs, "product")

    config = configured(draw, linear_config.default_config(x, weight, is_gated=is_gated))
    return Call(ops.linear, arguments, compare, config=config)


def linear_sums(draw: Draw) -> Call:
    x, weight, inputs, _ = _product(draw)

    def compare(given, results):
        wanted = oracle.linear(given["x"], given["weight"])
        assert_close(float64(results).sum(axis=0), wanted, results.dtype, inputs, "sums")

    config = configured(draw, linear_config.default_config(x, weight, is_summed=True))
    return Call(ops.linear_sums, dict(x=x, weight=weight), compare, config=config)


def _norm(draw: Draw) -> tuple[dict[str, Any], Any]:
    tokens, channels, shares = draw.one(1, 3, 16, 100), draw.size(2560, 1000, small=400), draw.one(1, 2, 4, 9)
    if not draw.runs and draw.chance(0.2):
        channels = draw.one(8192, 20000, 65536, 131072)
    arguments = dict(
        x=draw.array(draw.one(*FLOATS), tokens, channels),
        addend=draw.array(draw.one("float32", *FLOATS), shares, tokens, channels),
        weight=draw.array(draw.one("float32", *FLOATS), channels),
        epsilon=draw.one(1e-6, 0.1),
        offset=draw.one(0.0, 1.0),
        scale=draw.one(1.0, 0.22),
        out_dtype=draw.one(None, None, *FLOATS),
    )

    def compare(given, results):
        total, normed = results[:2]
        options = {name: given[name] for name in ("epsilon", "offset")}
        wanted, _ = oracle.add_rms_norm(given["x"], given["addend"], given["weight"], **options, scale=given["scale"])
        assert_close(total, wanted, total.dtype, shares, "total")
        zeros = np.zeros((1, tokens, channels))
        _, wanted = oracle.add_rms_norm(total, zeros, given["weight"], **options)
        assert_close(normed, wanted, normed.dtype, channels, "normed")

    return arguments, compare


def add_rms_norm(draw: Draw) -> Call:
    arguments, compare = _norm(draw)
    shares, _, channels = arguments["addend"].shape
    config = configured(draw, rms_norm_config.default_config(channels, shares))
    return Call(ops.add_rms_norm, arguments, compare, config=config)


def on_devices(op: Callable[..., Any]) -> Callable[..., Any]:
    """Lets an op run inside a `shard_map` over the axis "_", whose mailboxes are only described."""

    @functools.wraps(op)
    def run(capacity, devices, epoch, **arguments):
        def inside(arrays, memory, addresses, epoch):
            boxes = ops.Mailboxes(memory=memory, addresses=addresses, capacity=capacity, axis="_")
            return op(mailboxes=boxes, epoch=epoch, **arrays, **options)

        is_array = lambda x: any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(x))
        arrays = {name: x for name, x in arguments.items() if is_array(x)}
        options = {name: x for name, x in arguments.items() if name not in arrays}
        memory = jnp.zeros((1, devices * 2 * 2 * capacity), jnp.int32)
        addresses = jnp.zeros((1, devices + 1, 2), jnp.int32)
        every = jax.sharding.PartitionSpec()
        mesh = jax.sharding.get_abstract_mesh()
        mapped = jax.shard_map(inside, mesh=mesh, in_specs=every, out_specs=every, check_vma=False)
        return mapped(arrays, memory, addresses, epoch)

    return run


def _over_devices(draw: Draw, words: int) -> dict[str, Any]:
    capacity = draw.one(words, words, 2**20, max(words - 1, 1))
    return dict(capacity=capacity, devices=draw.one(1, 2, 4, 8), epoch=np.int32(1)[...])


def all_reduce(draw: Draw) -> Call:
    arguments, _ = _norm(draw)
    _, tokens, channels = arguments["addend"].shape
    given = dict(addend=arguments["addend"], **_over_devices(draw, tokens * channels))
    config = configured(draw, all_reduce_config.default_config(channels))
    return Call(on_devices(ops.all_reduce), given, None, config=config)


def all_reduce_rms_norm(draw: Draw) -> Call:
    arguments, _ = _norm(draw)
    _, tokens, channels = arguments["addend"].shape
    arguments |= _over_devices(draw, tokens * channels)
    config = configured(draw, all_reduce_config.default_config(channels))
    return Call(on_devices(ops.all_reduce_rms_norm), arguments, None, config=config)


def least_kept(draw: Draw) -> Call:
    rows, tokens = draw.size(1, 8, 9, 40, small=70), draw.size(1001, 5000, 50_000, small=2000)
    if not draw.runs and draw.chance(0.3):
        tokens = 248320
    weights = draw.array("float32", rows, tokens, scale=draw.one(1e-3, 1.0, 30.0))
    top_k, top_p = draw.array("int32", rows), draw.array("float32", rows)
    if draw.has_values:
        weights = np.exp(weights - weights.max(axis=1, keepdims=True))
        top_k = draw.rng.choice([0, 1, 50, tokens, 3000], rows).astype(np.int32)
        top_p = draw.rng.choice([1, 0.9, 0.5, 0.05], rows).astype(np.float32)

    def compare(given, found):
        for row, k, p, least in zip(float64(weights), top_k, top_p, found, strict=True):
            left = np.sort(row)[::-1]
            left = left[left >= left[min(k, tokens) - 1]] if k else left
            kept, limit = left[left >= least], p * left.sum()
            slack = limit * 8 * np.finfo(np.float32).eps * np.sqrt(tokens)
            assert row.max() >= least
            if p == 1:
                assert len(kept) == len(left) or left[len(kept)] < 2.0**-125
            else:
                assert kept.sum() >= limit - slack
                assert kept[kept > kept[-1]].sum() < limit + slack
            assert (row >= least).sum() == len(kept)

    arguments = dict(weights=weights, top_k=top_k, top_p=top_p)
    config = configured(draw, least_kept_config.default_config(rows, tokens))
    return Call(ops.least_kept, arguments, compare, config=config)


def _rule(draw: Draw, experts: int) -> tuple[int, dict[str, Any]]:
    """Returns the number of a token's experts, and how they are chosen."""
    groups = draw.one(*[n for n in (1, 1, 2, 4, 8) if experts % n == 0])
    top_groups = draw.random.randint(1, groups) if experts // groups >= 2 else groups
    top_k = draw.random.randint(1, min(10, experts // groups * top_groups))
    shared = draw.one(0, 0, 1, 2)
    return top_k, dict(
        scores=draw.one("softmax", "sigmoid"),
        shared=shared,
        shared_gate=shared > 0 and draw.chance(0.5),
        groups=groups,
        top_groups=top_groups,
        renormalise=draw.chance(0.7),
        scale=draw.one(1.0, 2.5),
        logits_dtype=draw.one(None, None, "float32", *(() if draw.runs else ("bfloat16",))),
    )


def _logits(draw: Draw, tokens: int, experts: int, options: dict[str, Any]) -> dict[str, Any]:
    shares, outputs = draw.one((), (1,), (4,)), experts + options["shared_gate"]
    bias = draw.array("float32", experts) if draw.chance(0.3) else None
    valid = draw.array("bool", tokens) if draw.chance(0.5) else None
    logits = draw.array(draw.one("float32", *(() if draw.runs else FLOATS)), *shares, tokens, outputs)
    return dict(logits=logits, bias=bias, valid=valid)


def _are_clear(logits: Any, given: dict[str, Any]) -> np.ndarray:
    """Whether float32 and float64 must choose the same experts of each token. Sums of shares are exact to 1e-6."""
    logits = logits[:, : logits.shape[1] - given["shared_gate"]]
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    scores = powers / powers.sum(axis=1, keepdims=True) if given["scores"] == "softmax" else 1 / (1 + np.exp(-logits))
    scores = scores if given["bias"] is None else scores + float64(given["bias"])
    gap = lambda x: np.diff(np.sort(x, axis=1), axis=1).min(axis=1, initial=np.inf)
    groups = np.sort(scores.reshape(len(scores), given["groups"], -1), axis=2)[:, :, -2:].sum(axis=2)
    return (gap(scores) > 1e-5) & (gap(groups) > 1e-5)


def _wanted_choice(given: dict[str, Any]) -> tuple[Any, Any, np.ndarray]:
    """Returns the oracle's experts and weights, and which tokens' are clear."""
    logits = float64(given["logits"])
    logits = logits if logits.ndim == 2 else logits.sum(axis=0)
    names = "scores", "bias", "groups", "top_groups", "renormalise", "scale", "valid", "shared", "shared_gate"
    chosen, weights = oracle.choose_experts(logits, given["top_k"], **{name: given[name] for name in names})
    valid = np.ones(len(logits), bool) if given["valid"] is None else given["valid"]
    return chosen, weights, _are_clear(logits, given) & valid


def choose_experts(draw: Draw) -> Call:
    tokens, experts = draw.one(1, 3, 16, 64), draw.size(8, 16, 128, 256, small=64)
    top_k, options = _rule(draw, experts)
    arguments = _logits(draw, tokens, experts, options) | options | dict(top_k=top_k)

    def compare(given, results):
        chosen, weights, are_clear = _wanted_choice(given)
        np.testing.assert_array_equal(results[0][are_clear], chosen[are_clear])
        np.testing.assert_allclose(results[1][are_clear], weights[are_clear], rtol=1e-4, atol=1e-6)
        invalid = np.zeros(tokens, bool) if given["valid"] is None else ~given["valid"]
        assert (results[0][invalid] == -1).all()

    return Call(ops.choose_experts, arguments, compare)


def _experts(draw: Draw, experts: int) -> tuple[dict[str, Any], str]:
    tokens, dtype, activation = draw.one(1, 1, 3, 16, 40), draw.one("bfloat16", *FLOATS), draw.one("swiglu", "relu2")
    hidden, size = draw.size(256, 512, small=300), draw.size(128, 256, small=200)
    if not draw.runs and draw.chance(0.3):
        tokens, hidden, size = draw.one(1, 64, 300, 2048), draw.one(2048, 2688, 4096), draw.one(512, 1856, 14336)
    x = draw.array(dtype, tokens, hidden)
    up = draw.array(dtype, experts, ACTIVATIONS[activation].projections * size, hidden, scale=hidden**-0.5)
    return dict(
        x=x, up=up, down=draw.array(dtype, experts, hidden, size, scale=size**-0.5), activation=activation
    ), dtype


def _compare_mixture(given: dict[str, Any], found: Any, chosen: Any, weights: Any, rows: Any) -> None:
    arrays = [float64(given[name]) for name in ("x", "up", "down")]
    wanted = oracle.mixture_of_experts(*arrays, chosen, weights, given["activation"])
    # A token's result has as many roundings to the dtype as experts, before the last one.
    terms = 16 * (given["up"].shape[2] + given["down"].shape[2])
    dtype = given["x"].dtype
    assert_close(found[rows], wanted[rows], dtype, terms if dtype == np.float32 else 1e7, "tokens")


def _experts_config(draw: Draw, arguments: dict[str, Any], pairs: int) -> Any:
    itemsize = arguments["x"].dtype.itemsize
    default = experts_config.default_config(pairs, arguments["up"].shape[0], itemsize)
    if arguments["x"].shape[0] == 1:
        default = experts_config.config_of_one_token(itemsize, ACTIVATIONS[arguments["activation"]].projections)
    return configured(draw, default)


def _mixture(draw: Draw, op: Callable[..., Any], **options: Any) -> Call:
    experts = draw.size(4, 8, 16, small=20)
    arguments, _ = _experts(draw, experts)
    tokens, top_k = arguments["x"].shape[0], draw.random.randint(1, min(experts, 6))
    chosen = draw.rng.integers(-1, experts + 1, (tokens, top_k)).astype(np.int32)
    weights = np.abs(draw.rng.standard_normal((tokens, top_k), np.float32))
    arguments |= dict(chosen=chosen, weights=weights, **options)

    def compare(given, found):
        found = found if found.ndim == 2 else float64(found).sum(axis=0)
        _compare_mixture(given, found, np.where(chosen < experts, chosen, -1), weights, slice(None))

    return Call(op, arguments, compare, config=_experts_config(draw, arguments, tokens * top_k))


def mixture_of_experts(draw: Draw) -> Call:
    return _mixture(draw, ops.mixture_of_experts, out_dtype=None if draw.runs else draw.one(None, *FLOATS))


def mixture_of_experts_sums(draw: Draw) -> Call:
    return _mixture(draw, ops.mixture_of_experts_sums)


def routed_experts_sums(draw: Draw) -> Call:
    experts = draw.size(8, 16, small=20)
    top_k, options = _rule(draw, experts)
    arguments, _ = _experts(draw, experts + options["shared"])
    tokens = arguments["x"].shape[0]
    arguments |= _logits(draw, tokens, experts, options) | options | dict(top_k=top_k)

    def compare(given, found):
        chosen, weights, are_clear = _wanted_choice(given)
        _compare_mixture(given, float64(found).sum(axis=0), chosen, weights, are_clear)

    config = _experts_config(draw, arguments, tokens * (top_k + options["shared"]))
    return Call(ops.routed_experts_sums, arguments, compare, config=config)


def paged_attention(draw: Draw) -> Call:
    kv_heads, is_latent, is_prompt = draw.one(1, 1, 2, 4), draw.chance(0.15), draw.chance(0.5)
    dims = draw.one(64, 128, 192, 256) if draw.chance(0.7) else draw.random.randint(1, 300)
    value_dim = draw.random.randint(1, dims) if is_latent else None
    if is_latent and draw.chance(0.5):
        kv_heads, dims, value_dim = 1, 576, 512
    heads = kv_heads * draw.one(1, 2, 3, 8)
    window = draw.one(1, 2, 4, 8)
    lengths = draw.lengths(draw.one(5, 70, 130) if is_prompt else window, rows=3)
    computed = [draw.one(0, draw.random.randint(0, 400)) for _ in lengths]
    page_size = draw.one(16, 32, 64, 128, 24, 7)
    dtype = draw.one("bfloat16", "bfloat16", *FLOATS)
    sizes = attention_batches.Dims(heads, kv_heads, dims, value_dim)
    batch = attention_batches.make(draw.rng, lengths, computed, sizes, dtype, page_size)
    arguments = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in batch.arguments.items()}
    scale = draw.one(None, 0.1)
    arguments |= dict(max_query_tokens=None if is_prompt else window, scale=scale)
    out_dim = value_dim or dims
    if not draw.runs and draw.chance(0.3):
        shape = sum(lengths) + PADDING, heads + draw.one(0, 0, 1), out_dim + draw.one(0, out_dim, 64)
        arguments["gates"] = draw.array(draw.one(dtype, "float32"), *shape)
    if draw.chance(0.3):
        arguments["slots"] = draw.rng.permutation(len(lengths)).astype(np.int32)
        arguments["page_table"] = arguments["page_table"][np.argsort(arguments["slots"])]

    def compare(given, out):
        attention_batches.assert_is_attention(batch, out, scale)

    default = attention_config.default_config(
        dims + (0 if is_latent else dims), jnp.dtype(dtype).itemsize, is_prompt=is_prompt, is_latent=is_latent
    )
    implementations = "xla", "triton", "mosaic_gpu"
    return Call(ops.paged_attention, arguments, compare, implementations, configured(draw, default))


def rotate_and_store(draw: Draw) -> Call:
    kv_heads, dim = draw.one(1, 2, 4, 8), draw.size(128, 256, small=100)
    dims = rotations.Dims(
        kv_heads * draw.one(1, 2, 3, 8),
        kv_heads,
        dim,
        draw.random.randint(0, dim // 2),
        is_normed=draw.chance(0.5),
        gate=draw.one(0, dim, 3),
        value_dim=draw.one(None, draw.random.randint(1, 100)),
    )
    dtype = draw.one(*FLOATS)
    arguments = rotations.make(draw.rng, dims, draw.one(1, 5, 9), dtype, page_size=draw.one(6, 16, 64))
    arguments = {name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in arguments.items()}
    if not draw.runs and draw.chance(0.3):
        arguments["heads"] = draw.random.randint(1, dims.heads)
    config = configured(draw, rotary_config.default_config(dim))
    return Call(ops.rotate_and_store, arguments, rotations.assert_is_right, config=config)


def rotate(draw: Draw) -> Call:
    tokens, heads, dim = draw.one(1, 5), draw.one(1, 3), draw.random.randint(2, 130)
    angle = draw.array("float32", tokens, draw.random.randint(1, dim // 2))
    arguments = dict(
        x=draw.array(draw.one(*FLOATS), tokens, heads, dim),
        cos=np.cos(angle) if draw.has_values else angle,
        sin=np.sin(angle) if draw.has_values else angle,
        weight=draw.one(None, draw.array(draw.one(*FLOATS), dim)),
        epsilon=1e-6,
        offset=draw.one(0.0, 1.0),
    )

    def compare(given, out):
        for t in range(tokens):
            for h in range(heads):
                angles, weight = (given["cos"][t], given["sin"][t]), given["weight"]
                wanted = oracle.rotate(given["x"][t, h], *angles, weight, 1e-6, given["offset"])
                assert_close(out[t, h], wanted, out.dtype, dim, f"token {t}, head {h}")

    return Call(ops.rotate, arguments, compare, ())


def _chain_case(draw: Draw, *, is_over_devices: bool = False) -> tuple[Any, int]:
    """The steps of a chain, most of which one launch can run, and the number of tokens."""
    tokens = draw.one(2, 3, 8, 16) if is_over_devices else draw.one(1, 1, 1, 2, 5, 8, 16, 17)
    inputs = draw.one(256, 512, 768, 1024, 2048, 3072, 4096, 5120)
    widths = (256, 512, 768, 1024, 2048) + (() if draw.runs else (2560, 3072, 4096, 9216, 12800))
    steps, channels, can_norm, shares = [], inputs, True, None
    stream = draw.one(*widths)  # channels of the residual stream
    if draw.chance(0.3):
        head = draw.one(*[n for n in (2, 4, 8, 16, 32, 64, 128, 256) if channels % n == 0])
        steps, can_norm = [(draw.one("silu", "sigmoid"), head)], False
    elif tokens == 1 and draw.chance(0.2):
        steps, can_norm, shares, stream = ["norm"], False, draw.one(None, 1, 3), inputs
    for _ in range(draw.random.randint(1, 4)):
        if can_norm and draw.chance(0.7) and steps and channels == stream:
            steps.append("norm")
            can_norm = False
            continue
        if tokens == 1 and steps and steps[-1] == "norm" and draw.chance(0.25):
            top_k, shared = draw.random.randint(1, 6), draw.one(0, 1, 2)
            has_gate, sizes = shared > 0 and draw.chance(0.5), (draw.one(256, 512, 768), stream)
            numbers = draw.random.randint(top_k, 40), top_k
            mixture = chain_cases.Mixture(*numbers, *sizes, shared, has_gate, draw.chance(0.5))
            steps += [mixture, "norm"]
            channels, can_norm = stream, False
            continue
        is_gated, channels = draw.chance(0.25), draw.one(stream, stream, *widths)
        steps.append(("gated", channels) if is_gated else channels)
        can_norm = not is_gated
    parts = None
    if draw.chance(0.75) or steps[-1] == ("gated", channels):
        last = draw.one(8, 64, 256, 264, 384, 1024)
        steps.append(last)
        parts = draw.one(None, (last,), (last - 8, 8) if last > 8 else (last,))
    parts = parts if isinstance(steps[-1], int) else None
    if parts and draw.chance(0.3) and not draw.runs and not is_over_devices:
        steps.append(chain_cases.Taps(draw.one(2, 3, 4, 5)))
    dtype = draw.one("bfloat16", "float16")
    return chain_cases.Case("random", tuple(steps), inputs, parts, shares, dtype), tokens


def product_chain(draw: Draw) -> Call:
    case, tokens = _chain_case(draw)
    make = lambda shape, dtype, scale: draw.array(dtype, *shape, scale=scale)
    clear = np.inf
    while True:
        x, steps, residual = case.arguments(make, tokens)
        if draw.has_values:
            *wanted, clear = chains.oracle(x, steps, residual, case.dtype)
        if clear > chains.CLEAR:
            break
    residual = None if "norm" not in case.steps else residual

    def compare(_, results):
        out, total = results
        roundings, terms = 2 * len(steps), max(x.shape[-1] for x in jax.tree.leaves(steps) if x.ndim > 1)
        found = float64(chains.whole(out))
        assert_close(found / roundings, wanted[0] / roundings, case.dtype, terms, "results")
        if residual is not None:
            assert_close(float64(total) / roundings, wanted[1] / roundings, case.dtype, terms, "residual")

    arguments = dict(x=x, steps=list(steps), residual=residual, parts=case.parts)
    return Call(ops.product_chain, arguments, compare, ("xla", "triton", "mosaic_gpu"))


def all_reduce_product_chain(draw: Draw) -> Call:
    case, tokens = _chain_case(draw, is_over_devices=True)
    x, steps, residual = case.arguments(lambda shape, dtype, _: draw.array(dtype, *shape), tokens)
    over = lambda step: isinstance(step, Norm) and draw.chance(0.8)
    steps = [dataclasses.replace(step, over_devices=True) if over(step) else step for step in steps]
    arguments = dict(x=x, steps=steps, residual=residual, parts=case.parts)
    widest = max([case.inputs, *(step.weight.shape[0] for step in steps if isinstance(step, Norm))])
    arguments |= _over_devices(draw, tokens * widest)
    return Call(on_devices(ops.all_reduce_product_chain), arguments, None, ("xla", "triton", "mosaic_gpu"))


GENERATORS = {
    generator.__name__: generator
    for generator in (
        state_copy, causal_conv1d_update, causal_conv1d_prefill, gated_delta_rule_update, gated_delta_rule_recurrent,
        gated_delta_rule_prefill, gated_delta_rule_gates, gated_delta_rule_deferred, selective_state_update,
        selective_state_deferred, selective_scan, ssd, linear, linear_sums, add_rms_norm,
        all_reduce, all_reduce_rms_norm, least_kept, choose_experts, mixture_of_experts, mixture_of_experts_sums,
        routed_experts_sums, paged_attention, rotate_and_store, rotate, product_chain, all_reduce_product_chain,
    )
}  # fmt: skip
