"""A change of the bookkeeping that was cut off leaves it torn, wherever that was; one that has ended leaves it whole."""

import itertools
import sys

import pytest

from mamba_align_jax.engine.running.changing import Changing


def change(changing, done):
    with changing:
        done.append(changing.is_torn)


def test_bookkeeping_is_torn_in_a_change_and_whole_after_it():
    changing, done = Changing(), []
    change(changing, done)
    assert done == [True]
    assert not changing.is_torn


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_leaves_it_torn_until_a_later_change_ends(error):
    changing = Changing()
    with pytest.raises(error), changing:
        raise error
    assert changing.is_torn
    change(changing, [])
    assert not changing.is_torn


def test_it_is_whole_after_an_interrupt_only_if_the_change_has_not_begun_or_has_ended():
    """The interrupt comes before each instruction in turn."""
    found = []
    for turn in itertools.count():
        changing, done, left = Changing(), [], turn

        def strike(frame, event, argument):
            nonlocal left
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return strike

        sys.settrace(strike)
        try:
            change(changing, done)
        except KeyboardInterrupt:
            found.append((changing.is_torn, len(done)))
        else:
            break
        finally:
            sys.settrace(None)
    # First nothing has happened, then the change is noted, is made, and has ended.
    assert [state for state, _ in itertools.groupby(found)] == [(False, 0), (True, 0), (True, 1), (False, 1)]
