"""Blocks that are too long for the prompts are warned of, once."""

import logging

from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax.engine.block_size_warning import BlockSizeWatch


class Heard(logging.Handler):
    """What the watch says."""

    def __enter__(self):
        self.said, self.logger = [], logging.getLogger("mamba_align_jax.engine.block_size_warning")
        self.logger.addHandler(self)
        return self.said

    def __exit__(self, *error):
        self.logger.removeHandler(self)

    def emit(self, record):
        self.said.append(record.getMessage())


@given(st.integers(1, 20), st.lists(st.integers(1, 40), max_size=80))
def test_most_prompts_without_a_block_are_said_once(block_size, prompts):
    with Heard() as said:
        watch, wanted = BlockSizeWatch(block_size, 100), []
        for count, prompt in enumerate(prompts, start=1):
            watch.admitted(prompt)
            short = [p for p in prompts[:count] if (p - 1) // block_size == 0]
            if count >= 32 and len(short) > count / 2 and not wanted:
                wanted = [f"block_size {block_size}: {len(short)} of the first {count} prompts"]
            assert [line[: len(want)] for line, want in zip(said, wanted, strict=True)] == wanted


def test_a_block_that_no_prompt_outgrows_is_said_at_once():
    for length in range(9, 12):
        with Heard() as said:
            # One token less is the longest prompt, and the last of its tokens is always computed.
            watch, fits = BlockSizeWatch(9, length), (length - 1 - 1) // 9 > 0
            for _ in range(50):
                watch.admitted(3)
            assert [line.split(":")[0] for line in said] == [
                "block_size 9" if fits else f"block_size 9 is too long for max_model_len {length}"
            ]
