"""Warns if blocks are too long for the prompts: such prompts never hit the prefix cache, and nothing else shows it."""

import logging

_LOG = logging.getLogger(__name__)
# The number of prompts from which on they are taken to be typical.
_MIN_PROMPTS = 32


class BlockSizeWatch:
    """Logs one warning at most.

    It warns when it is made if no prompt can be longer than a block, and otherwise as soon as most prompts were not. A
    hit ends before the prompt's last token, so a prompt can hit only if it has at least `block_size` + 1 tokens.
    """

    def __init__(self, block_size: int, max_model_len: int) -> None:
        """Makes a watch for an engine with these settings. A sequence has at least one token more than its prompt."""
        self._block_size = block_size
        self._num_prompts = self._num_short = 0
        self._done = block_size >= max_model_len - 1
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
