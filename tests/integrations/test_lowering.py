"""On a GPU every op of a step is a Triton kernel, and the pools are updated in place. No GPU is needed to see it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from mamba_align_jax.integrations.delta_rule_step import BlockRows, Taps, delta_rule_step
from mamba_align_jax.integrations.tpu_inference import conv1d_gdn

ROWS, KEY_HEADS, HEADS, DIM, WIDTH, BLOCKS = 4, 2, 4, 128, 4, 33
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


@pytest.mark.parametrize("kind", ["decode", "verify", "prefill"])
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_step_is_triton_kernels_over_donated_pools(kind, per_channel):
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    ints = functools.partial(array, dtype=jnp.int32)
    tokens = {"decode": ROWS, "verify": 4 * ROWS, "prefill": 100}[kind]
    key_heads = HEADS if per_channel else KEY_HEADS
    channels = (2 * key_heads + HEADS) * DIM
    gate = (HEADS, DIM) if per_channel else (HEADS,)
    weights = Taps(array(channels, WIDTH), array(HEADS, dtype=jnp.float32), array(*gate))
    rows = BlockRows(ints(ROWS + 1), ints(ROWS), array(ROWS, dtype=jnp.bool_), ints(ROWS), ints(ROWS))
    if kind == "verify":
        rows = rows._replace(fresh=None, kept_source=ints(ROWS), token_blocks=ints(ROWS, 4))
    pools = array(BLOCKS, channels, WIDTH - 1), array(BLOCKS, HEADS, DIM, DIM, dtype=jnp.float32)
    step = jax.jit(functools.partial(delta_rule_step, decode=kind == "decode"), donate_argnums=(5, 6))
    tokens = array(tokens, channels), array(tokens, *gate), array(tokens, HEADS)
    # There are at least a kernel for the convolution, one for the recurrence, and one that copies each pool.
    assert_kernels_over_pools(lambda: step.trace(*tokens, weights, rows, *pools), 4)


@pytest.mark.parametrize("drafts", [pytest.param(0, marks=pytest.mark.deep), 2])
def test_a_step_of_tpu_inference_is_triton_kernels_over_donated_pools(drafts):
    tokens, channels = 100, (2 * KEY_HEADS + HEADS) * DIM
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)
    ints = functools.partial(array, dtype=jnp.int32)
    sizes = dict(n_kq=KEY_HEADS, n_v=HEADS, d_k=DIM, d_v=DIM, kernel_size=WIDTH, num_spec_tokens=drafts)
    arguments = [array(tokens, channels), array(tokens, HEADS), array(tokens, HEADS)]
    arguments += [array(BLOCKS, WIDTH - 1, channels), array(BLOCKS, HEADS, DIM, DIM, dtype=jnp.float32)]
    arguments += [array(channels, 1, WIDTH), array(channels), array(HEADS), array(HEADS)]
    arguments += [ints(ROWS + 1), ints(ROWS), ints(3), ints(ROWS), ints(ROWS), ints(ROWS)]
    # There are a kernel for the convolution, one for the recurrence of decode and verify rows, and three for prompts.
    assert_kernels_over_pools(lambda: conv1d_gdn.trace(*arguments, **sizes), 5)


def assert_kernels_over_pools(trace, kernels):
    mesh = AbstractMesh((1,), ("_",), axis_types=(AxisType.Auto,), abstract_device=H200)
    with use_abstract_mesh(mesh):
        text = trace().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") >= kernels
    assert text.count("tf.aliasing_output") == 2
    # Nothing but kernels and reshapes touches the pool of states.
    pool = f"tensor<{BLOCKS}x{HEADS}x{DIM}x{DIM}xf32>"
    ops = {line.split(" = ")[1].split()[0] for line in text.splitlines() if pool in line and " = " in line}
    assert {op for op in ops if op.startswith("stablehlo.")} <= {"stablehlo.reshape", "stablehlo.broadcast_in_dim"}, ops
