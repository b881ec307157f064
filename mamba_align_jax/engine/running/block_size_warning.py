"""Warns of block sizes that cost something without showing it: no hits, or hits that agree to rounding only."""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pallas_kernels import CHUNK_SIZE

_LOG = logging.getLogger(__name__)
# The number of prompts from which on they are taken to be typical.
_MIN_PROMPTS = 32
# By the kind of a group, the op that cuts its prompts into chunks. Ops of other kinds go token by token.
_CHUNKED_OPS: Mapping[str, str] = MappingProxyType(
    {"gdn": "gated_delta_rule_prefill", "kda": "gated_delta_rule_prefill", "mamba2": "ssd"}
)


def warn_of_rounding(block_size: int, kinds: Iterable[str]) -> None:
    """Logs a warning if a model's states at block boundaries can depend on where a prompt starts.

    Args:
        block_size: Number of tokens between state boundaries.
        kinds: The kinds of the model's groups.
    """
    ops = sorted({_CHUNKED_OPS[kind] for kind in kinds if kind in _CHUNKED_OPS})
    if ops and block_size % CHUNK_SIZE:
        _LOG.warning(
            "block_size %d is no multiple of the chunk_size %d of %s: states resumed from the cache agree with uncached "
            "ones to rounding, not bit for bit",
            block_size,
            CHUNK_SIZE,
            " and ".join(ops),
        )


class BlockSizeWatch:
    """Logs one warning at most.

    It warns when it is made if no prompt can be longer than a block, and otherwise as soon as most prompts were not. A
    hit ends before the prompt's last token, so a prompt can hit only if it has at least `block_size` + 1 tokens.
    """

    def __init__(self, block_size: int, max_model_len: int) -> None:
        """Makes a watch for an engine with these settings. A prompt may be all of a sequence, with `max_tokens=0`."""
        self._block_size = block_size
        self._num_prompts = self._num_short = 0
        self._done = block_size >= max_model_len
        if self._done:
            _LOG.warning(
                "block_size %d is too long for max_model_len %d: no prompt ever hits the prefix cache",
                block_size,
                max_model_len,
            )

    def admitted(self, num_tokens: int) -> None:
        """Takes note that a prompt of `num_tokens` tokens was admitted."""
        self._num_prompts += 1
        self._num_short += num_tokens <= self._block_size
        if not self._done and self._num_prompts >= _MIN_PROMPTS and 2 * self._num_short > self._num_prompts:
            self._done = True
            _LOG.warning(
                "block_size %d: %d of the first %d prompts had no more tokens than that, too few to hit the prefix "
                "cache",
                self._block_size,
                self._num_short,
                self._num_prompts,
            )
