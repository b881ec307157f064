"""How programs take heads one after the other in the delta rule's prefill, with threads of Python for warpgroups.

Shared memory is made of places that know what is in them. A copy that leaves one is checked when the warpgroup has waited
for it: until then nothing may have taken its place.
"""

import collections
import dataclasses
import itertools
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.hopper_in_numpy import Slice, loop, loops_of_python, when

from pallas_kernels.gated_delta_rule.prefill import chunk_states_128_sm90
from pallas_kernels.gated_delta_rule.prefill.work_queue_sm90 import Work

PROGRAMS, SECONDS, HEADS = 3, 300.0, 2
SLOW = 5e-3  # seconds for loads and copies, in which others go on
WARPGROUPS = 1 + chunk_states_128_sm90.TILES
KEY_DIM, PIECES = 128, 2
TILES = range(KEY_DIM // 64)


class Content(NamedTuple):
    """What a place holds: values or outputs of a head's chunk, or a head's first or last state."""

    kind: str
    head: tuple
    chunk: int = 0

    def astype(self, dtype):
        return self


NOTHING = Content("nothing", ())


class Place:
    """A place in shared memory."""

    content, dtype = None, None

    def __setitem__(self, _, content):
        self.content = content


class Places:
    """Places in shared memory, of which `at` chooses one. Two views of the same memory are the same places."""

    shape, dtype = (chunk_states_128_sm90.TILES, len(TILES)), None
    at = property(lambda self: self)

    def __init__(self):
        self.found = {}

    def __getitem__(self, index):
        # A `defaultdict` would make two places where another thread runs between its look and its entry.
        return self.found.setdefault(tuple(map(int, index)), Place())


class Barrier:
    """A barrier of the GPU. A thread that waits knows one bit of the number of its completions."""

    def __init__(self, description):
        self.needed, self.missing, self.completions = (description.num_arrivals,) * 2 + (0,)
        self.changed, self.own = threading.Condition(), threading.local()

    def arrive(self, count=1):
        with self.changed:
            for _ in range(count):
                self.missing -= 1
                if not self.missing:
                    self.missing, self.completions = self.needed, self.completions + 1
            self.changed.notify_all()

    def wait(self):
        waited = getattr(self.own, "waited", 0)
        with self.changed:
            assert self.changed.wait_for(lambda: self.completions % 2 != waited % 2, timeout=SECONDS), "nobody arrives"
            assert self.completions == waited + 1, "a completion was not waited for"
        self.own.waited = waited + 1


class Barriers(list):
    """Barriers, of which `at` chooses one."""

    at = property(lambda self: self)


class Inputs:
    """An array of the inputs, with `at` for what is copied."""

    shape, at = (0,), property(lambda self: self)

    def __getitem__(self, index):
        here, head, _ = index
        return Content("values", head, int(here.start))


class Program:
    """What the warpgroups of a program share: barriers, what has been entry, and what is in shared memory."""

    def __init__(self, lengths):
        described = chunk_states_128_sm90.barriers(KEY_DIM, PIECES, per_channel=False)
        of = lambda each, count: Barriers(Barrier(each) for _ in range(count)) if count > 1 else Barrier(each)
        described = {name: of(each, int(np.prod(each.num_barriers))) for name, each in described.items()}
        self.refs = SimpleNamespace(**described, v=Inputs(), layer=[0])
        self.refs.read_block = self.refs.write_block = range(len(lengths))
        self.refs.squares = self.refs.attention = MagicMock()
        entry = [None] * len(chunk_states_128_sm90.Entry._fields)
        self.memory = [(MagicMock(), dict(work_entry=entry, states=Places()))]
        self.tokens, self.keys = dict(v=Places()), {}
        self.stored = [collections.Counter() for _ in range(WARPGROUPS)]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row, which only knows how many chunks it has, and a head of it."""

    index: int
    chunks: int
    head: "Head | None" = None

    def tokens_of(self, chunk):
        return chunk, chunk

    def run(self, refs, state, advance, store):
        place = self.head.head
        assert state == [Content("first state", place) if self.head.has_initial else NOTHING] * len(TILES)
        advance(0, self.chunks, state)
        return [Content("last state", place)] * len(TILES)

    def store_last(self, block, state, store):
        if self.chunks:
            store(block, state)


def wait_for_last(count, stages, *barriers):
    """Waits for the last completions, as hopper/barriers.py does."""
    for n in range(max(int(count) - stages, 0), int(count)):
        for each in barriers:
            each.at[n % stages].wait()


def rows_of(lengths):
    """Returns what stands for `PrefillRow`. A row's last token tells its chunks."""
    make = lambda index, rows, start, end, *_: Row(int(index), int(end))
    read = lambda _, index: SimpleNamespace(start=0, end=lengths[int(index)], first_chunk=0, first_length=0, total=0)
    make.of = read
    return make


class Head(MagicMock):
    """A head of a row. What it fetches arrives at once."""

    def __init__(self, program, row, head):
        super().__init__()
        self.program, self.refs = program, program.refs
        self.head, self.count = (row.index, int(head)), row.chunks
        self.first, self.per_channel, self.key_tiles, self.pieces = 0, False, TILES, range(PIECES)
        self.token_rows = self.token_tiles = program.tokens
        self.has_initial = row.chunks > 0 and row.index % 3 != 1
        self.row = dataclasses.replace(row, head=self)

    def _get_child_mock(self, **options):
        return MagicMock(**options)

    def tile_of_pool(self, block, values, n):
        return Content("first state", self.head)

    def copy_keys(self, name, here, number, at, full):
        self.program.keys[int(at)] = self.head, int(number)
        full.arrive(len(self.key_tiles))

    def copy_products(self, number, at, full):
        full.arrive(PIECES + 1)

    def keep_tokens(self, chunk, tile, at):
        """The chunk's tokens are in shared memory now."""
        assert self.program.keys[int(at)] == (self.head, int(chunk))
        assert tile.content == Content("values", self.head, int(chunk))

    def store_outputs(self, token, live, tile, values):
        leave(self.program, tile)


def leave(program, place):
    """Begins to copy what is in a place out of shared memory."""
    thread = threading.current_thread()
    program.stored[thread.warpgroup][place.content] += 1
    thread.leaving.append((place, place.content))


def wait_for_copies_out(*_, **__):
    """Waits until copies have left shared memory. They have been slow."""
    leaving = threading.current_thread().leaving
    time.sleep(SLOW if leaving else 0)
    for place, content in leaving:
        assert place.content == content, "something took the place before this had left it"
    leaving.clear()


def fake_language(programs):
    nothing = lambda *_, **__: None

    def arrive(barrier):
        barrier.arrive()
        time.sleep(1e-3)  # others go on first

    def finish_together(done):
        done.arrive()
        done.wait()

    def load(place):
        time.sleep(SLOW)
        return place.content

    def store_tiles(tiles, places):
        for tile, place in zip(tiles, places, strict=True):
            place[...] = tile

    def copy_in(source, target, full):
        if isinstance(source, Content):
            target.content = source
        full.arrive()

    return SimpleNamespace(
        WARPGROUP="warpgroup",
        axis_index=lambda _: threading.current_thread().warpgroup,
        barrier_wait=lambda barrier: barrier.wait(),
        wait_for_last=wait_for_last,
        barrier_arrive=arrive,
        copy_gmem_to_smem=copy_in,
        copy_smem_to_gmem=lambda place, _: leave(programs[threading.current_thread().program], place),
        multiply_all=lambda shape, sums, meanwhile=lambda: (): [*(MagicMock() for _ in sums), *meanwhile()],
        ds=Slice,
        when=when,
        loop=loop,
        load_tile=load,
        store_tiles=store_tiles,
        zeros=lambda *_: NOTHING,
        wait_smem_to_gmem=wait_for_copies_out,
        finish_together=finish_together,
        **dict.fromkeys(("set_max_registers", "commit_smem"), nothing),
    )


@pytest.mark.parametrize("lengths", [[1, 0, 3, 2, 0, 5, 1], [0, 0], [4], [1] * 7])
def test_all_chunks_of_all_heads_are_carried_once(monkeypatch, lengths):
    work, counter, lock = Work(len(lengths), HEADS, 1), itertools.count(), threading.Lock()
    failures = []

    def take(_, entry):
        with lock:
            entry[0] = jnp.int32(next(counter))

    def store_entry(found, entry, first):
        entry[first:] = found

    def store_values(tile, _):
        assert tile.content.kind == "values"
        tile.content = tile.content._replace(kind="outputs")

    def run(program):
        try:
            chunk_states_128_sm90.chunk_states(program.refs, program.memory, work, None, layout="VK")
        except BaseException as failure:
            failures.append(failure)
            raise

    programs = [Program(lengths) for _ in range(PROGRAMS)]
    by_refs = {id(program.refs): program for program in programs}
    fakes = dict(
        hp=fake_language(programs), jax=loops_of_python(), take=take, store_entry=store_entry, load_values=MagicMock()
    )
    fakes |= dict(Head=lambda refs, _, row, head, *__: Head(by_refs[id(refs)], row, head))
    fakes |= dict(PrefillRow=rows_of(lengths), store_values=store_values)
    for name, fake in fakes.items():
        monkeypatch.setattr(chunk_states_128_sm90, name, fake)
    threads = []
    for number, program in enumerate(programs):
        for warpgroup in range(WARPGROUPS):
            thread = threading.Thread(target=run, args=(program,), daemon=True)
            thread.program, thread.warpgroup, thread.leaving = number, warpgroup, []
            threads.append(thread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not failures
    assert not any(thread.is_alive() or thread.leaving for thread in threads)
    for program in programs:
        assert not program.stored[0]
        assert program.stored[1] == program.stored[2]
    heads = [((row, head), length) for row, length in enumerate(lengths) for head in range(HEADS)]
    wanted = collections.Counter(Content("outputs", head, n) for head, length in heads for n in range(length))
    wanted.update({Content("last state", head): len(TILES) for head, length in heads if length})
    assert sum((program.stored[1] for program in programs), collections.Counter()) == wanted


def test_neighbours_share_keys():
    work = Work(rows=2, value_heads=3, splits=2)
    places = [tuple(map(int, work.indices_of(jnp.int32(n)))) for n in range(work.total)]
    assert places == [(row, head, part) for row in range(2) for head in range(3) for part in range(2)]
