"""Inputs that are packed once for several steps are those that each step would have packed."""

import itertools

import numpy as np
import pytest
from fakes.engines import launch_ahead
from fakes.speller import VOCAB, Speller

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cache.hybrid import Allocation
from mamba_align_jax.engine.device.packed import pack
from mamba_align_jax.engine.drafting.protocols import UNKNOWN
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.engine.scheduling.request import Request
from mamba_align_jax.engine.scheduling.scheduler import Row
from mamba_align_jax.engine.text.grammar_state import mask_words

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


def row(number=0, *, columns=(), pages=(), temperature=0.0, **changes):
    """A row that decodes one token, which only the device knows, of request `number` in slot `number`."""
    request = Request(number, (1, 2, 3), SamplingParams(max_tokens=9, temperature=temperature))
    fields = dict(start=3, num_tokens=1, is_prefilling=False, slot=number)
    return Row(request, allocation=Allocation(columns, pages), **fields | changes)


PLAIN = Bucket(2, 0, 0, Level.DRAW), [row(0), row(1)]
OTHERS = {
    "another program": (PLAIN[0]._replace(level=Level.MOST_LIKELY), PLAIN[1]),
    "another request": (PLAIN[0], [row(0), row(2, slot=1, temperature=1.0)]),
    "another slot": (PLAIN[0], [row(0), row(1, slot=3)]),
    "another order": (PLAIN[0], PLAIN[1][::-1]),
    "padding": (PLAIN[0], [row(0), None]),
    "drafts": (PLAIN[0], [row(0), row(1, num_tokens=3, drafts=(UNKNOWN, UNKNOWN))]),
    "fewer drafts": (PLAIN[0], [row(0), row(1, num_tokens=2, drafts=(UNKNOWN,))]),
    "drafts of the host": (PLAIN[0], [row(0), row(1, num_tokens=2, drafts=(7,))]),
    "a known token": (PLAIN[0], [row(0), row(1, start=2)]),
    "new blocks": (PLAIN[0], [row(0), row(1, columns=[(1, 9)])]),
    "new pages": (PLAIN[0], [row(0), row(1, pages=[(1, 9)])]),
    "a chunk": (Bucket(1, 1, 2), [row(0), row(1, start=0, num_tokens=2, is_prefilling=True)]),
    "a chunk of a request that enters": (
        Bucket(1, 1, 2),
        [row(0), row(1, start=0, num_tokens=2, is_prefilling=True, enters=True)],
    ),
    "a grammar": (
        PLAIN[0]._replace(level=Level.CONSTRAINED),
        [row(0), row(1, masks=np.full((1, mask_words(VOCAB)), 5, np.int32))],
    ),
    "another mask": (
        PLAIN[0]._replace(level=Level.CONSTRAINED),
        [row(0), row(1, masks=np.full((1, mask_words(VOCAB)), 6, np.int32))],
    ),
}


@pytest.fixture
def packer():
    config = EngineConfig(**SIZES, num_speculative_tokens=3)
    return Engine(Speller(adds=True), config).runner.packer


def test_inputs_are_packed_again_if_they_differ(packer):
    for (first, one), (second, other) in itertools.permutations({"plain": PLAIN, **OTHERS}.items(), 2):
        for bucket, places in (one, other, one):
            got, wanted = packer.packed(bucket, places), pack(packer.pack(bucket, places))
            np.testing.assert_array_equal(got.words, wanted.words, err_msg=f"{first}, then {second}")


def test_equal_rows_of_other_objects_are_packed_once(packer):
    first = packer.packed(*PLAIN)
    assert packer.packed(PLAIN[0], [row(0), row(1)]) is first
    assert packer.packed(*OTHERS["drafts"]) is not first
    assert packer.packed(*OTHERS["drafts"]) is packer.packed(*OTHERS["drafts"])
    for name in ("drafts of the host", "a known token", "new blocks", "new pages", "a chunk", "a grammar"):
        assert packer.packed(*OTHERS[name]) is not packer.packed(*OTHERS[name]), name


def test_tokens_that_the_host_knows_are_packed_in_every_step(rng):
    """The host of a synchronous engine knows each row's token, and it proposes other drafts in every step."""
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
    for inputs, words in kept:
        np.testing.assert_array_equal(inputs.words, words)
