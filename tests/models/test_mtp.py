"""The draft head agrees with its equations in float64, however its tokens are cut into steps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes.draft_head_weights import write_with_head
from fakes.driver import ATOL, DATA
from flax import nnx
from oracles.draft_head import NumpyHead

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.state import AlignState
from mamba_align_jax.align.step import begin_step
from mamba_align_jax.align.tables import BlockTables
from mamba_align_jax.engine.drafting.mtp import draft_with_head
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.step_inputs import step_inputs
from mamba_align_jax.models import load_model

pytestmark = pytest.mark.usefixtures("for_a_cpu_alone")

PAGE, SLOTS, TOKENS, DEPTH = 8, 4, 72, 3
TABLE = TOKENS // PAGE
# All tests run one program, which has two rows of each kind.
DECODE, ROWS, WINDOW, BUDGET = 2, 4, 3, 96


@functools.partial(jax.jit, static_argnames=("graph", "align"))
def _run(params, hidden, tokens, batch, computed, last, page_tables, kv, *, graph, align):
    model = nnx.merge(graph, params)
    state = dataclasses.replace(AlignState.create(align), num_computed_tokens=computed)
    _, indices = begin_step(align, state, batch, BlockTables.create(align))
    step = step_inputs(
        batch, indices, num_decode_rows=DECODE, page_tables=page_tables,
        num_tokens=tokens.shape[0], page_size=PAGE, num_pages=kv.keys.shape[1],
    )  # fmt: skip
    out, _ = model.draft(hidden, tokens, step, kv)
    return out, *draft_with_head(model, hidden, tokens, step, kv, last, last >= 0, DEPTH)


class Sequences:
    """Random hidden states and tokens for every slot, and the head of each slot in float64."""

    def __init__(self, path):
        self.model = load_model(path)
        self.graph, self.params = nnx.split(self.model)
        self.align = AlignConfig(
            groups=self.model.state_groups(), block_size=128, num_speculative_tokens=WINDOW - 1, max_num_seqs=SLOTS,
            max_model_len=128,
        )  # fmt: skip
        random = np.random.default_rng(0)
        self.hidden = random.normal(size=(SLOTS, TOKENS, 64)).astype(np.float32)
        self.tokens = random.integers(0, 256, (SLOTS, TOKENS))
        self.wanted, self.heads = np.zeros_like(self.hidden), []
        for slot in range(SLOTS):
            self.heads.append(NumpyHead(path))
            for n, each in enumerate(zip(self.hidden[slot], self.tokens[slot], strict=True)):
                self.wanted[slot, n] = self.heads[slot].step(*each, n)
        self.tables = np.arange(1, 1 + SLOTS * TABLE, dtype=np.int32).reshape(SLOTS, TABLE)

    def pages(self):
        """Pages of NaN, except page 0, which takes writes that are not kept."""
        kv = KVPages.create(self.model.kv_spec(draft=True), 1 + SLOTS * TABLE, PAGE)
        return jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan).at[:, 0].set(0.0), kv)

    def step(self, kv, decode=(), prefill=(), accepted=None):
        """Runs rows (slot, begin, length). Returns the head's outputs and its drafts by slot, and the pages."""
        rows = [
            *decode,
            *[(-1, 0, 0)] * (DECODE - len(decode)),
            *prefill,
            *[(-1, 0, 0)] * (ROWS - DECODE - len(prefill)),
        ]
        loc = np.cumsum([0, *(length for *_, length in rows)])
        batch = StepBatch.from_host(
            self.align, ROWS, [slot for slot, *_ in rows], loc,
            [row[2] - 1 if row in decode else -1 for row in rows],
        )  # fmt: skip
        computed, hidden, tokens = np.zeros(SLOTS, np.int32), np.zeros((DECODE * WINDOW + BUDGET, 64), np.float32), []
        for (slot, begin, length), start in zip(rows, loc, strict=False):
            if slot >= 0:
                computed[slot] = begin
                hidden[start : start + length] = self.hidden[slot, begin : begin + length]
                tokens += self.tokens[slot, begin : begin + length].tolist()
        last = [
            start + (accepted or {}).get(slot, length) - 1 if slot >= 0 else -1
            for (slot, _, length), start in zip(rows, loc, strict=False)
        ]
        out, drafts, kv = _run(
            self.params, hidden, np.pad(np.array(tokens, np.int32), (0, len(hidden) - len(tokens))), batch,
            jnp.asarray(computed), jnp.asarray(last, jnp.int32), self.tables, kv, graph=self.graph, align=self.align,
        )  # fmt: skip
        said = {slot: np.asarray(out)[a:b] for (slot, *_), a, b in zip(rows, loc, loc[1:], strict=False) if slot >= 0}
        return said, {slot: row.tolist() for (slot, *_), row in zip(rows, np.asarray(drafts), strict=True)}, kv

    def drafts(self, slot, place):
        """The greedy drafts of the oracle after the token at `place` + 1."""
        head = self.heads[slot].fork()
        out, drafts = self.wanted[slot, place], []
        for n in range(DEPTH):
            out = head.step(out, drafts[-1], place + n) if n else out
            drafts.append(int(head.logits(out).argmax()))
        return drafts


@pytest.fixture(scope="module", params=["qwen3_5_text", "qwen3_next"])
def sequences(request, tmp_path_factory):
    """Sequences for a dense head and for one with experts: a head has experts if the model has."""
    sequences = Sequences(write_with_head(DATA / request.param, tmp_path_factory.mktemp("head")))
    assert hasattr(sequences.model.mtp.layers[0].mlp, "experts") == (request.param == "qwen3_next")
    return sequences


@pytest.mark.parametrize("cuts", [(64,), (32, 32), (37, 27), (58, 1, 3, 2)])
def test_outputs_and_drafts_match_the_oracle(sequences, cuts):
    """The tokens run as chunks, single tokens and verify rows. The pages of the model's layers do not change."""
    kv, begin = sequences.pages(), 0
    for length in cuts:
        row = (1, begin, length)
        said, drafts, kv = sequences.step(kv, **{"decode" if length <= WINDOW else "prefill": [row]})
        begin += length
        np.testing.assert_allclose(said[1], sequences.wanted[1, begin - length : begin], atol=ATOL, rtol=0)
        assert drafts[1] == sequences.drafts(1, begin - 1)
    assert np.isnan(kv.keys[:-1, 1:]).all()


def test_drafts_of_mixed_rows_match_the_oracle(sequences):
    """Keys of rejected drafts and of guesses come after the last accepted token and are overwritten."""
    kv = sequences.pages()
    _, drafts, kv = sequences.step(kv, prefill=[(0, 0, 30), (2, 0, 40)])
    assert {slot: drafts[slot] for slot in (0, 2)} == {0: sequences.drafts(0, 29), 2: sequences.drafts(2, 39)}
    said, drafts, kv = sequences.step(kv, decode=[(0, 30, 3), (2, 40, 2)], prefill=[(3, 0, 17)], accepted={0: 1, 2: 2})
    assert drafts[0] == sequences.drafts(0, 30)
    assert drafts[2] == sequences.drafts(2, 41)
    assert drafts[3] == sequences.drafts(3, 16)
    said, drafts, kv = sequences.step(kv, decode=[(2, 42, 3), (0, 31, 3)], prefill=[(3, 17, 9)], accepted={0: 3})
    np.testing.assert_allclose(said[0], sequences.wanted[0, 31:34], atol=ATOL, rtol=0)
    assert drafts[0] == sequences.drafts(0, 33)
    assert drafts[3] == sequences.drafts(3, 25)


def test_guesses_without_a_page_change_no_other_page(sequences):
    """A guess without a page goes to the NULL page, and one past the end of the table is dropped."""

    def written(kv):
        return np.flatnonzero(
            np.asarray(kv.keys[-1]).any((1, 2, 3)) & np.isfinite(np.asarray(kv.keys[-1])).all((1, 2, 3))
        )

    full, sequences.tables = sequences.tables, sequences.tables.copy()
    sequences.tables[1, 4:] = 0
    try:
        _, drafts, kv = sequences.step(sequences.pages(), prefill=[(1, 0, 32)])
    finally:
        sequences.tables = full
    assert drafts[1] == sequences.drafts(1, 31)
    assert written(kv).tolist() == [0, *full[1, :4]]
    _, drafts, kv = sequences.step(sequences.pages(), prefill=[(1, 0, TOKENS)])
    assert drafts[1][0] == sequences.drafts(1, TOKENS - 1)[0]
    assert written(kv).tolist() == full[1].tolist()
