"""CommandThread: calls are made in order, answers arrive, and the thread ends with its owner."""

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from mamba_align_jax.engine.device.command_thread import Answer, CommandThread


def test_calls_are_made_in_order_and_answered():
    thread, made = CommandThread(), []
    answers = [thread.start(lambda n=n: made.append(n) or n * n) for n in range(100)]
    assert [answer.result() for answer in answers] == [n * n for n in range(100)]
    assert made == list(range(100))
    assert answers[7].result() == 49


def test_start_does_not_wait():
    thread, gate = CommandThread(), threading.Event()
    answer = thread.start(gate.wait, 300)
    gate.set()
    assert answer.result()


def test_what_a_call_raises_is_raised_to_whoever_asks_and_later_calls_are_made():
    thread = CommandThread()
    answer = thread.start(lambda: 1 / 0)
    assert thread.run(lambda: 5) == 5
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            answer.result()
    with pytest.raises(ZeroDivisionError):
        Answer.of(lambda: 1 / 0)


def test_a_call_of_the_thread_itself_is_made_at_once():
    thread = CommandThread()
    assert thread.run(lambda: thread.run(threading.current_thread)) is not threading.current_thread()


def test_the_thread_ends_with_its_owner_and_keeps_nothing_that_it_has_called():
    class Owner:
        def method(self):
            return threading.current_thread()

    thread, owner = CommandThread(), Owner()
    worker, alive = thread.run(owner.method), weakref.ref(owner)
    del owner
    thread.run(lambda: None)
    gc.collect()
    assert alive() is None
    del thread
    gc.collect()
    worker.join(300)
    assert not worker.is_alive()


@pytest.mark.parametrize("last", ["pass", "del thread"])
def test_a_process_that_ends_waits_for_the_calls_that_were_handed_over(last):
    """Its exit status is its own. A program that came back to an interpreter that is gone would end it by a signal."""
    program = f"""
import sys, time, weakref
from mamba_align_jax.engine.device.command_thread import CommandThread

def slow(number):
    time.sleep(0.3)
    print(number, flush=True)

class Owner:
    def end(self):
        print("end", flush=True)

owner = Owner()
thread = CommandThread(weakref.WeakMethod(owner.end))
answers = [thread.start(slow, number) for number in range(2)]
{last}
sys.exit(7)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert (run.returncode, run.stdout.split()) == (7, ["0", "1", "end"]), run.stderr


def test_a_thread_knows_itself():
    thread = CommandThread()
    assert thread.run(thread.is_current)
    assert not thread.is_current()
