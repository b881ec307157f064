"""A function of mailboxes on one simulated device."""

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mamba_align_jax.sharding import AXIS
from pallas_kernels import Mailboxes


def on_one_device(function, *arguments):
    """Runs a function of mailboxes and arrays inside a `shard_map` of one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    boxes = Mailboxes.create(mesh, AXIS, 4096)
    specs = boxes.partition(), *[P()] * len(arguments)
    run = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jax.jit(run)(boxes, *arguments)
