"""Four simulated devices against one: `test_sharding.py` runs this file by itself, since JAX counts its devices once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models.driver import Driver, compiled, run_step

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.engine.reference import Reference
from mamba_align_jax.kv import KVPages
from mamba_align_jax.layers.attention import Attention
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.mamba1 import Mamba1Mixer
from mamba_align_jax.layers.mamba2 import Mamba2Mixer
from mamba_align_jax.layers.mla import MultiHeadLatentAttention
from mamba_align_jax.layers.moe import SharedExpertMoE
from mamba_align_jax.layers.norm import RMSNorm
from mamba_align_jax.metadata.attention import step_inputs
from mamba_align_jax.models import mamba, nemotron_h, qwen3_5
from mamba_align_jax.models.tensor_parallel import shard_model, share
from mamba_align_jax.pool import StatePool
from mamba_align_jax.sharding import AXIS, Part, columns, pool_sharding
from mamba_align_jax.spec import AlignConfig, ConvState, GroupSpec, RecurrentState
from pallas_kernels import causal_conv1d_update, gated_delta_rule_update

jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)  # nothing here runs for long

ATOL = 1e-4
EVERY = P()


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()), (AXIS,))


def randomised(model):
    """Norms, biases and rates that differ from channel to channel, as initial ones don't."""
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    rng = np.random.default_rng(2)
    leaves = [leaf + jnp.asarray(0.2 * rng.normal(size=leaf.shape), leaf.dtype) for leaf in leaves]
    return nnx.merge(graph, jax.tree.unflatten(structure, leaves))


@pytest.fixture(scope="module")
def model():
    """Neither two heads of keys nor two key heads divide among four devices."""
    config = qwen3_5.Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, dtype="float32",
        layer_types=(qwen3_5.LINEAR, qwen3_5.FULL), num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=8, linear_key_head_dim=8, linear_value_head_dim=16,
        max_position_embeddings=256,
    )  # fmt: skip
    return randomised(qwen3_5.Model(config, nnx.Rngs(0)))


class Sharded(Driver):
    """The driver, its program on every device."""

    def __init__(self, model, mesh, **options):
        placed, layout = shard_model(model, mesh)
        super().__init__(share(placed), **options)
        self.graph, self.params = nnx.split(placed)
        own = self.pool, self.kv
        create = lambda: jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), own)
        self.pool, self.kv = jax.jit(layout.run(create, (), (layout.pool, layout.kv)))()
        params = jax.tree.unflatten(jax.tree.structure(self.params), layout.params)

        def program(*arrays, **static):
            specs = (params, *[EVERY] * 6, layout.pool, layout.kv)
            run = layout.run(functools.partial(run_step, **static), specs, (EVERY, EVERY, layout.pool, layout.kv))
            return run(*arrays)

        jitted = compiled(program)

        def checked(*arrays, **static):
            logits, state, pool, kv = jitted(*arrays, **static)
            assert_same_everywhere((logits, state))
            return logits, state, pool, kv

        self.program = checked


def assert_same_everywhere(tree):
    for array in jax.tree.leaves(tree):
        first, *others = [np.asarray(shard.data) for shard in array.addressable_shards]
        assert len(others) == 3
        assert all(np.array_equal(first, other, equal_nan=True) for other in others)


def drive(driver, rng):
    """Chunks of prompts, single tokens, drafts that cross boundaries, and a prefix that is used again."""
    tokens = lambda number: rng.integers(0, 64, number)
    driver.add(0)
    driver.add(1)
    shared = tokens(64)
    yield driver.step(prefill={0: shared[:40], 1: tokens(61)})
    yield driver.step(decode={1: tokens(1)}, prefill={0: shared[40:]})
    yield driver.step(decode={0: tokens(3), 1: tokens(3)}, accepted={0: 2, 1: 3})
    yield driver.step(decode={0: tokens(3), 1: tokens(3)}, accepted={0: 1, 1: 2})
    driver.add(2, computed=64, like=0)
    yield driver.step(decode={0: tokens(1), 1: tokens(3)}, prefill={2: tokens(9)}, accepted={1: 3})
    yield driver.step(decode={2: tokens(3)}, accepted={2: 3})
    yield driver.step(decode={2: tokens(1), 0: tokens(2)})


def test_steps_of_four_devices_are_those_of_one(model, mesh):
    one, four = Driver(model, one_program=True), Sharded(model, mesh, one_program=True)
    repeated = 2 * 2 * 8  # channels of queries and keys, in windows of five rows
    assert four.spec.bytes_per_block * 4 == one.spec.bytes_per_block + 4 * 5 * repeated
    for wanted, got in zip(*(drive(d, np.random.default_rng(0)) for d in (one, four)), strict=True):
        assert wanted.keys() == got.keys()
        for slot, logits in wanted.items():
            np.testing.assert_allclose(got[slot], logits, atol=ATOL, rtol=0)
    # Blocks whose bytes mean something, by what one device holds of them.
    written = np.unique(np.asarray(one.tables.blocks))[1:]
    (conv, recurrent), got = ([np.asarray(state)[:, written] for state in d.pool.states[0]] for d in (one, four))
    key, value = Part(2, 8, 2), Part(8, 16)
    np.testing.assert_allclose(got[0], conv[..., columns([key, key, value], 4)], atol=ATOL, rtol=0)
    np.testing.assert_allclose(got[1], recurrent, atol=ATOL, rtol=0)
    heads = columns([Part(2, 1, 2)], 4)
    for wanted, got in zip(jax.tree.leaves(one.kv), jax.tree.leaves(four.kv), strict=True):
        assert got.shape[3] == 4
        np.testing.assert_allclose(np.asarray(got), np.asarray(wanted)[:, :, :, heads], atol=ATOL, rtol=0)


def test_the_engine_on_four_devices(model, mesh):
    """Prefix hits, chunked prompts, drafts, states that move, and tokens that the host doesn't know yet."""
    config = EngineConfig(
        block_size=16, kv_page_size=8, max_num_seqs=4, max_num_batched_tokens=48, max_model_len=128,
        num_speculative_tokens=2, async_stepping=True, num_state_blocks=40, num_kv_pages=64, checked=True,
        prompt_lookup_min=1, policy="pre_copy",
    )  # fmt: skip
    before = jax.tree.map(np.asarray, nnx.state(model))
    engine, reference = Engine(model, config, mesh=mesh), Reference(model)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 64, 50).tolist()
    prompts = [shared + rng.integers(0, 64, n).tolist() for n in (3, 9, 20)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    outputs = engine.generate(prompts, params) + engine.generate(prompts, params)
    verdicts = [reference.judge(output.prompt_token_ids, output.token_ids) for output in outputs]
    assert all(verdict.right for verdict in verdicts), verdicts
    assert sum(verdict.ties for verdict in verdicts) == 0
    stats = engine.stats
    assert stats.hit_requests >= 3
    assert stats.null_reads == 0
    assert stats.state_bytes_copied > 0
    assert sum(stats.draft_tokens) > 0
    state = engine.runner.device_state
    assert_same_everywhere((state.state, state.tables, state.pending))
    assert state.pool.states[0][1].sharding.shard_shape(state.pool.states[0][1].shape)[2] == 2
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.state(model)))


def test_windows_split_flat_are_wrong(model, mesh, monkeypatch):
    """What the parts are for: an even cut of [q | k | v] gives a device other heads' channels."""
    monkeypatch.setattr(
        "mamba_align_jax.models.tensor_parallel.columns", lambda parts, _: np.arange(sum(p[0] * p[1] for p in parts))
    )
    narrow = Mesh(np.array(jax.devices()[:2]), (AXIS,))
    placed, _ = shard_model(model, narrow)
    kernel = placed.layers[0].linear_attn.in_proj_qkv.kernel[...]
    monkeypatch.undo()
    right = shard_model(model, narrow)[0].layers[0].linear_attn.in_proj_qkv.kernel[...]
    assert not np.array_equal(kernel, right)


def zoo(latent):
    """A layer of every kind that keeps states, and of every kind of feed-forward."""
    hidden = 32
    config = mamba.Config(
        vocab_size=66 if latent else 64,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=8,
        time_step_rank=4,
        dtype="float32",
    )
    rngs, dtype = nnx.Rngs(0), "float32"
    norm = lambda size: RMSNorm(size, 1e-6)
    if latent:
        mixers = [
            KimiDeltaAttention(hidden, 4, 8, 4, 1e-6, dtype, rngs, f_rank=8),
            MultiHeadLatentAttention(hidden, 4, 8, 4, 8, 16, dtype, rngs, q_lora_rank=8, rope_theta=1e4, gated=True),
        ]
    else:
        mixers = [
            GatedDeltaNet(hidden, 2, 4, 8, 16, 4, 1e-6, dtype, rngs, allow_neg_eigval=True),
            SharedExpertMoE(hidden, 4, 2, 8, 16, dtype, rngs),
            Mamba1Mixer(hidden, 48, 6, 4, 4, dtype, rngs, norm=norm, proj_bias=True),
            Attention(hidden, 4, 2, 8, dtype, rngs, rotary_dim=8, norm=norm, norm_whole=True, bias=True),
            Mamba2Mixer(hidden, 8, 8, 6, 2, 4, dtype, rngs, in_bias=True, out_bias=True, multipliers=(1, 2, 3, 2, 1)),
            nemotron_h.MLP(hidden, 24, True, dtype, rngs),
        ]
    return randomised(mamba.Backbone(config, mixers, rngs))


def prompt(spec, model, tokens):
    """Logits and states of one prompt in one piece."""
    tables = BlockTables(blocks=jnp.ones((len(spec.groups), 1, spec.num_columns), jnp.int32))
    batch = StepBatch.from_host(spec, 1, [0], [0, len(tokens)], [-1], [True])

    def run(graph, params, tokens):
        model = nnx.merge(graph, params)
        _, indices = begin_step(spec, AlignState.create(spec), batch, tables)
        step = step_inputs(
            batch, indices, num_decode_rows=0, num_decode_tokens=0, page_tables=jnp.ones((1, 1), jnp.int32),
            num_tokens=tokens.shape[0], page_size=64, num_pages=2,
        )  # fmt: skip
        hidden, pool, _ = model(tokens, step, StatePool.create(spec, 2), KVPages.create(model.kv_spec(), 2, 64))
        return model.logits(hidden), pool

    return functools.partial(run, nnx.split(model)[0])


@pytest.mark.parametrize("latent", [False, True])
def test_every_kind_of_layer(mesh, latent):
    model, tokens = zoo(latent), np.random.default_rng(0).integers(0, 64, 50).astype(np.int32)
    placed, layout = shard_model(model, mesh)
    spec_of = lambda model: AlignConfig(
        groups=model.state_groups(), block_size=64, max_num_reqs=1, max_model_len=64, mode="none"
    )
    one = jax.jit(prompt(spec_of(model), model, tokens))(nnx.state(model), tokens)
    params = nnx.state(placed)
    specs = jax.tree.unflatten(jax.tree.structure(params), layout.params), EVERY
    run = layout.run(prompt(spec_of(share(placed)), placed, tokens), specs, (EVERY, layout.pool))
    four = jax.jit(run)(params, tokens)
    assert_same_everywhere(four[0])
    np.testing.assert_allclose(four[0], one[0], atol=ATOL, rtol=0)
    for wanted, got in zip(one[1].states, four[1].states, strict=True):
        np.testing.assert_allclose(np.asarray(got[1])[:, 1], np.asarray(wanted[1])[:, 1], atol=ATOL, rtol=ATOL)


def test_the_ops_of_another_stack(mesh):
    """Its own arrays and its own `shard_map`: what the ops need is an order of columns, and a spec for each array."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    key, value = Part(4, 8), Part(8, 16)
    qkv, weight, a, b = draw(6, 192), draw(4, 192), draw(6, 8), draw(6, 8)
    A_log, dt_bias = draw(8), draw(8)
    groups = (GroupSpec("gdn", 2, (ConvState(4, 192, "float32"), RecurrentState((8, 16, 8)))),)
    spec = AlignConfig(groups=groups, block_size=16, num_speculative_tokens=2, max_model_len=64)
    loc, read, write = jnp.array([0, 3, 6]), jnp.array([1, 2]), jnp.array([[3, 4, 5], [6, 7, 8]])

    def step(qkv, weight, a, b, A_log, dt_bias, pool):
        conv, recurrent = pool.states[0]
        zero = jnp.zeros(2, jnp.int32)
        qkv, conv = causal_conv1d_update(qkv, conv, jnp.int32(1), weight, None, loc, read, zero, write[:, 0])
        out, recurrent = gated_delta_rule_update(qkv, a, b, A_log, dt_bias, recurrent, jnp.int32(1), loc, read, write)
        return out, pool.with_group(0, (conv, recurrent))

    order = columns([key, key, value], 4)
    where = pool_sharding(groups, mesh)
    one = StatePool(states=tuple(tuple(draw(*x.shape) for x in g) for g in StatePool.create(spec, 9).states))
    empty = StatePool.create(spec, 9, where)
    assert [x.sharding for x in empty.states[0]] == list(where.states[0])
    conv, recurrent = one.states[0]
    pool = jax.device_put(one.with_group(0, (conv[..., order], recurrent)), where)
    partition = jax.tree.map(lambda sharding: sharding.spec, where)
    channels, heads, last = P(None, AXIS), P(None, AXIS), P(AXIS)
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(channels, channels, heads, heads, last, last, partition),
        out_specs=(P(None, AXIS), partition), check_vma=False,
    )  # fmt: skip
    out, pool = jax.jit(sharded)(qkv[:, order], weight[:, order], a, b, A_log, dt_bias, pool)
    wanted, one = jax.jit(step)(qkv, weight, a, b, A_log, dt_bias, one)
    np.testing.assert_allclose(out, wanted, atol=1e-6)
    np.testing.assert_array_equal(pool.states[0][0], np.asarray(one.states[0][0])[..., order])
    np.testing.assert_allclose(pool.states[0][1], one.states[0][1], atol=1e-6)


def test_what_does_not_divide_is_refused_by_name(model, mesh):
    with pytest.raises(ValueError, match=r"axis 'tensor', got \('data',\)"):
        shard_model(model, Mesh(np.array(jax.devices()), ("data",)))
    with pytest.raises(ValueError, match=r"layers\.0\.linear_attn: .* multiple of 3 devices, got 8"):
        shard_model(model, Mesh(np.array(jax.devices()[:3]), (AXIS,)))
    with pytest.raises(ValueError, match=r"'m': heads and channels must be a multiple of 4 devices"):
        pool_sharding((GroupSpec("m", 1, (RecurrentState((6, 4, 4)),)),), mesh)

    class Other(nnx.Module):
        kind = "other"

        def states(self, conv_dtype, state_dtype):
            return (RecurrentState((4, 4, 4), state_dtype),)

    model.layers[0].linear_attn, kept = Other(), model.layers[0].linear_attn
    try:
        with pytest.raises(ValueError, match=r"layers\.0\.linear_attn must be of a kind .* got 'other'"):
            shard_model(model, mesh)
    finally:
        model.layers[0].linear_attn = kept
