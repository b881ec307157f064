"""Pages of keys and values have the right shapes and bytes, also for latent keys and models without attention."""

import warnings

import jax
import pytest

from mamba_align_jax.kv import KVPages, KVSpec


@pytest.mark.parametrize(
    ("spec", "keys", "values", "page_bytes"),
    [
        (KVSpec(2, 3, 32, 32, "float32"), (2, 5, 16, 3, 32), (2, 5, 16, 3, 32), 2 * 16 * 3 * 64 * 4),
        (KVSpec(2, 1, 24, 0), (2, 5, 16, 1, 24), (2, 5, 16, 1, 0), 2 * 16 * 24 * 2),
        (KVSpec(0, 1, 1, 0), (0, 5, 16, 1, 1), (0, 5, 16, 1, 0), 0),
    ],
)
def test_pages_have_the_shapes_and_bytes_of_their_spec(spec, keys, values, page_bytes):
    pages = KVPages.create(spec, 5, 16)
    assert (pages.keys.shape, pages.values.shape) == (keys, values)
    assert pages.keys.dtype == pages.values.dtype == spec.dtype
    assert spec.bytes_per_page(16) * 5 == pages.keys.nbytes + pages.values.nbytes == page_bytes * 5
    with warnings.catch_warnings(action="error"):
        # A warning would say that an empty array was not donated.
        jax.jit(lambda p: jax.tree.map(lambda a: a.at[:].multiply(2), p), donate_argnums=0)(pages)


@pytest.mark.parametrize("field", ["num_layers", "num_heads", "key_dim", "value_dim"])
def test_size_that_is_too_small_is_refused(field):
    dims = {"num_layers": 1, "num_heads": 1, "key_dim": 1, "value_dim": 1} | {field: -1}
    with pytest.raises(ValueError, match=f"{field} must be at least ., got -1"):
        KVSpec(**dims)
