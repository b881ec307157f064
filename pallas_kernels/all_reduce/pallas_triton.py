"""all_reduce as Pallas kernels. A program takes one token, and exchanges its numbers with that program of other devices."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.all_reduce._ptx import sum_over_devices
from pallas_kernels.all_reduce.config import Config, default_config
from pallas_kernels.all_reduce.mailboxes import SIDES, WORD_BYTES, Mailboxes
from pallas_kernels.dispatch import Run
from pallas_kernels.rms_norm import pallas_triton as rms_norm


def _row_words(num_channels: int, pack: int) -> int:
    return pack * -(-num_channels // pack)


def unsupported(shape: tuple[int, ...], capacity: int, config: Config | None) -> str | None:
    """Returns why the kernels cannot run an addend of this shape with mailboxes of this capacity; None if they can."""
    _, tokens, channels = shape
    words = tokens * _row_words(channels, (config or default_config(channels)).pack)
    if words > capacity:
        return f"addend must have at most {capacity} numbers, which is what a mailbox holds, got {words}"
    return rms_norm.unsupported(channels)


def _sum(refs: pt.Refs, token: jax.Array, channel: jax.Array, exists: jax.Array, axis: str, pack: int, interpret: bool):
    """Returns the sum of a token over shares and devices, float32 [channels], and ends the turn."""
    total = rms_norm.sum_of_shares(refs, token, channel, exists)
    if interpret:
        return jax.lax.psum(total, axis)
    _, num_rows, _ = refs.addresses.shape
    num_channels = refs.addend.shape[2]
    turn = pt.load(refs.turn.at[0])

    @pt.when(token == 0)
    def _():
        pt.store(refs.next.at[0], turn + 2)

    # Elements of a thread lie side by side in a tile, and those that a warp sends at a time in a mailbox.
    row = _row_words(num_channels, pack)
    place = token * row + channel % pack * (row // pack) + channel // pack
    side_bytes = refs.memory.shape[1] * 4 // ((num_rows - 1) * SIDES)
    # Turns are odd, so that no word of an empty mailbox has one.
    offset = jnp.where(exists, ((turn >> 1) & (SIDES - 1)) * side_bytes + place * WORD_BYTES, -1)
    wide = lambda scalar: jnp.broadcast_to(scalar, total.shape)
    halves = [wide(pt.load(refs.addresses.at[0, number, half])) for number in range(num_rows) for half in (0, 1)]
    text, constraints = sum_over_devices(num_rows - 1, SIDES * side_bytes, pack)
    return pt.assembly(text, constraints, total, wide(turn), offset, *halves, pack=pack)


def _kernel(refs: pt.Refs, *, axis: str, pack: int, interpret: bool):
    token = pt.program_id(0)
    num_channels = refs.addend.shape[2]
    channel, exists = pt.lanes(0, pt.power_of_two(num_channels), num_channels)
    total = _sum(refs, token, channel, exists, axis, pack, interpret)
    pt.store(refs.total.at[token, channel], total, mask=exists)


def _norm_kernel(refs: pt.Refs, *, epsilon: float, offset: float, scale: float, axis: str, pack: int, interpret: bool):
    token = pt.program_id(0)
    num_channels = refs.addend.shape[2]
    channel, exists = pt.lanes(0, pt.power_of_two(num_channels), num_channels)
    total = _sum(refs, token, channel, exists, axis, pack, interpret)
    rms_norm.store_normed(refs, token, channel, exists, total, epsilon=epsilon, offset=offset, scale=scale)


def _call(kernel, name, addend, mailboxes, turn, run, inputs, outputs):
    config = run.config or default_config(addend.shape[2])
    results = pt.call(
        functools.partial(kernel, axis=mailboxes.axis, pack=config.pack, interpret=run.interpret),
        name=name,
        grid=(addend.shape[1],),
        inputs=dict(
            addend=addend, memory=mailboxes.memory, addresses=mailboxes.addresses, turn=turn.reshape(1), **inputs
        ),
        outputs=dict(next=jax.ShapeDtypeStruct((1,), jnp.int32), **outputs),
        updates={},
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results, turn if run.interpret else results["next"].reshape(())


def all_reduce(addend: jax.Array, mailboxes: Mailboxes, turn: jax.Array, *, run: Run) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    outputs = dict(total=jax.ShapeDtypeStruct(addend.shape[1:], jnp.float32))
    results, turn = _call(_kernel, "all_reduce", addend, mailboxes, turn, run, {}, outputs)
    return results["total"], turn


def all_reduce_rms_norm(
    x: jax.Array,
    addend: jax.Array,
    weight: jax.Array,
    mailboxes: Mailboxes,
    turn: jax.Array,
    *,
    epsilon: float,
    offset: float,
    scale: float,
    out_dtype: jnp.dtype,
    run: Run,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py."""
    kernel = functools.partial(_norm_kernel, epsilon=epsilon, offset=offset, scale=scale)
    inputs = dict(x=x, weight=weight)
    outputs = dict(total=jax.ShapeDtypeStruct(x.shape, x.dtype), normed=jax.ShapeDtypeStruct(x.shape, out_dtype))
    results, turn = _call(kernel, "all_reduce_rms_norm", addend, mailboxes, turn, run, inputs, outputs)
    return results["total"], results["normed"], turn
