"""Inputs that are packed once for several steps are those that each step would have packed."""

import jax
import numpy as np
import pytest
from fakes.engines import launch_ahead
from fakes.speller import VOCAB, Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.packed import pack

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=48, max_model_len=64, num_state_blocks=60, num_kv_pages=80)
pytestmark = pytest.mark.usefixtures("one_program")


def watched(engine):
    """Compares the inputs of every step with freshly packed ones; returns a list of whether each was packed before."""
    packer, again = engine.runner.packer, []
    packed, last = packer.packed, [None]

    def compare(bucket, places, early=()):
        got, wanted = packed(bucket, places, early), pack(packer.pack(bucket, places, early))
        assert got.structure == wanted.structure
        np.testing.assert_array_equal(got.words, wanted.words)
        again.append(got is last[0])
        last[0] = got
        return got

    packer.packed = compare
    return again


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_that_differ_in_nothing_have_the_same_inputs(rng, drafts, ahead, monkeypatch):
    """Requests of all levels come, share a prefix, draw, end at different times, and follow each other in a slot."""
    if ahead:
        launch_ahead(monkeypatch)
    config = EngineConfig(**SIZES, async_stepping=True, num_speculative_tokens=drafts, prompt_lookup_min=1)
    engine = Engine(Speller(adds=True), config)
    again = watched(engine)
    shared = rng.integers(0, VOCAB, 20).tolist()
    for number in range(20):
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 25)), ignore_eos=True, temperature=number % 2, seed=number % 3,
            presence_penalty=float(number == 7),
        )  # fmt: skip
        engine.add_request(shared[: int(rng.integers(1, 20))] + rng.integers(0, VOCAB, 3).tolist(), params)
        for _ in range(int(rng.integers(0, 4))):
            engine.step()
    while engine.has_unfinished:
        engine.step()
    assert 5 < sum(again) < len(again) - 5


def test_tokens_that_the_host_knows_are_packed_in_every_step(rng):
    """A synchronous engine knows the token of each row, and drafts on the host are other ones in each step."""
    engine = Engine(Speller(adds=True), EngineConfig(**SIZES, num_speculative_tokens=3, prompt_lookup_min=1))
    again = watched(engine)
    engine.generate([rng.integers(0, VOCAB, 9).tolist()] * 2, SamplingParams(max_tokens=20, ignore_eos=True))
    assert not any(again)


def test_inputs_in_use_are_not_written_again(rng):
    """A device may still read the inputs of a step while the next one is packed."""
    engine = Engine(Speller(adds=True), EngineConfig(**SIZES, async_stepping=True))
    packer, kept = engine.runner.packer, []
    packed = packer.packed
    packer.packed = lambda *arguments: kept.append((inputs := packed(*arguments), inputs.words.copy())) or inputs
    engine.generate([rng.integers(0, VOCAB, 9).tolist()] * 2, SamplingParams(max_tokens=20, ignore_eos=True))
    assert len({id(inputs) for inputs, _ in kept}) > 3
    jax.tree.map(np.testing.assert_array_equal, *zip(*((inputs.words, words) for inputs, words in kept), strict=True))
