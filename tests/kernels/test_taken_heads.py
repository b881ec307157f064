"""How programs take heads one after the other in the delta rule's prefill, with threads of Python for warpgroups."""

import itertools
import threading
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.mosaic_in_numpy import Slice, loop, loops_of_python, when

from pallas_kernels.gated_delta_rule.prefill import heads_mosaic
from pallas_kernels.gated_delta_rule.prefill.work_mosaic import Work

PROGRAMS, SECONDS = 3, 10.0
WARPGROUPS = 1 + heads_mosaic.PARTS
KEY_DIM, PIECES = 128, 2


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


class Program:
    """What the warpgroups of a program share: barriers, the number taken, and what is in shared memory."""

    def __init__(self):
        described = heads_mosaic.barriers(KEY_DIM, PIECES, per_channel=False)
        of = lambda each, count: Barriers(Barrier(each) for _ in range(count)) if count > 1 else Barrier(each)
        described = {name: of(each, int(np.prod(each.num_barriers))) for name, each in described.items()}
        self.refs = SimpleNamespace(**described, v=MagicMock())
        self.refs.v.shape = (1, 1, 1)
        self.refs.squares = self.refs.attention = MagicMock()
        self.memory = [(MagicMock(), dict(number=[None]))]
        self.stages = {}
        self.seen = [[] for _ in range(WARPGROUPS)]


class Head(MagicMock):
    """A head of a row, which only knows its chunks. What it fetches arrives at once."""

    def __init__(self, program, work, row, head, lengths):
        super().__init__()
        self.program, self.refs = program, program.refs
        self.place, self.count = (int(row), int(head)), lengths[int(row)]
        self.first, self.per_channel, self.key_tiles, self.pieces = 0, False, range(2), range(PIECES)
        self.row = SimpleNamespace(tokens_of=lambda chunk: (chunk, chunk), run=self.run, clear=lambda *_: None)

    def _get_child_mock(self, **options):
        return MagicMock(**options)

    def run(self, refs, state, advance, store):
        advance(0, self.count, state)

    def copy_keys(self, name, here, number, at, full):
        self.program.stages[int(at)] = self.place, int(number)
        full.arrive(len(self.key_tiles))

    def copy_products(self, number, at, full):
        full.arrive(PIECES + 1)

    def keep_tokens(self, chunk, tile, at):
        """The chunk's tokens are in shared memory now."""
        assert self.program.stages[int(at)] == (self.place, int(chunk))
        self.program.seen[threading.current_thread().warpgroup].append((self.place, int(chunk)))


def fake_pm():
    nothing = lambda *_, **__: None

    def arrive(barrier):
        barrier.arrive()
        time.sleep(1e-3)  # others go on first

    def finish_together(done):
        done.arrive()
        done.wait()

    return SimpleNamespace(
        WARPGROUP="warpgroup",
        axis_index=lambda _: threading.current_thread().warpgroup,
        wait=lambda barrier: barrier.wait(),
        arrive=arrive,
        copy_in=lambda source, target, full: full.arrive(),
        multiply_all=lambda shape, sums, meanwhile=lambda: (): [*(MagicMock() for _ in sums), *meanwhile()],
        slice_of=Slice,
        when=when,
        loop=loop,
        finish_together=finish_together,
        **dict.fromkeys(("set_max_registers", "wait_for_copies_out", "store_transposed", "commit"), nothing),
    )


@pytest.mark.parametrize("lengths", [[1, 0, 3, 2, 0, 5, 1], [0, 0], [4]])
def test_all_chunks_of_all_heads_are_carried_once(monkeypatch, lengths):
    work, counter, lock = Work(len(lengths), 2, 1), itertools.count(), threading.Lock()
    failures = []

    def take_next(_, number):
        with lock:
            number[0] = jnp.int32(next(counter))

    def run(program):
        try:
            heads_mosaic.carry_states(program.refs, program.memory, work, None, layout="VK")
        except BaseException as failure:
            failures.append(failure)
            raise

    programs = [Program() for _ in range(PROGRAMS)]
    by_refs = {id(program.refs): program for program in programs}
    make_head = lambda refs, memory, row, head, layout: Head(by_refs[id(refs)], work, row, head, lengths)
    monkeypatch.setattr(heads_mosaic, "pm", fake_pm())
    monkeypatch.setattr(heads_mosaic, "jax", loops_of_python())
    monkeypatch.setattr(heads_mosaic, "Head", make_head)
    monkeypatch.setattr(heads_mosaic, "take_next", take_next)
    monkeypatch.setattr(heads_mosaic, "load_values", MagicMock())
    threads = []
    for program in programs:
        for warpgroup in range(WARPGROUPS):
            thread = threading.Thread(target=run, args=(program,), daemon=True)
            thread.warpgroup = warpgroup
            threads.append(thread)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    for program in programs:
        assert program.seen[1] == program.seen[2]
    chunks = [(place, chunk) for program in programs for place, chunk in program.seen[1]]
    wanted = [((row, head), n) for row, length in enumerate(lengths) for head in range(2) for n in range(length)]
    assert sorted(chunks) == wanted


def test_neighbours_share_keys():
    work = Work(rows=2, value_heads=3, parts=2)
    places = [tuple(map(int, work.place_of(jnp.int32(n)))) for n in range(work.total)]
    assert places == [(row, head, part) for row in range(2) for head in range(3) for part in range(2)]
