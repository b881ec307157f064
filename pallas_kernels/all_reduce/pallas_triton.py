"""all_reduce as Pallas kernels. The programs of one token on all devices exchange the token's values."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import _pallas_triton as pt
from pallas_kernels.all_reduce._ptx import sum_over_devices
from pallas_kernels.all_reduce.config import Config, default_config
from pallas_kernels.all_reduce.mailboxes import SIDES, WORD_BYTES, Mailboxes
from pallas_kernels.dispatch import Run
from pallas_kernels.rms_norm import pallas_triton as rms_norm
from pallas_kernels.rms_norm.config import Norm


def _row_words(num_channels: int, pack: int) -> int:
    return pack * -(-num_channels // pack)


def unsupported(shape: tuple[int, ...], capacity: int, config: Config | None) -> str | None:
    """Return why the kernels cannot run an addend of this shape with mailboxes of this capacity; None if they can."""
    _, tokens, channels = shape
    words = tokens * _row_words(channels, (config or default_config(channels)).pack)
    if words > capacity:
        return f"addend must have at most {capacity} elements, the capacity of a mailbox, got {words}"
    return rms_norm.unsupported(channels)


def _sum(refs: pt.Refs, token: jax.Array, channel: jax.Array, exists: jax.Array, axis: str, pack: int, interpret: bool):
    """Return the sum of a token over splits and devices, float32 [channels], and store the next epoch."""
    total = rms_norm.sum_over_splits(refs, token, channel, exists)
    if interpret:
        return jax.lax.psum(total, axis)
    _, num_rows, _ = refs.addresses.shape
    num_channels = refs.addend.shape[2]
    epoch = pt.load(refs.epoch.at[0])

    @pt.when(token == 0)
    def _():
        pt.store(refs.next.at[0], epoch + 2)

    # The elements of a thread are neighbours in a tile, and the words that a warp stores at a time in a mailbox.
    row = _row_words(num_channels, pack)
    word = token * row + channel % pack * (row // pack) + channel // pack
    side_bytes = refs.memory.shape[1] * 4 // ((num_rows - 1) * SIDES)
    # Epochs are odd, so that no word of an empty mailbox has one.
    offset = jnp.where(exists, ((epoch >> 1) & (SIDES - 1)) * side_bytes + word * WORD_BYTES, -1)
    wide = lambda scalar: jnp.broadcast_to(scalar, total.shape)
    halves = [wide(pt.load(refs.addresses.at[0, row, half])) for row in range(num_rows) for half in (0, 1)]
    text, constraints = sum_over_devices(num_rows - 1, SIDES * side_bytes, pack)
    return pt.assembly(text, constraints, total, wide(epoch), offset, *halves, pack=pack)


def _kernel(refs: pt.Refs, *, axis: str, pack: int, interpret: bool, norm: Norm | None = None):
    token = pt.program_id(0)
    num_channels = refs.addend.shape[2]
    channel, exists = pt.lanes(0, pt.power_of_two(num_channels), num_channels)
    total = _sum(refs, token, channel, exists, axis, pack, interpret)
    if norm is None:
        pt.store(refs.total.at[token, channel], total, mask=exists)
    else:
        rms_norm.store_normed(refs, token, channel, exists, total, norm)


def _call(kernel, name, addend, mailboxes, epoch, run, inputs, outputs):
    config = run.config or default_config(addend.shape[2])
    results = pt.call(
        functools.partial(kernel, axis=mailboxes.axis, pack=config.pack, interpret=run.interpret),
        name=name,
        grid=(addend.shape[1],),
        inputs=dict(
            addend=addend, memory=mailboxes.memory, addresses=mailboxes.addresses, epoch=epoch.reshape(1), **inputs
        ),
        outputs=dict(next=jax.ShapeDtypeStruct((1,), jnp.int32), **outputs),
        num_warps=config.num_warps,
        interpret=run.interpret,
    )
    return results, epoch if run.interpret else results["next"].reshape(())


def all_reduce(addend: jax.Array, mailboxes: Mailboxes, epoch: jax.Array, *, run: Run) -> tuple[jax.Array, jax.Array]:
    """See api.py."""
    outputs = dict(total=jax.ShapeDtypeStruct(addend.shape[1:], jnp.float32))
    results, epoch = _call(_kernel, "all_reduce", addend, mailboxes, epoch, run, {}, outputs)
    return results["total"], epoch


def all_reduce_rms_norm(
    x: jax.Array,
    addend: jax.Array,
    weight: jax.Array,
    mailboxes: Mailboxes,
    epoch: jax.Array,
    *,
    norm: Norm,
    run: Run,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py."""
    kernel, inputs = functools.partial(_kernel, norm=norm), dict(x=x, weight=weight)
    outputs = dict(total=jax.ShapeDtypeStruct(x.shape, x.dtype), normed=jax.ShapeDtypeStruct(x.shape, norm.out_dtype))
    results, epoch = _call(kernel, "all_reduce_rms_norm", addend, mailboxes, epoch, run, inputs, outputs)
    return results["total"], results["normed"], epoch
