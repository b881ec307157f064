"""Says so where blocks are too long for the prompts that come: those never hit, and nothing else looks wrong."""

import logging

_LOG = logging.getLogger(__name__)
# Fewer prompts say little of what is typical.
_ENOUGH = 32


class BlockSizeWatch:
    """Warns once: when it is made, if no prompt can be longer than a block, else when most prompts were not.

    A prompt hits only what lies before its last token: it needs `block_size` + 1 tokens.
    """

    def __init__(self, block_size: int, max_model_len: int) -> None:
        """Of an engine with these settings; the longest sequence has one token more than its prompt."""
        self._block_size = block_size
        self._admitted = self._short = 0
        self._done = block_size >= max_model_len - 1
        if self._done:
            _LOG.warning(
                "block_size %d is too long for max_model_len %d: no prompt ever hits the prefix cache",
                block_size,
                max_model_len,
            )

    def admitted(self, num_tokens: int) -> None:
        """A prompt of so many tokens was admitted."""
        self._admitted += 1
        self._short += num_tokens <= self._block_size
        if not self._done and self._admitted >= _ENOUGH and 2 * self._short > self._admitted:
            self._done = True
            _LOG.warning(
                "block_size %d: %d of the first %d prompts had no more tokens than that, too few to hit the prefix cache",
                self._block_size,
                self._short,
                self._admitted,
            )
