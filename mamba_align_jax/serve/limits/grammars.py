"""Refuses grammars that would take long to compile, before the engine sees them.

Most grammars compile within milliseconds, but a short one can need hours: {"multipleOf": 2147483647}. So a grammar is
first compiled in a process of its own, which ends at a limit of time and of memory.
"""

import functools
import json
from pathlib import Path

from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.text.worker import Worker
from mamba_align_jax.errors import FieldError

_SCRIPT = Path(__file__).with_name("_grammar_worker.py")


class GrammarCheck:
    """Compiles grammars as a test, each in `time_limit` seconds. One thread may call it. The first call starts a process."""

    def __init__(self, time_limit: float) -> None:
        self._time_limit = time_limit
        self._worker: Worker | None = None
        # What was good stays good.
        self.check = functools.lru_cache(256)(self._check)

    def _check(self, grammar: Grammar) -> None:
        """Compiles a "json_schema", or raises a FieldError if it is wrong or takes too long or too much memory."""
        if self._worker is None or not self._worker.is_alive:
            self._worker = Worker(_SCRIPT, str(self._time_limit))
        answer = self._worker.ask(json.dumps(grammar.text))
        if answer is None:
            wanted = f"compile within {self._time_limit:g} s and the limits of memory"
            raise FieldError("response_format", wanted, must="must")
        if answer["error"]:
            raise FieldError("response_format", "a schema that llguidance takes", answer["error"])
