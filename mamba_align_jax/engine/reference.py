"""A float32 reference that judges generated tokens: a token is right if it is the reference's best, up to rounding.

The reference runs a whole sequence in one piece, uncached and unbatched.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.step_inputs import step_inputs

_PAGE = 64


@functools.partial(jax.jit, static_argnames=("graph", "align"))
def _whole(
    params: nnx.State, tokens: jax.Array, batch: StepBatch, graph: nnx.GraphDef, align: AlignConfig
) -> jax.Array:
    model = nnx.merge(graph, params)
    num_tokens = tokens.shape[0]
    pages = num_tokens // _PAGE
    kv = KVPages.create(model.kv_spec(), 1 + pages, _PAGE)
    tables = BlockTables(blocks=jnp.ones((1, 1, align.num_columns), jnp.int32))
    _, indices = begin_step(align, AlignState.create(align), batch, tables)
    step = step_inputs(
        batch,
        indices,
        num_decode_rows=0,
        num_decode_tokens=0,
        page_tables=1 + jnp.arange(pages, dtype=jnp.int32)[None],
        num_tokens=num_tokens,
        page_size=_PAGE,
        num_pages=1 + pages,
    )
    hidden, _, _ = model(tokens, step, StatePool.create(align, 2), kv)
    return model.logits(hidden)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one generated sequence.

    Attributes:
        num_tokens: Number of generated tokens.
        wrong: Number of tokens whose logit lies further below the best one than `Reference.tau`.
        ties: Number of the other tokens that are not the best.
        worst: The largest distance of a token's logit from the best one.
    """

    num_tokens: int
    wrong: int
    ties: int
    worst: float

    @property
    def right(self) -> bool:
        """Whether every token is the reference's best, up to rounding."""
        return self.wrong == 0


class Reference:
    """Runs whole sequences through a float32 model, and compares generated tokens with its logits."""

    def __init__(self, model: Any) -> None:
        """Makes a reference of a model as `load_model` returns it.

        Raises:
            ValueError: The model isn't float32.
        """
        if jnp.dtype(model.dtype) != jnp.float32:
            raise ValueError(f"Reference: model must be float32, got {model.dtype}")
        self._graph, self._params = nnx.split(model)
        self._groups, self._config = model.state_groups("float32"), model.config
        self._verdicts: dict[tuple[tuple[int, ...], int], Verdict] = {}

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Returns the model's logits after each token, float32 [tokens, vocab]."""
        # Powers of two: few lengths to compile, and each holds whole pages.
        size = max(256, 1 << (len(tokens) - 1).bit_length())
        align = AlignConfig(groups=self._groups, block_size=size, max_num_seqs=1, max_model_len=size, mode="none")
        batch = StepBatch.from_host(align, 1, [0], [0, len(tokens)], [-1])
        padded = np.zeros(size, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(_whole(self._params, jnp.asarray(padded), batch, self._graph, align))[: len(tokens)]

    def tau(self, logits: np.ndarray) -> float:
        """Returns how far below the best logit the logit of a right token may lie.

        It is four times the error bound of the model's logits. Every layer rounds a handful of sums of up to `widest`
        products, and the error of a sum grows with the square root of its length. The layers' errors add up in the
        residual stream, whose scale the logits have.
        """
        config = self._config
        widest = max(config.hidden_size, config.intermediate_size)
        bound = float(np.finfo(np.float32).eps) * math.sqrt(widest) * 6 * config.num_hidden_layers
        return 4 * bound * max(1.0, float(logits.std()))

    def judge(self, prompt: Sequence[int], generated: Sequence[int]) -> Verdict:
        """Judges greedily generated tokens as section 7 of docs/design.md defines it."""
        key = (*prompt, *generated), len(prompt)
        if key not in self._verdicts:
            logits = self.logits(key[0])[len(prompt) - 1 : -1]
            chosen = logits[np.arange(len(generated)), np.asarray(generated, np.int64)]
            below = logits.max(axis=1) - chosen
            wrong = below > self.tau(logits)
            ties = (below > 0) & ~wrong
            self._verdicts[key] = Verdict(len(below), int(wrong.sum()), int(ties.sum()), float(below.max(initial=0)))
        return self._verdicts[key]
