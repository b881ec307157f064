"""Chains: the residual stream of few tokens computes the same with them, and launches together what can be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.one_device import on_one_device
from flax import nnx

import mamba_align_jax as ma
from mamba_align_jax.layers import chain as module
from mamba_align_jax.layers import exchange as exchanges
from mamba_align_jax.layers.chain import Chain, settled
from mamba_align_jax.layers.exchange import Exchange
from mamba_align_jax.layers.gated_delta_net import GatedDeltaNet
from mamba_align_jax.layers.kimi_delta_attention import KimiDeltaAttention
from mamba_align_jax.layers.linear import Linear
from mamba_align_jax.layers.mlp import GatedMLP
from mamba_align_jax.layers.moe import SharedExpertMoE
from mamba_align_jax.layers.norm import GatedRMSNorm, RMSNorm
from mamba_align_jax.layers.residual import Residual
from mamba_align_jax.metadata.step_inputs import step_inputs
from mamba_align_jax.sharding import AXIS
from pallas_kernels import BoundaryWindow
from pallas_kernels.product_chain import MOST_TOKENS, Convolution, Experts, GatedNorm, Norm, Product

HIDDEN = 32
MIXERS = {
    "gated delta net": lambda rngs: GatedDeltaNet(HIDDEN, 2, 4, 8, 16, 4, 1e-6, "float32", rngs),
    "kimi delta attention": lambda rngs: KimiDeltaAttention(HIDDEN, 3, 8, 4, 1e-6, "float32", rngs, g_rank=5),
}


@pytest.fixture
def launches(monkeypatch):
    """Lists the classes of the steps of each launch."""
    found, original = [], module.product_chain

    def record(x, steps, *arguments, **options):
        found.append([type(step) for step in steps])
        return original(x, steps, *arguments, **options)

    monkeypatch.setattr(module, "product_chain", record)
    return found


class TwoLayers:
    """Two layers of a projection, its inverse's stand-in, and an MLP or experts, as models put them together."""

    def __init__(self, *, with_experts=False):
        rngs = nnx.Rngs(0)
        self.norms = [RMSNorm(HIDDEN, 1e-6, offset=1.0) for _ in range(5)]
        self.into = [Linear(HIDDEN, (24, 16), "float32", rngs) for _ in range(2)]
        self.out = [Linear(24, HIDDEN, "float32", rngs) for _ in range(2)]
        make = lambda: GatedMLP(HIDDEN, 48, "float32", rngs)
        if with_experts:
            make = lambda: SharedExpertMoE(HIDDEN, 4, 2, 16, 16, "float32", rngs)
        self.mlps = [make() for _ in range(2)]

    def __call__(self, x, *, chained, scale=1.0, exchange=None):
        stream = Residual(x, exchange=exchange)
        normed_by = lambda stream, norm: stream.chained(norm) if chained else stream.normed(norm)
        for layer in range(2):
            normed, stream = normed_by(stream, self.norms[2 * layer])
            y, _ = self.into[layer](normed)
            y = Chain(y, exchange=exchange) if chained and y.shape[0] <= MOST_TOKENS else y
            normed, stream = normed_by(stream.add(self.out[layer].sums(y), scale), self.norms[2 * layer + 1])
            stream = stream.add(self.mlps[layer](normed), scale)
        return stream


@pytest.mark.parametrize("with_experts", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("tokens", [1, 2, MOST_TOKENS])
def test_a_model_computes_the_same_with_chains(rng, launches, tokens, scale, with_experts):
    """Each way is compiled in one piece, as a step is. XLA may fuse ops differently if they are launched one by one."""
    model, x = TwoLayers(with_experts=with_experts), jnp.asarray(rng.normal(size=(tokens, HIDDEN)), jnp.float32)

    @functools.partial(jax.jit, static_argnames="chained")
    def run(x, *, chained):
        normed, stream = model(x, chained=chained, scale=scale).normed(model.norms[4])
        return normed, stream.value

    wanted = run(x, chained=False)
    assert not launches
    for part, wanted_part in zip(run(x, chained=True), wanted, strict=True):
        np.testing.assert_array_equal(part, wanted_part)
    # To the first mixer, from one mixer to the next one, and from the last mixer to the head.
    of_layer = [Experts] if with_experts else [Product, Product]
    assert launches == [[Product], [Product, Norm, *of_layer, Norm, Product], [Product, Norm, *of_layer, Norm]]


@pytest.mark.parametrize("tokens", [1, MOST_TOKENS, MOST_TOKENS + 1])
def test_a_split_model_computes_the_same_with_chains_over_devices(rng, monkeypatch, tokens):
    """There is one simulated device, so its summand of each product is the whole product."""
    model, x = TwoLayers(), jnp.asarray(rng.normal(size=(tokens, HIDDEN)), jnp.float32)
    for linear in (*model.out, *(mlp.down_proj for mlp in model.mlps)):
        linear.axis = AXIS
    found, original = [], exchanges.all_reduce_product_chain
    monkeypatch.setattr(
        exchanges,
        "all_reduce_product_chain",
        lambda x, steps, *rest, **how: found.append(steps) or original(x, steps, *rest, **how),
    )

    def run(boxes, x):
        results = []
        for chained in (False, True):
            normed, stream = model(x, chained=chained, exchange=Exchange(boxes, jnp.int32(1))).normed(model.norms[4])
            results.append((normed, stream.value))
        return results

    for part, wanted_part in zip(*on_one_device(run, x), strict=True):
        np.testing.assert_array_equal(part, wanted_part)
    is_over = [[step.over_devices for step in steps if isinstance(step, Norm)] for steps in found]
    assert is_over == ([[], [True] * 2, [True] * 2] if tokens <= MOST_TOKENS else [])


def test_a_stream_that_ends_without_a_norm_adds_what_its_chain_computes(rng):
    model, x = TwoLayers(), jnp.asarray(rng.normal(size=(1, HIDDEN)), jnp.float32)
    wanted, found = (model(x, chained=chained).settled() for chained in (False, True))
    np.testing.assert_array_equal(found, wanted)


def test_many_tokens_have_no_chains(rng, launches):
    model, x = TwoLayers(), jnp.asarray(rng.normal(size=(MOST_TOKENS + 1, HIDDEN)), jnp.float32)
    normed, _ = model(x, chained=True).normed(model.norms[4])
    assert isinstance(normed, jnp.ndarray)
    assert not launches


def test_outputs_that_are_arrays_begin_a_chain(rng, launches):
    x, sums = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, HIDDEN), (9, 1, HIDDEN)))
    linear, norm = Linear(HIDDEN, (8, 4), "float32", nnx.Rngs(0)), RMSNorm(HIDDEN, 1e-6)
    for outputs in (sums, sums[0]):
        normed, stream = Residual(x).add(outputs).chained(norm)
        wanted, wanted_stream = Residual(x).add(outputs).normed(norm)
        for part, wanted_part in zip(linear(normed), linear(wanted), strict=True):
            np.testing.assert_array_equal(part, wanted_part)
        np.testing.assert_array_equal(stream.settled(), wanted_stream.value)
    assert launches == [[Norm, Product]] * 2


def test_a_product_with_a_bias_ends_a_chain(rng, launches):
    x, sums = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, HIDDEN), (1, 1, HIDDEN)))
    norm, linear = RMSNorm(HIDDEN, 1e-6), Linear(HIDDEN, 8, "float32", nnx.Rngs(0), bias=True)
    normed, _ = Residual(x).add(sums).chained(norm)
    wanted, _ = Residual(x).add(sums).normed(norm)
    np.testing.assert_array_equal(linear(normed), linear(wanted))
    assert launches == [[Norm]]


def first_token(mixer, num_decode_rows=1, **options):
    """Returns the step of a request's first token, as a decode row or as a prompt, and the mixer's pools."""
    states = mixer.states("float32", "float32")
    group = ma.GroupSpec(mixer.kind, 1, states, mixer.ring("float32") if options.get("policy") == "deferred" else None)
    align = ma.AlignConfig((group,), block_size=8, max_num_seqs=1, max_model_len=8, **options)
    batch = ma.StepBatch.from_host(align, 1, [0], [0, 1], [0])
    tables = ma.BlockTables(blocks=jnp.ones((1, 1, 1 + 3 * align.num_speculative_tokens), jnp.int32))
    _, indices = ma.begin_step(align, ma.AlignState.create(align), batch, tables)
    pages = dict(page_tables=jnp.ones((1, 1), jnp.int32), page_size=8, num_pages=2)
    step = step_inputs(batch, indices, num_decode_rows=num_decode_rows, num_tokens=1, **pages)
    rows = 1 + align.num_speculative_tokens
    return step.layer(0), [jnp.zeros((1, 2, *state.block_shape(rows)), state.dtype) for state in states]


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_mixer_that_gets_a_chain_begins_one_with_its_gated_norm(rng, launches, mixer, bias):
    """And it ends the chain that it gets with its convolution. A product with a bias leaves the gated norm alone.

    Compilers may fuse the steps of both ways differently.
    """
    rngs = nnx.Rngs(0)
    mixer, norms = MIXERS[mixer](rngs), [RMSNorm(HIDDEN, 1e-6) for _ in range(2)]
    norm, name = (mixer.norm, "out_proj") if isinstance(mixer, GatedDeltaNet) else (mixer.o_norm, "o_proj")
    norm.weight[...] = jnp.asarray(rng.normal(size=norm.weight.shape), jnp.float32)
    if bias:
        channels = getattr(mixer, name).weight.shape[1]
        setattr(mixer, name, Linear(channels, HIDDEN, "float32", rngs, bias=True))
    at, pools = first_token(mixer)
    x, sums = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((1, HIDDEN), (1, 1, HIDDEN)))

    def run(*, chained):
        stream = Residual(x).add(sums)
        normed, stream = stream.chained(norms[0]) if chained else stream.normed(norms[0])
        out, *after = mixer(normed, at, *pools)
        normed, stream = stream.add(out).normed(norms[1])
        return normed, stream.value, *after

    wanted = run(chained=False)
    assert not launches
    for found, each in zip(run(chained=True), wanted, strict=True):
        rounding = np.finfo(np.float32).eps * np.abs(each).max()
        np.testing.assert_allclose(found, each, rtol=0, atol=4 * rounding)
    assert np.abs(wanted[1] - x - sums[0]).max() > 1e-3
    assert launches == [[Norm, Product, Convolution], [GatedNorm] if bias else [GatedNorm, Product, Norm]]


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("options", [dict(num_decode_rows=0), dict(num_speculative_tokens=1)])
def test_only_rows_of_one_token_are_convolved_in_a_chain(launches, mixer, options):
    """A verify row has several tokens, and a prompt too."""
    mixer = MIXERS[mixer](nnx.Rngs(0))
    at, pools = first_token(mixer, **options)
    normed, _ = Residual(jnp.ones((1, HIDDEN))).add(jnp.ones((1, 1, HIDDEN))).chained(RMSNorm(HIDDEN, 1e-6))
    mixer(normed, at, *pools)
    assert launches == [[Norm, Product]]


def test_rows_that_keep_windows_of_boundaries_are_not_convolved_in_a_chain():
    at, _ = first_token(MIXERS["gated delta net"](nnx.Rngs(0)), policy="deferred", fold_length=8)
    assert at.single_token_rows is not None
    boundary = BoundaryWindow(row=jnp.zeros(1, jnp.int32), block=jnp.ones((1, 1), jnp.int32))
    rows = dataclasses.replace(at.rows, decode=dataclasses.replace(at.rows.decode, boundary=boundary))
    assert dataclasses.replace(at, rows=rows).single_token_rows is None


def test_gated_norms_refuse_other_activations():
    with pytest.raises(ValueError, match=r"GatedRMSNorm: activation must be one of \('silu', 'sigmoid'\), got 'relu'"):
        GatedRMSNorm(8, 1e-6, "relu")


def test_an_empty_chain_is_its_inputs(launches):
    x = jnp.ones((1, HIDDEN))
    assert settled(Chain(x)) is x
    assert settled(x) is x
    assert not launches
