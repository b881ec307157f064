"""StepChecker accepts the steps of a block manager, and names the slot and the column of a mistake."""

import random
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax import (
    Additions,
    AlignConfig,
    AlignState,
    BlockTables,
    ConvState,
    Corrections,
    GroupSpec,
    RecurrentState,
    StateBlockManager,
    StepBatch,
    StepChecker,
    TableUpdates,
    add_requests,
    begin_step,
    correct_counts,
    update_block_tables,
)
from mamba_align_jax.align.step import plan_finish

SLOTS, ROWS, UPDATES, BLOCKS = 3, 4, 40, 24
CONV, RECURRENT = ConvState(4, 2), RecurrentState((1, 1))
# One group with both states, one with windows only, and one with recurrent states only.
GROUPS = (GroupSpec("a", 1, (CONV, RECURRENT)), GroupSpec("b", 1, (CONV,)), GroupSpec("c", 1, (RECURRENT,)))
SPEC = AlignConfig(GROUPS, 4, 3, SLOTS, max_model_len=36, checked=True)


class Step(NamedTuple):
    """Lists of (slot, tokens, drafts, sampled, computed before), of (slot, computed) and of (slot, column, block)."""

    rows: list
    entering: list
    entries: list


def block_of(group, block):
    """Mirrors the block ids of the other groups, so that mixed-up groups are seen."""
    return block if group == 0 or not 0 < block < BLOCKS else BLOCKS - block


def arguments(align, step):
    slots, tokens, drafts, sampled, _ = (list(x) for x in zip(*step.rows, strict=True)) if step.rows else ([],) * 5
    loc = np.cumsum([0, *tokens]).tolist()
    entries = [(g, *place, block_of(g, block)) for g in range(len(align.groups)) for *place, block in step.entries]
    slots_in, computed = zip(*step.entering, strict=True) if step.entering else ((), ())
    return (
        TableUpdates.from_host(align, UPDATES, entries),
        Additions.from_host(align, SLOTS, slots_in, computed),
        StepBatch.from_host(align, ROWS, slots, loc, drafts),
        jnp.asarray(np.array(sampled + [9] * (ROWS - len(sampled)), np.int32)),
    )


def schedule(rng, align, steps):
    """Yields the steps of a random server that allocates with `StateBlockManager`."""
    size, K = align.state_block_size, align.num_speculative_tokens
    manager = StateBlockManager(BLOCKS, align.block_size, K, mode=align.mode)
    requests = [None] * SLOTS  # (name, tokens, prompt length, computed)
    for number in range(steps):
        step, ran = Step([], [], []), []
        for slot in rng.sample(range(SLOTS), SLOTS):
            hit = None
            if requests[slot] is None:
                # There are few different prompts, so prefixes are shared.
                tokens = [rng.randrange(2) for _ in range(rng.randrange(3))] * 6 + [7] * rng.randint(1, 4)
                hit = manager.lookup(tokens)
                requests[slot] = [(slot, number), tokens, len(tokens), hit.length]
            name, tokens, prompt, computed = requests[slot]
            drafts, accepted, sampled = -1, 1, 1
            if computed < prompt:
                q = min(prompt - computed, rng.choice([size - computed % size, rng.randint(1, 9)]))
                sampled = int(computed + q == prompt)
            else:
                drafts = rng.randint(0, min(K, align.max_model_len - computed - 1))
                q, accepted = 1 + drafts, rng.randint(1, 1 + drafts)
                sampled = accepted
            entries = manager.allocate(name, computed, computed, q, max(drafts, 0), hit=hit)
            if entries is None:
                requests[slot] = None if hit else requests[slot]
                continue
            after = computed + q - max(drafts, 0) + accepted - 1
            step.rows.append((slot, q, drafts, sampled, computed))
            step.entries.extend((slot, *entry) for entry in entries)
            if hit is not None:
                step.entering.append((slot, computed))
            ran.append((slot, after))
        yield step
        for slot, after in ran:
            name, tokens, prompt, _ = requests[slot]
            manager.release(name)
            tokens += [8] * (after - len(tokens))
            manager.commit(name, tokens[:after])
            requests[slot][3] = after
            if after + 1 >= align.max_model_len or rng.random() < 0.1:
                manager.free(name)
                requests[slot] = None


@jax.jit
def on_device(state, tables, updates, additions, batch, num_sampled):
    tables, state = update_block_tables(tables, updates), add_requests(state, additions)
    state, indices = begin_step(SPEC, state, batch, tables)
    return plan_finish(SPEC, state, batch, indices, num_sampled, tables)[0], tables


def test_checker_accepts_the_steps_of_the_device():
    checker = StepChecker(SPEC, BLOCKS)
    state, tables = AlignState.create(SPEC), BlockTables.create(SPEC)
    hits = 0
    for step in schedule(random.Random(0), SPEC, 150):
        given = arguments(SPEC, step)
        state, tables = on_device(state, tables, *given)
        checker.check(*given, state)
        hits += sum(computed > 0 for _, computed in step.entering)
    assert hits > 5


CONFIGS = [
    *(
        replace(SPEC, policy=policy, num_speculative_tokens=K)
        for policy in ("copy_free", "pre_copy")
        for K in (0, 1, 3)
    ),
    replace(SPEC, block_size=7),
    replace(SPEC, mode="none"),
]


def mistake(rng, align, step):
    """Returns the step with one mistake, and the text that the error must contain. None if it cannot be made."""
    size, computed = align.state_block_size, dict(step.entering)
    running = {slot: (before + q - 1) // size for slot, q, _, _, before in step.rows}
    hits = [n for n, (slot, column, _) in enumerate(step.entries) if (column + 1) * size == computed.get(slot)]
    written = [n for n, (slot, column, _) in enumerate(step.entries) if column == running[slot]]
    change = lambda items, n, item: [*items[:n], item, *items[n + 1 :]]
    kind = rng.choice(["accepted", "out of range", "no block to write", "no block to read", "not written"])
    if kind == "accepted" and step.rows:
        n = rng.randrange(len(step.rows))
        slot, q, drafts, _, before = step.rows[n]
        rows = change(step.rows, n, (slot, q, drafts, 2 + max(drafts, 0), before))
        return step._replace(rows=rows), f"slot {slot}: num_sampled must be in [0, {1 + max(drafts, 0)}], got"
    block, choices, problem = {
        "accepted": (0, [], ""),
        "out of range": (BLOCKS + 1, range(len(step.entries)), f" must have a block in [0, {BLOCKS + 1}), got"),
        "no block to write": (0, written, " is written with a recurrent state, but the column has no block"),
        "no block to read": (0, hits, " is read for a recurrent state, but the column has no block"),
        "not written": (BLOCKS, hits, f" is read for a recurrent state, but block {BLOCKS} was not written since"),
    }[kind]
    if not choices:
        return None
    n = rng.choice(choices)
    slot, column, _ = step.entries[n]
    entries = change(step.entries, n, (slot, column, block))
    return step._replace(entries=entries), f"slot {slot}: column {column} of group 'a'{problem}"


@pytest.mark.parametrize(
    "align", CONFIGS, ids=lambda s: f"{s.mode}-{s.policy}-{s.block_size}-K{s.num_speculative_tokens}"
)
@given(seed=st.integers(0, 10**6), at=st.integers(0, 25))
@settings(max_examples=20, deadline=None)
def test_correct_steps_pass_and_a_mistake_is_named(align, seed, at):
    # The manager does not have the last block.
    rng, checker = random.Random(seed), StepChecker(align, [BLOCKS + 1] * 3)
    for number, step in enumerate(schedule(random.Random(seed), align, 30)):
        found = mistake(rng, align, step) if number >= at else None
        if found:
            with raises(found[1]):
                checker.check(*arguments(align, found[0]))
            return
        checker.check(*arguments(align, step))


def raises(message):
    return pytest.raises(ValueError, match=re.escape(message))


def run(align, *steps):
    checker = StepChecker(align, BLOCKS)
    for step in steps:
        checker.check(*arguments(align, step))
    return checker


# A prompt of 7 tokens in blocks of 4, and then a verify row. They write column 1, and then columns 2 to 4.
PROMPT = Step([(1, 7, -1, 1, 0)], [(1, 0)], [(1, 1, 5)])
WINDOW = [(1, column, 4 + column) for column in (2, 3, 4, 5)]
VERIFY = Step([(1, 4, 3, 2, 7)], [], WINDOW)


@pytest.mark.parametrize("policy", ["copy_free", "pre_copy"])
def test_each_place_is_named(policy):
    align = replace(SPEC, policy=policy)
    run(align, PROMPT, VERIFY)
    # There are 9 tokens now. The state is in column 3, the window in column 2, and the state after 8 tokens in column
    # 1.
    last = Step([(1, 4, 3, 1, 9)], [], [(1, 6, 10)])
    run(align, PROMPT, VERIFY, last)
    again = {column: Step(last.rows, [], [*last.entries, (1, column, 20)]) for column in (1, 2, 3)}
    run(align, PROMPT, VERIFY, again[1])
    for column, kind in ((2, "conv window"), (3, "recurrent state")):
        with raises(f"slot 1: column {column} of group 'a' is read for a {kind}, but block 20 was not written since"):
            run(align, PROMPT, VERIFY, again[column])
    # Another request continues 8 tokens. The state after 4 tokens was never kept, but `wrote` may declare it.
    continues = lambda n, block: Step([(0, 1, 0, 1, n)], [(0, n)], [(0, n // 4 - 1, block), (0, n // 4, 11)])
    run(align, PROMPT, VERIFY, continues(8, 5))
    with raises("slot 0: column 0 of group 'a' is read for a recurrent state, but block 4 was not written since"):
        run(align, PROMPT, VERIFY, continues(4, 4))
    checker = run(align, PROMPT, VERIFY)
    for group in range(3):
        checker.wrote(group, block_of(group, 4))
    checker.check(*arguments(align, continues(4, 4)))
    with raises("slot 1: column 1 of group 'a' is written with a recurrent state, but the column has no block"):
        run(align, PROMPT._replace(entries=[]))
    with raises("slot 1: column 4 of group 'a' is written with a recurrent state, but the column has no block"):
        run(align, PROMPT, VERIFY._replace(entries=[(1, 2, 6), (1, 3, 7), (1, 5, 9)]))


def test_a_repeated_table_entry_is_no_allocation():
    again, enters = [(1, 1, 5)], [(1, 0)]
    verify = Step(VERIFY.rows, [], again + WINDOW)
    run(SPEC, PROMPT, verify)
    # But a request that enters the slot cannot read the states of the last one, even if it gets the same block.
    other = Step([(1, 4, -1, 0, 0)], enters, [(1, 0, 4), *again])
    with raises("slot 0: column 1 of group 'a' is read for a recurrent state, but block 5 was not written since"):
        run(SPEC, PROMPT, other, Step([(0, 1, 0, 1, 8)], [(0, 8)], [(0, 1, 5), (0, 2, 11)]))


def test_reading_a_block_that_another_request_got_is_refused():
    """Slot 0 gets the block of slot 1's column 2, and slot 1 continues before that block is written."""
    thief = Step([], [(0, 0)], [(0, 0, 6)])
    with raises("slot 1: column 2 of group 'a' is read for a conv window, but block 6 was not written since"):
        run(SPEC, PROMPT, VERIFY, thief, Step([(1, 4, 3, 2, 9)], [], [(1, 6, 10)]))


# 7 tokens with the window in columns 2 to 5 and the state in column 3. The next row stays in that window and passes 8.
SHORT, LONG = Step([(1, 5, -1, 1, 0)], [(1, 0)], [(1, 1, 5)]), Step([(1, 4, 3, 2, 5)], [], WINDOW)
PASSES = [(1, 2, 1, 1, 7)]
HIT = Step([(0, 1, 0, 1, 8)], [(0, 8)], [(0, 1, 20), (0, 2, 11)])


@pytest.mark.parametrize("sampled", [None, 1])
def test_boundaries_are_saved_only_if_something_is_sampled(sampled):
    """Column 1, which no other step needs, has a new block."""
    checker = run(SPEC, SHORT, LONG)
    checker.check(*arguments(SPEC, Step(PASSES, [], [(1, 1, 20)]))[:-1], sampled)
    if sampled:
        checker.check(*arguments(SPEC, HIT))
    else:
        with raises("slot 0: column 1 of group 'a' is read for a recurrent state, but block 20 was not written since"):
            checker.check(*arguments(SPEC, HIT))
    with raises("slot 1: column 1 of group 'a' is written with a recurrent state, but the column has no block"):
        run(SPEC, SHORT, LONG, Step(PASSES, [], [(1, 1, 0)]))


@pytest.mark.parametrize("mode", ["align", "all"])
def test_mode_all_keeps_the_boundaries_inside_a_chunk(mode):
    align = replace(SPEC, mode=mode)
    chunk = Step([(1, 9, -1, 1, 0)], [(1, 0)], [(1, column, 20 - column) for column in range(3)])
    hits = [Step([(0, 1, 0, 1, 4 * n)], [(0, 4 * n)], [(0, n - 1, 21 - n), (0, n, 11)]) for n in (1, 2)]
    for hit in hits:
        if mode == "all":
            run(align, chunk, hit)
        else:
            with raises("was not written since it was allocated"):
                run(align, chunk, hit)


def test_checker_follows_a_slot_that_goes_back():
    state = add_requests(AlignState.create(SPEC), Additions.from_host(SPEC, 1, [1], [0]))
    checker = run(SPEC, PROMPT, VERIFY)
    # 9 tokens are computed, and the verify row accepted 2. The next row would read column 4, and reads column 2.
    back = Corrections.from_host(SPEC, 2, [1], [8])
    checker.corrected(back)
    corrected, _ = correct_counts(replace(state, **counts(1, 9, 2, 2)), back)
    assert (int(corrected.num_computed_tokens[1]), int(corrected.num_accepted_tokens[1])) == (8, 1)
    checker.check(*arguments(SPEC, Step([(1, 1, 0, 1, 8)], [], [])), replace(state, **counts(1, 9, 1, 2)))
    for wanted in (8, 10):
        with raises(
            "slot 1: corrections: num_computed_tokens must be in [9, 9], of which the last step has left states"
        ):
            checker.corrected(Corrections.from_host(SPEC, 1, [1], [wanted]))
    StepChecker(replace(SPEC, checked=False), BLOCKS).corrected(Corrections.from_host(SPEC, 1, [1], [30]))


def counts(slot, *values):
    names = ("num_computed_tokens", "num_accepted_tokens", "running_column")
    fresh = AlignState.create(SPEC)
    return {name: getattr(fresh, name).at[slot].set(value) for name, value in zip(names, values, strict=True)}


def test_checker_knows_a_block_that_the_host_has_filled_for_a_slot_that_enters_inside_it():
    # 6 tokens: the state is in column 1, and the next chunk ends in column 2.
    enters = Step([(1, 4, -1, 1, 6)], [(1, 6)], [(1, 1, 5), (1, 2, 6)])
    with raises("slot 1: column 1 of group 'a' is read for a recurrent state, but block 5 was not written since"):
        run(SPEC, enters)
    checker = StepChecker(SPEC, BLOCKS)
    for group in range(3):
        checker.wrote(group, block_of(group, 5))
    checker.check(*arguments(SPEC, enters))


def test_the_devices_counts_are_compared():
    checker = StepChecker(SPEC, BLOCKS)
    state = AlignState.create(SPEC)
    with raises("slot 1: num_computed_tokens is 0 on the device, 7 by the steps' inputs"):
        checker.check(*arguments(SPEC, PROMPT), state)


def test_nothing_is_checked_unless_the_configuration_says_so():
    run(replace(SPEC, checked=False), VERIFY._replace(entries=[(1, 0, 10**6)]))
    with raises("StepChecker: num_blocks must be one number or 3, got 2"):
        StepChecker(SPEC, [4, 4])
