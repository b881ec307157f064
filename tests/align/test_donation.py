"""A donated step updates its pools in place: it allocates and copies nothing of the size of a pool."""

import dataclasses
import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    DeltaRuleRing,
    GroupSpec,
    Mamba2Ring,
    RecurrentState,
    StatePool,
    StepBatch,
    TableUpdates,
    add_requests,
    begin_step,
    finish_step,
    fold_slots,
    migrate,
    split_rows,
    update_block_tables,
)
from pallas_kernels import (
    DeltaRuleEntries,
    Rows,
    Run,
    causal_conv1d_prefill,
    causal_conv1d_update,
    chunk_rows,
    gated_delta_rule_gates,
    gated_delta_rule_prefill,
    gated_delta_rule_recurrent,
    gated_delta_rule_update,
    selective_state_update,
)
from pallas_kernels.gated_delta_rule.deferred import gated_delta_rule_deferred

pytestmark = pytest.mark.usefixtures("optimized_programs")
HEADS, DIM, WIDTH, ROWS = 2, 16, 4, 4
CHANNELS = 3 * HEADS * DIM
# Large compared with everything else in the program.
BLOCKS = 2048
HOW = [
    ("xla", "float32"),
    pytest.param("xla", "float16", marks=pytest.mark.deep),
    # The CPU compiler of JAX 0.10 widens bfloat16 scatters to float32.
    pytest.param(
        *("xla", "bfloat16"),
        marks=pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 widens bfloat16 scatters on a CPU"),
    ),
    *(pytest.param("triton", dtype, marks=pytest.mark.gpu) for dtype in ("float32", "bfloat16")),
]


def make_spec(policy, K, dtype, num_layers=3, layouts=("SD", "VK")):
    windows, states = layouts
    states = ConvState(WIDTH, CHANNELS, dtype, windows), RecurrentState((HEADS, DIM, DIM), dtype, states)
    group = GroupSpec("gdn", num_layers, states, DeltaRuleRing(HEADS, DIM, HEADS, DIM, dtype))
    return AlignConfig((group,), 64, K, max_num_seqs=ROWS, max_model_len=1024, policy=policy)


def make_step(align, num_decode_rows, implementation):
    """The step of a model that has only GDN layers. The weights are arbitrary constants."""
    windows, states = (state.layout for state in align.groups[0].states)
    run = Run(implementation=implementation)

    def weights(dtype):
        return jnp.full((WIDTH, CHANNELS), 0.1, dtype), jnp.zeros(HEADS), jnp.zeros(HEADS)

    def decode(rows, layer, x, gate, conv, recurrent, *ring):
        (taps, A_log, dt_bias), rows = weights(x.dtype), rows.of_group(0, layer)
        qkv, conv = causal_conv1d_update(x, conv, taps, None, rows, layout=windows, run=run)
        if rows.fold is not None:
            entries = DeltaRuleEntries(*ring)
            out, recurrent, entries = gated_delta_rule_deferred(
                qkv, gate, gate, A_log, dt_bias, recurrent, entries, rows, run=run
            )
            return out, conv, recurrent, *entries.arrays
        out, recurrent = gated_delta_rule_update(
            qkv, gate, gate, A_log, dt_bias, recurrent, rows, layout=states, run=run
        )
        return out, conv, recurrent

    def prefill(rows, layer, x, gate, conv, recurrent, *ring):
        (taps, A_log, dt_bias), rows = weights(x.dtype), rows.of_group(0, layer)
        qkv, conv = causal_conv1d_prefill(x, conv, taps, None, rows, layout=windows, run=run)
        q, k, v = jnp.split(qkv.reshape(-1, 3 * HEADS, DIM), 3, axis=1)
        g, beta = gated_delta_rule_gates(gate, gate, A_log, dt_bias)
        rows = replace(rows, chunks=chunk_rows(rows.query_start_loc, rows.num_computed_tokens, v.shape[0]))
        out, recurrent = gated_delta_rule_prefill(q, k, v, g, beta, recurrent, rows, layout=states, run=run)
        return out, conv, recurrent, *ring

    def step(pool, state, tables, updates, additions, batch, tokens, num_sampled):
        tables = update_block_tables(tables, updates)
        state = add_requests(state, additions)
        state, indices = begin_step(align, state, batch, tables)
        pool = migrate(align, pool, indices, implementation=implementation)
        split = split_rows(batch, indices, num_decode_rows, num_decode_rows * (1 + align.num_speculative_tokens))
        carry = (*pool.states[0], *pool.ring(0))
        x = tokens
        for layer in range(align.groups[0].num_layers):
            gate = x[:, :HEADS]
            run = lambda f, layer=layer: lambda rows, *arrays: f(rows, jnp.int32(layer), *arrays)
            out, *carry = split.apply(run(decode), run(prefill), (x, gate), tuple(carry))
            x = jnp.tile(out.reshape(x.shape[0], -1), 3)
        pool = pool.with_group(0, carry)
        state, pool = finish_step(
            align, state, pool, batch, indices, num_sampled, tables, implementation=implementation
        )
        return x, pool, state, tables

    return jax.jit(step, donate_argnums=(0, 1, 2))


def arguments(align, num_tokens, dtype):
    """Returns the shapes of a step's arguments. The first three are donated."""
    batch = StepBatch.from_host(align, ROWS, [], [0], [])
    return jax.eval_shape(
        lambda: (
            StatePool.create(align, BLOCKS),
            AlignState.create(align),
            BlockTables.create(align),
            TableUpdates.from_host(align, 8, []),
            Additions.from_host(align, 2, [], []),
            batch,
            jnp.zeros((num_tokens, CHANNELS), dtype),
            jnp.zeros(ROWS, jnp.int32),
        )
    )


def size(array):
    return array.size * array.dtype.itemsize


def pool_copies(compiled, donated):
    """Finds the ways in which a compiled step holds a pool twice. donated[0] holds the pools."""
    pools, text, memory = jax.tree.leaves(donated[0]), compiled.as_text(), compiled.memory_analysis()
    found = []
    if memory.alias_size_in_bytes < sum(map(size, jax.tree.leaves(donated))):
        found.append("not aliased")
    if memory.temp_size_in_bytes >= min(map(size, pools)):
        found.append("temporary")
    for shape in {",".join(map(str, pool.shape)) for pool in pools}:
        # `%copy.1 = f32[3,2048,2,16,16]{...} copy(%p)`. A compiler that widens the pool writes a convert.
        found += re.findall(rf"= \w+\[{shape}\]\S* (copy|copy-start|convert)\(", text)
    return sorted(set(found))


@pytest.mark.parametrize(("implementation", "dtype"), HOW)
@pytest.mark.parametrize(
    ("decode_rows", "num_tokens", "policy", "K"),
    [
        *((ROWS, ROWS, "copy_free", 0), (ROWS, 3 * ROWS, "pre_copy", 2)),
        # Both kinds of rows. A batch of one kind calls the same ops.
        pytest.param(2, 128, "pre_copy", 0, marks=pytest.mark.deep),
        (2, 128, "copy_free", 2),
    ],
    ids=lambda x: str(x),
)
def test_a_donated_step_copies_no_pool(decode_rows, num_tokens, policy, K, implementation, dtype):
    align = make_spec(policy, K, dtype)
    given = arguments(align, num_tokens, dtype)
    step = make_step(align, decode_rows, implementation)
    assert pool_copies(step.lower(*given).compile(), given[:3]) == []


@pytest.mark.parametrize(("implementation", "dtype"), HOW)
@pytest.mark.parametrize(
    ("decode_rows", "num_tokens", "windows"),
    [(ROWS, 3 * ROWS, "SD"), (2, 128, "SD"), pytest.param(2, 128, "DS", marks=pytest.mark.deep)],
)
def test_a_donated_step_of_deferred_states_copies_no_pool(decode_rows, num_tokens, windows, implementation, dtype):
    """Chunks may follow verify rows, so that `migrate` writes states and windows too. The rings are small."""
    align = make_spec("deferred", 2, dtype, layouts=(windows, "VK"))
    pool, *others = arguments(align, num_tokens, dtype)
    compiled = make_step(align, decode_rows, implementation).lower(pool, *others).compile()
    assert pool_copies(compiled, (pool.states, pool.rings, *others[:2])) == []


@pytest.mark.parametrize(("implementation", "dtype"), HOW)
@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_a_donated_fold_copies_no_pool(implementation, dtype, kind):
    align = make_spec("deferred", 2, dtype)
    group = align.groups[0]
    if kind == "mamba2":
        group = dataclasses.replace(group, ring=Mamba2Ring(HEADS, DIM, 1, DIM, dtype))
    align = dataclasses.replace(align, groups=(group,))
    pool, state, tables, *_ = arguments(align, 4, dtype)
    fold = jax.jit(functools.partial(fold_slots, align, implementation=implementation), donate_argnums=(0, 1))
    compiled = fold.lower(state, pool, tables, jax.ShapeDtypeStruct((1,), "int32")).compile()
    assert pool_copies(compiled, (pool.states, pool.rings, state)) == []


@pytest.mark.parametrize(("implementation", "dtype"), HOW)
@pytest.mark.parametrize("policy", ["copy_free", pytest.param("pre_copy", marks=pytest.mark.deep)])
def test_a_donated_step_copies_no_pool_of_another_layout(policy, implementation, dtype):
    align = make_spec(policy, 2, dtype, layouts=("DS", "KV"))
    given = arguments(align, 128, dtype)
    assert pool_copies(make_step(align, 2, implementation).lower(*given).compile(), given[:3]) == []


def recurrent_layer(x, pool, rows, run):
    gate = x[..., 0]
    return gated_delta_rule_recurrent(x, x, x, -gate, gate, pool, rows, run=run)


def kimi_layer(x, pool, rows, run):
    return gated_delta_rule_recurrent(x, x, x, -x, x[..., 0], pool, rows, run=run)


def mamba2_layer(x, pool, rows, run):
    A = -jnp.ones(HEADS)
    return selective_state_update(x, x[..., 0], A, x, x, pool, rows, D=A, z=x, run=run)


def mamba1_layer(x, pool, rows, run):
    A, B = -jnp.ones(pool.shape[2:]), x[..., :DIM]
    return selective_state_update(x, x, A, B, B, pool, rows, run=run)


@pytest.mark.parametrize(("implementation", "dtype"), HOW)
@pytest.mark.parametrize("layer", [recurrent_layer, kimi_layer, mamba2_layer, mamba1_layer])
@pytest.mark.parametrize("K", [pytest.param(0, marks=pytest.mark.deep), 2])
def test_donated_layers_copy_no_pool(layer, K, implementation, dtype):
    """Three layers in a row of the ops that the step above does not use. They read and write different blocks."""

    def step(pool, x, loc, read, write):
        for number in range(3):
            rows = Rows(query_start_loc=loc, layer=jnp.int32(number), read=read, write=write)
            x, pool = layer(x, pool, rows, Run(implementation=implementation))
        return x, pool

    heads, dim = (1, HEADS * DIM) if layer is mamba1_layer else (HEADS, DIM)
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    indices = array("int32", ROWS + 1), array("int32", ROWS), array("int32", ROWS, 1 + K)
    given = array(dtype, 3, BLOCKS, heads, dim, DIM), array("float32", ROWS * (1 + K), heads, dim), *indices
    assert pool_copies(jax.jit(step, donate_argnums=0).lower(*given).compile(), given[:1]) == []


@pytest.mark.parametrize(
    ("step", "donate", "found"),
    [
        (lambda pool, block: pool.at[0, 1].set(block), (0,), []),
        (lambda pool, block: pool.at[0, 1].set(block), (), ["copy", "not aliased"]),
        # The pool is read again after it was overwritten.
        (lambda pool, block: pool.at[0, 1].set(block).at[0, 2].set(pool[0, 1]), (0,), ["copy", "temporary"]),
    ],
    ids=["in place", "not donated", "needed twice"],
)
def test_the_check_notices_a_copied_pool(step, donate, found):
    given = jax.ShapeDtypeStruct((3, BLOCKS, 8, 16), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
    assert pool_copies(jax.jit(step, donate_argnums=donate).lower(*given).compile(), given[:1]) == found


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_layers_share_one_function_of_each_op(kind):
    align = make_spec("copy_free", 2, "float32", num_layers=24)
    decode_rows, num_tokens = (ROWS, 3 * ROWS) if kind == "decode" else (0, 128)
    text = make_step(align, decode_rows, "xla").lower(*arguments(align, num_tokens, "float32")).as_text()
    form = "update" if kind == "decode" else "prefill"
    counts = lambda op: [len(re.findall(rf"{word} @{op}(?:_\d+)?\(", text)) for word in ("func.func private", "call")]
    # One for the convolution and one for the recurrence of all layers, and one for the copies of each kind of state.
    ops = f"causal_conv1d_{form}", f"gated_delta_rule_{form}", "state_copy"
    assert [counts(op) for op in ops] == [[1, 24], [1, 24], [2, 2]]
