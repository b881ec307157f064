"""Tiles of tokens that are not full, which threads clear and store on Hopper GPUs, run in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from kernels import threads_in_numpy
from kernels.threads_in_numpy import Ref, Threads, tiled, untiled

from pallas_kernels.hopper import partial_tiles

COUNTS = [0, 1, 5, 16, 31, 63]


@pytest.fixture(autouse=True)
def in_numpy(monkeypatch):
    threads = Threads()
    hp = threads_in_numpy.fake(threads)
    hp.when = lambda condition: lambda body: body() if condition else None
    hp.copy_smem_to_gmem = lambda source, target: pytest.fail("a tile that is not full leaves in no copy")
    threads_in_numpy.install(monkeypatch, threads, hp, [partial_tiles])


def numbers(rng, shape, dtype):
    """Returns numbers of which none is 0."""
    return (1 + rng.random(shape)).astype(dtype)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(("tokens", "dtype"), [(64, jnp.bfloat16), (128, np.float16), (64, np.float32)])
def test_tokens_are_kept_and_others_become_zero(rng, tokens, dtype, count):
    tile = numbers(rng, (tokens, 64), dtype)
    pieces = tiled(tile)
    partial_tiles.keep_rows(Ref(pieces), count)
    np.testing.assert_array_equal(untiled(pieces), np.where(np.arange(tokens)[:, None] < count, tile, 0))


def test_other_columns_stay_as_they_are(rng):
    tile = numbers(rng, (64, 192), jnp.bfloat16)
    pieces = tiled(tile)
    partial_tiles.keep_rows(Ref(pieces[:, 1:2]), 20)
    tile[20:, 64:128] = 0
    np.testing.assert_array_equal(untiled(pieces), tile)


@pytest.mark.parametrize("count", COUNTS)
def test_the_first_tokens_are_stored(rng, count):
    tile, target = numbers(rng, (64, 64), jnp.bfloat16), numbers(rng, (64, 3, 64), jnp.bfloat16)
    wanted = target.copy()
    wanted[:count, 1] = tile[:count]
    source = tiled(tile).swapaxes(1, 2).reshape(64, 1, 1, 64)  # pieces of one row each, at the same places
    partial_tiles.store_rows(Ref(source), count, Ref(target[:, 1]))
    np.testing.assert_array_equal(target, wanted)


@pytest.mark.parametrize("count", COUNTS)
def test_the_first_rows_are_cleared(rng, count):
    target = numbers(rng, (64, 3, 64), jnp.bfloat16)
    wanted = target.copy()
    wanted[:count, 1] = 0
    partial_tiles.clear_rows(Ref(target[:, 1]), count)
    np.testing.assert_array_equal(target, wanted)
