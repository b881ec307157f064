"""The engine warns once if blocks are too long for the prompts."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.engine.block_size_warning import BlockSizeWatch


class Heard(logging.Handler):
    """Collects the warnings of the watch."""

    def __enter__(self):
        self.said, self.logger = [], logging.getLogger("mamba_align_jax.engine.block_size_warning")
        self.logger.addHandler(self)
        return self.said

    def __exit__(self, *error):
        self.logger.removeHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


@given(st.integers(1, 20), st.lists(st.integers(1, 40), max_size=80))
def test_warns_once_if_most_prompts_are_too_short(block_size, prompts):
    with Heard() as said:
        watch, wanted = BlockSizeWatch(block_size, 100), []
        for count, prompt in enumerate(prompts, start=1):
            watch.admitted(prompt)
            short = [p for p in prompts[:count] if (p - 1) // block_size == 0]
            if count >= 32 and len(short) > count / 2 and not wanted:
                wanted = [f"block_size {block_size}: {len(short)} of the first {count} prompts"]
            assert [line[: len(want)] for line, want in zip(said, wanted, strict=True)] == wanted


def test_warns_at_once_if_no_prompt_can_be_longer_than_a_block():
    for length in range(9, 12):
        with Heard() as said:
            # The longest prompt has one token less, and its last token is always computed.
            watch, fits = BlockSizeWatch(9, length), (length - 1 - 1) // 9 > 0
            for _ in range(50):
                watch.admitted(3)
            assert [line.split(":")[0] for line in said] == [
                "block_size 9" if fits else f"block_size 9 is too long for max_model_len {length}"
            ]
