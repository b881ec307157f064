"""Runs a model through the step functions. Blocks and pages are handed out in order and never freed."""

import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mamba_align_jax.align.batch import StepBatch
from mamba_align_jax.align.config import AlignConfig
from mamba_align_jax.align.pool import StatePool
from mamba_align_jax.align.state import Additions, AlignState, add_requests
from mamba_align_jax.align.step import begin_step, finish_step, migrate
from mamba_align_jax.align.tables import BlockTables, TableUpdates, update_block_tables
from mamba_align_jax.kv import KVPages
from mamba_align_jax.metadata.step_inputs import step_inputs

DATA = Path(__file__).parents[1] / "data"
ATOL = 1e-4  # in float32, where the chunked and the stepwise path of transformers differ by 1e-5
PAGE_SIZE = 16
DECODE_ROWS, PREFILL_ROWS = 2, 4
PREFILL_TOKENS = 160


def run_step(
    params,
    tokens,
    batch,
    num_sampled,
    page_tables,
    tables,
    state,
    pool,
    kv,
    *,
    graph,
    align,
    num_decode_rows,
    implementation,
):
    model = nnx.merge(graph, params)
    state, indices = begin_step(align, state, batch, tables)
    pool = migrate(align, pool, indices)
    step = step_inputs(
        batch,
        indices,
        num_decode_rows=num_decode_rows,
        page_tables=page_tables,
        num_tokens=tokens.shape[0],
        page_size=PAGE_SIZE,
        num_pages=kv.keys.shape[1],
    )
    hidden, pool, kv = model(tokens, step, pool, kv, implementation=implementation)
    state, pool = finish_step(align, state, pool, batch, indices, num_sampled, tables)
    return model.logits(hidden), state, pool, kv


compiled = functools.partial(
    jax.jit, static_argnames=("graph", "align", "num_decode_rows", "implementation"), donate_argnums=(7, 8)
)
_step = compiled(run_step)


class Driver:
    """Runs token lists in slots. The pools start as NaN, so that a stale read shows in the logits.

    With `one_program` each step has rows of both kinds, if only padding, so that one program is compiled.
    """

    def __init__(
        self, model, policy="copy_free", num_speculative_tokens=2, slots=4, one_program=False, implementation=None
    ):
        self.one_program, self.implementation, self.program = one_program, implementation, _step
        self.align = AlignConfig(
            groups=model.state_groups(),
            block_size=32,
            num_speculative_tokens=num_speculative_tokens,
            max_num_seqs=slots,
            max_model_len=256,
            policy=policy,
        )
        garbage = functools.partial(jax.tree.map, lambda x: jnp.full_like(x, jnp.nan))
        self.pool = garbage(StatePool.create(self.align, 64))
        self.kv = garbage(KVPages.create(model.kv_spec(), 64, PAGE_SIZE))
        self.state, self.tables = AlignState.create(self.align), BlockTables.create(self.align)
        self.pages = np.zeros((slots, 256 // PAGE_SIZE), np.int32)
        self.computed = [0] * slots
        self.graph, self.params = nnx.split(model)
        self._blocks, self._pages = itertools.count(1), itertools.count(1)

    def blocks(self, slot):
        return np.asarray(self.tables.blocks)[0, slot]

    def add(self, slot, computed=0, like=None):
        """Puts a request into `slot`. It resumes from the first `computed` tokens of the request in slot `like`."""
        self.state = add_requests(self.state, Additions.from_host(self.align, 1, [slot], [computed]))
        self.computed[slot] = computed
        self.pages[slot] = 0
        if computed:
            column = computed // 32 - 1
            self._set([(slot, column, self.blocks(like)[column])])
            self.pages[slot, : computed // PAGE_SIZE] = self.pages[like, : computed // PAGE_SIZE]

    def _set(self, entries):
        updates = TableUpdates.from_host(self.align, 8, [(0, *map(int, entry)) for entry in entries])
        self.tables = update_block_tables(self.tables, updates)

    def _allocate(self, slot, length):
        end = self.computed[slot] + length
        running, held = -(-end // 32) - 1, self.blocks(slot)
        columns = range(running, min(running + self.align.window, len(held)))
        self._set([(slot, column, next(self._blocks)) for column in columns if not held[column]])
        for page in range(self.computed[slot] // PAGE_SIZE, -(-end // PAGE_SIZE)):
            self.pages[slot, page] = self.pages[slot, page] or next(self._pages)

    def step(self, decode=None, prefill=None, accepted=None):
        """Runs one step of token lists by slot, and returns the logits by slot.

        A decode row of several tokens is a verify row, of which `accepted[slot]` tokens are accepted.
        """
        decode, prefill, accepted = decode or {}, prefill or {}, accepted or {}
        rows = [*decode.items(), *[(-1, [])] * (DECODE_ROWS - len(decode))] * (bool(decode) or self.one_program)
        num_decode_rows = len(rows)
        prefilling = bool(prefill) or self.one_program
        rows += [*prefill.items(), *[(-1, [])] * (PREFILL_ROWS - len(prefill))] * prefilling
        for slot, tokens in rows:
            if slot >= 0:
                self._allocate(slot, len(tokens))
        loc = np.cumsum([0, *(len(tokens) for _, tokens in rows)])
        drafts = [len(decode[slot]) - 1 if len(decode.get(slot, ())) > 1 else -1 for slot, _ in rows]
        batch = StepBatch.from_host(self.align, len(rows), [slot for slot, _ in rows], loc, drafts)
        packed = np.zeros(num_decode_rows * self.align.window + PREFILL_TOKENS * prefilling, np.int32)
        packed[: loc[-1]] = np.concatenate([tokens for _, tokens in rows])
        sampled = np.array([accepted.get(slot, 1) for slot, _ in rows], np.int32)
        logits, self.state, self.pool, self.kv = self.program(
            self.params, packed, batch, sampled, self.pages, self.tables, self.state, self.pool, self.kv,
            graph=self.graph, align=self.align, num_decode_rows=num_decode_rows, implementation=self.implementation,
        )  # fmt: skip
        logits = np.asarray(logits)
        assert np.isfinite(logits).all(), "logits must be finite, those of padding included"
        for (slot, tokens), n in zip(rows, drafts, strict=True):
            if slot >= 0:
                self.computed[slot] += len(tokens) - max(n, 0) + accepted.get(slot, 1) - 1
        return {slot: logits[a:b] for (slot, _), a, b in zip(rows, loc, loc[1:], strict=False) if slot >= 0}


def every_split(model, tokens, implementation=None):
    """Runs `tokens` in two chunks, cut at every place. Yields a driver, the slot and the logits for each cut."""
    for cut in range(1, len(tokens), PREFILL_ROWS):
        cuts = dict(enumerate(range(cut, min(cut + PREFILL_ROWS, len(tokens)))))
        driver = Driver(model, one_program=True, implementation=implementation)
        heads = driver.step(prefill={slot: tokens[:cut] for slot, cut in cuts.items()})
        tails = driver.step(prefill={slot: tokens[cut:] for slot, cut in cuts.items()})
        for slot in cuts:
            yield driver, slot, np.concatenate([heads[slot], tails[slot]])


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=ATOL, rtol=0)
