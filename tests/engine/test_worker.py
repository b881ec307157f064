"""A process that works for a caller is replaced if someone ends or stops it, and the caller is not to blame."""

import os
import signal
import threading

import pytest

from mamba_align_jax.engine.text.chat_template import ChatTemplate
from mamba_align_jax.engine.text.worker import Worker
from mamba_align_jax.errors import WorkerLostError

SCRIPT = """
import json, os, signal, sys
for line in sys.stdin:
    exec(json.loads(line))
    print(json.dumps(os.getpid()), flush=True)
"""


@pytest.fixture
def worker(tmp_path):
    """A process that runs the lines that it is given, and answers each by its own id."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    return Worker(script, 0.1, '""')


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_process_that_is_ended_or_stopped_between_two_lines_is_replaced(worker, end):
    first = worker.ask('""')
    os.kill(first, end)
    second = worker.ask('""')
    assert second != first
    assert worker.ask('""') == second


def test_process_that_is_stopped_takes_no_long_line_and_is_replaced(worker):
    """A pipe holds 64 KiB, so the caller would wait for ever with the line half written."""
    first = worker.ask('""')
    os.kill(first, signal.SIGSTOP)
    assert worker.ask('"' + "#" * 10**6 + '"') != first


def test_line_is_asked_again_if_the_process_is_ended_meanwhile(worker, tmp_path):
    path = tmp_path / "asked"
    line = f"\"if not os.path.exists('{path}'): open('{path}', 'w'); signal.pause()\""
    first = worker.ask('""')
    killer = threading.Timer(0.2, os.kill, (first, signal.SIGKILL))
    killer.start()
    assert worker.ask(line) not in (first, None)
    killer.join()


@pytest.mark.parametrize("end", ["SIGKILL", "SIGSTOP"])
def test_process_that_is_lost_again_is_an_error_of_its_own(worker, end):
    with pytest.raises(WorkerLostError, match=r"script\.py was ended, or did not answer in 1\.2 s"):
        worker.ask(f'"os.kill(os.getpid(), signal.{end})"')
    assert worker.ask('""') is not None


@pytest.mark.parametrize("line", ["os.abort()", "sys.exit(1)", "os.kill(os.getpid(), signal.SIGPROF)"])
def test_process_that_ends_itself_is_the_lines_doing(worker, line):
    assert worker.ask(f'"{line}"') is None
    assert worker.ask('""') is not None


def test_chat_template_goes_on_after_its_process_was_stopped():
    pytest.importorskip("jinja2")
    template = ChatTemplate("{{ messages[0].content }}", time_limit=0.2)
    os.kill(template._worker._process.pid, signal.SIGSTOP)
    assert template.render([{"role": "user", "content": "x"}]) == "x"
