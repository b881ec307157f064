"""What an op's check admits traces, lowers and is right: random calls of every op."""

import dataclasses
import functools
import inspect

import depth
import jax
import jax.numpy as jnp
import pytest
from kernels import lowered_cases
from kernels.common import skip_if_unavailable
from kernels.deferred_claims import check_rows_in_every_phase_match_the_oracle
from kernels.deferred_phases import check_rows_in_every_phase
from kernels.random_calls import DEFERRED, GENERATORS, Draw, deferred_kind, spoilt

import pallas_kernels
from pallas_kernels import UnsupportedError
from pallas_kernels.all_reduce import config as all_reduce_config
from pallas_kernels.causal_conv1d import config as conv_config
from pallas_kernels.gated_delta_rule import config as delta_config
from pallas_kernels.gated_delta_rule.deferred import config as deferred_config
from pallas_kernels.least_kept import config as least_kept_config
from pallas_kernels.linear import config as linear_config
from pallas_kernels.mixture_of_experts import config as experts_config
from pallas_kernels.paged_attention import config as attention_config
from pallas_kernels.rms_norm import config as rms_norm_config
from pallas_kernels.rotary import config as rotary_config
from pallas_kernels.selective_scan import config as scan_config
from pallas_kernels.selective_state_update import config as update_config
from pallas_kernels.selective_state_update.deferred import config as deferred_mamba2_config
from pallas_kernels.ssd import config as ssd_config
from pallas_kernels.state_copy import config as copy_config

BY_MOSAIC_GPU = (
    *("gated_delta_rule_update", "gated_delta_rule_prefill", "gated_delta_rule_deferred", "selective_state_update"),
    *("selective_state_deferred", "ssd", "paged_attention", "product_chain", "all_reduce_product_chain"),
)
PLAIN = "gated_delta_rule_gates", "rotate"  # ops without kernels
WITHOUT_KERNELS = *PLAIN, "product_chain"  # what has no Triton kernel of its own
needs_mosaic_gpu = pytest.mark.skipif(
    jax.__version_info__ < (0, 11, 2), reason="Mosaic GPU kernels need JAX 0.11.2: their random calls were left out"
)


def outcome(op, seed, implementations, lowered):
    """Traces a random call, which may be spoilt. Returns what came of it: "traced", "lowered", or why it was refused.

    Raises:
        Exception: what the op raised, if that is no refusal.
    """
    draw = Draw(seed)
    call = GENERATORS[op](draw)
    if draw.chance(0.4):
        call = spoilt(draw, call)
    named = [name for name in implementations if name in (None, *call.implementations)]
    options = dict(implementation=draw.one(*named)) if call.implementations else {}
    arrays, run = call.split()
    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    with lowered_cases.on("NVIDIA H200"):
        try:
            traced = jax.jit(functools.partial(run, **options)).trace(described)
        except UnsupportedError as error:
            if options["implementation"] is None:
                raise
            return f"unsupported: {error}"
        except ValueError as error:
            if not is_refusal(str(error)):
                raise
            return f"refused: {error}"
        if not draw.chance(lowered):
            return "traced"
        traced.lower(lowering_platforms=("cuda",))
        return "lowered"


def is_refusal(text):
    """Whether an error names an op, and not what an op is made of."""
    return text.partition(":")[0] in (*GENERATORS, "causal_conv1d", "gated_delta_rule", "chunk_rows", "DeferredConfig")


def check(op, implementations, quick, full, lowered):
    for seed in range(depth.examples(quick, full)):
        try:
            outcome(op, seed, implementations, lowered)
        except Exception as error:
            error.add_note(f"{op}, seed {seed}")
            raise


def test_every_op_has_a_generator():
    public = [getattr(pallas_kernels, name) for name in dir(pallas_kernels) if not name.startswith("_")]
    ops = [op for op in public if callable(op) and not isinstance(op, type)]
    chosen = {op.__name__ for op in ops if {"run", "implementation"} & inspect.signature(op).parameters.keys()}
    assert chosen <= set(GENERATORS)


@pytest.mark.parametrize("op", GENERATORS)
def test_a_random_call_is_refused_with_a_reason_or_traces(op):
    check(op, (None, "xla", "triton", "triton"), 2, 300, 0.1)


@needs_mosaic_gpu
@pytest.mark.parametrize("op", BY_MOSAIC_GPU)
def test_a_random_call_by_mosaic_gpu_is_refused_with_a_reason_or_traces(op):
    check(op, ("mosaic_gpu",), 4, 600, 1.0)


CONFIGS = [
    (copy_config.default_config(2), "programs", "tile"),
    (conv_config.default_config(), "tile"),
    (conv_config.default_prefill_config(), "tile", "block"),
    (delta_config.default_config(8, 1, 4), "block_value", "tile_value", "segment"),
    (delta_config.default_prefill_config(4096, 128, 2, False), "tile_value", "products_warps", "num_stages", "pieces"),
    (deferred_config.default_config(8, 4), "tile_key", "pieces"),
    (scan_config.default_config(16, 4), "block_dim", "segment", "unroll"),
    (update_config.default_config(1, 128, 4), "block_dim", "tile_dim", "segment"),
    (deferred_mamba2_config.default_config(128, 4), "block_dim", "pieces"),
    (ssd_config.default_config(4096, 128, 64, 2), "block_dim", "num_stages"),
    (linear_config.Config(16, 32, 64, 1, 4, 4), "tokens", "outputs", "inputs", "shares", "num_stages"),
    (rms_norm_config.default_config(2560, 4),),
    (rotary_config.default_config(128), "heads"),
    (least_kept_config.default_config(1, 1001), "bits", "chunk", "lanes"),
    (all_reduce_config.default_config(2560), "pack"),
    (experts_config.default_config(128, 256, 2).up, "columns", "depth", "num_stages"),
    (experts_config.default_config(128, 256, 2), "rows", "short_rows"),
    (attention_config.default_config(512, 2, is_prompt=False, is_latent=False), "queries", "block", "split", "shares"),
]


@pytest.mark.parametrize(("config", "fields"), [(config, fields) for config, *fields in CONFIGS], ids=lambda x: None)
def test_a_configuration_that_no_kernel_takes_is_refused(config, fields):
    names = {field.name for field in dataclasses.fields(config)}
    for field, number in [*((field, 0) for field in fields), *((field, -16) for field in fields), ("num_warps", 3)]:
        if field in names:
            with pytest.raises(ValueError, match=field):
                dataclasses.replace(config, **{field: number})


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        ("linear", dict(x=jnp.ones((2, 4)), weight=jnp.ones((0, 4))), r"must have no axis of length 0, got \[0, 4\]"),
        (
            "linear_sums",
            dict(x=jnp.ones((2, 0)), weight=jnp.ones((3, 0))),
            r"must have no axis of length 0, got \[3, 0\]",
        ),
        ("product_chain", dict(x=jnp.ones((1, 4)), steps=None), "steps must be a sequence of steps, got None"),
    ],
)
def test_what_random_calls_have_found_is_refused(op, arguments, message):
    with pytest.raises(ValueError, match=f"{op}: .*{message}"):
        getattr(pallas_kernels, op)(**arguments)


CALLS, QUICK = 300, 2  # calls of an op, and batches of a quick run


def calls_of_a_batch(op, implementation):
    """Returns how many calls are one program: fewer where a call takes long to compile."""
    return 8 if implementation == "xla" or op == "gated_delta_rule_prefill" else 25


def runnable(op, implementation, batch):
    """Returns calls that the implementation can run, with values. A search ends when few calls are of that kind."""
    count = calls_of_a_batch(op, implementation)
    batches, seeds = CALLS // count, []
    for seed in range(batch, batch + 8 * count * batches, batches):
        arrays, run = GENERATORS[op](Draw(seed, runs=True)).split()
        described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
        try:
            jax.eval_shape(functools.partial(run, implementation=implementation), described)
        except UnsupportedError:
            continue
        seeds.append(seed)
        if len(seeds) == count:
            break
    return [(seed, GENERATORS[op](Draw(seed, has_values=True))) for seed in seeds]


# Rows of deferred states have a comparison of their own, and devices that exchange sums have `test_all_reduce.py`.
COMPARED = [op for op in GENERATORS if "deferred" not in op and "all_reduce" not in op]
ON_A_GPU = [(op, "triton") for op in COMPARED if op not in WITHOUT_KERNELS]
ON_A_GPU += [(op, "mosaic_gpu") for op in COMPARED if op in BY_MOSAIC_GPU]


@pytest.mark.parametrize("part", range(QUICK))
@pytest.mark.parametrize(
    ("op", "implementation"),
    [pytest.param(op, "xla", marks=pytest.mark.deep) for op in COMPARED if op not in PLAIN]
    + [pytest.param(*each, marks=pytest.mark.gpu) for each in ON_A_GPU],
)
def test_random_calls_match_float64(op, implementation, part):
    """All calls of a batch are one program."""
    skip_if_unavailable(implementation)
    batches = CALLS // calls_of_a_batch(op, implementation)
    for batch in range(part, QUICK if implementation == "xla" else depth.examples(QUICK, batches), QUICK):
        calls = runnable(op, implementation, batch)
        assert calls
        results = jax.device_get(together([call for _, call in calls], implementation))
        for (seed, call), found in zip(calls, results, strict=True):
            try:
                call.compare(call.arguments, found)
            except AssertionError as error:
                error.add_note(f"{op}, seed {seed}")
                raise


def together(calls, implementation):
    """Makes all calls in one program."""
    arrays, runs = zip(*(call.split() for call in calls), strict=True)
    run_all = lambda every: [run(x, implementation=implementation) for x, run in zip(every, runs, strict=True)]
    return jax.jit(run_all)(arrays)


@pytest.mark.parametrize("op", PLAIN)
def test_random_calls_of_plain_jax_match_float64(op):
    call = GENERATORS[op](Draw(0, has_values=True))
    arrays, run = call.split()
    call.compare(call.arguments, jax.device_get(jax.jit(run)(arrays)))


DEFERRED_ON_A_GPU = [(op, "triton") for op in DEFERRED] + [(op, "mosaic_gpu") for op in DEFERRED if op in BY_MOSAIC_GPU]


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(QUICK))
@pytest.mark.parametrize(("op", "implementation"), DEFERRED_ON_A_GPU)
def test_rows_of_random_deferred_states_match_float64(monkeypatch, op, implementation, part):
    skip_if_unavailable(implementation)
    ran = 0
    for seed in range(part, 600 * QUICK, QUICK):
        draw = Draw(seed)
        kind, dims = deferred_kind(draw, op)
        monkeypatch.setitem(DEFERRED[op].DIMS, kind.dims, dims)
        of_delta_rule = op == "gated_delta_rule_deferred"
        run = check_rows_in_every_phase_match_the_oracle if of_delta_rule else check_rows_in_every_phase
        try:
            run(draw.rng, kind, implementation)
        except UnsupportedError:
            continue
        except AssertionError as error:
            error.add_note(f"{op}, seed {seed}: {kind}, {dims}")
            raise
        ran += 1
        if ran == depth.examples(3, 50):
            break
    assert ran
