"""The engine warns of block sizes that cost something without showing it."""

import logging

import pytest
from fakes.driver import DATA
from fakes.speller import Speller
from hypothesis import given
from hypothesis import strategies as st

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.running.block_size_warning import BlockSizeWatch, warn_of_rounding
from mamba_align_jax.models import load_model


class Heard(logging.Handler):
    """Collects the warnings of the watch."""

    def __enter__(self):
        self.said, self.logger = [], logging.getLogger("mamba_align_jax.engine.running.block_size_warning")
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
    for length in range(8, 12):
        with Heard() as said:
            # The longest prompt is the whole sequence, and its last token is always computed.
            watch, fits = BlockSizeWatch(9, length), (length - 1) // 9 > 0
            for _ in range(50):
                watch.admitted(3)
            assert [line.split(":")[0] for line in said] == [
                "block_size 9" if fits else f"block_size 9 is too long for max_model_len {length}"
            ]


@pytest.mark.usefixtures("one_program")
def test_the_longest_prompt_hits_without_a_warning():
    """Nothing is generated after it."""
    sizes = dict(block_size=8, kv_page_size=4, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=9)
    with Heard() as said:
        engine = Engine(Speller(), EngineConfig(**sizes, num_state_blocks=12, num_kv_pages=18))
        outputs = [engine.generate(list(range(9)), SamplingParams(max_tokens=0))[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 8]
    assert said == []


@pytest.mark.parametrize(
    ("kinds", "op"),
    [
        (["gdn"], "gated_delta_rule_prefill"),
        (["kda", "attention"], "gated_delta_rule_prefill"),
        (["mamba2"], "ssd"),
        (["mamba1"], None),
        (["leaky_sum"], None),
        ([], None),
        (["mamba2", "gdn"], "gated_delta_rule_prefill and ssd"),
    ],
)
def test_warning_of_rounding_names_the_op_of_the_model(kinds, op):
    for block_size in (48, 64, 96, 128):
        with Heard() as said:
            warn_of_rounding(block_size, kinds)
        wanted = f"block_size {block_size} is no multiple of the chunk_size 64 of {op}:"
        assert [line[: len(wanted)] for line in said] == ([wanted] if op and block_size % 64 else [])


def test_engine_warns_of_rounding_by_its_own_op():
    for name, op in (("mamba2", " of ssd:"), ("mamba", None)):
        with Heard() as said:
            Engine(load_model(DATA / name), EngineConfig(max_num_seqs=1, max_model_len=128, block_size=48))
        assert len(said) == (op is not None)
        assert all(op in line for line in said)
