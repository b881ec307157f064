"""Many small arrays in one, because each array that goes to the device or comes from it takes time of its own."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class _Structure(NamedTuple):
    """What `Packed.words` holds: the tree, and the shape and dtype of each of its leaves."""

    tree: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Packed:
    """A tree of arrays as one array.

    Attributes:
        words: The elements of all leaves, one word each. int32 [words].
        structure: The tree, and the shapes and dtypes of its leaves. Static.
    """

    words: jax.Array
    structure: _Structure = field(metadata=dict(static=True))

    def unpack(self) -> Any:
        """Returns the tree. A jitted function can call it; on the host, `words` must be a NumPy array."""
        tree, leaves = self.structure
        ends = list(itertools.accumulate(math.prod(shape) for shape, _ in leaves))
        if isinstance(self.words, np.ndarray):
            parts = [self.words[begin:end] for begin, end in itertools.pairwise([0, *ends])]
        else:
            parts = jnp.split(self.words, ends[:-1])
        return jax.tree.unflatten(
            tree, [_from_words(part, dtype).reshape(shape) for part, (shape, dtype) in zip(parts, leaves, strict=True)]
        )


def pack(tree: Any) -> Packed:
    """Packs a tree whose leaves are NumPy arrays, or whose leaves are JAX arrays.

    Args:
        tree: Its leaves are int32, float32 or bool.

    Raises:
        ValueError: A leaf has another dtype.
    """
    leaves, definition = jax.tree.flatten(tree)
    structure = _Structure(definition, tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves))
    xp: Any = np if all(isinstance(leaf, np.ndarray) for leaf in leaves) else jnp
    words = xp.concatenate([_to_words(leaf).reshape(-1) for leaf in leaves])
    return Packed(words=words, structure=structure)


def _to_words(leaf: Any) -> Any:
    if leaf.dtype == np.int32:
        return leaf
    if leaf.dtype == np.float32:
        return leaf.view(np.int32)
    if leaf.dtype == np.bool_:
        return leaf.astype(np.int32)
    raise ValueError(f"pack: leaves must be int32, float32 or bool, got {leaf.dtype}")


def _from_words(words: Any, dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return words != 0
    return words.view(dtype)
