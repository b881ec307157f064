"""Refuses grammars that would take long to compile, before the engine sees them.

Most grammars compile within milliseconds, but a short one can need hours: {"multipleOf": 2147483647}. So a grammar is
first compiled in a process of its own, which ends at a limit of time and of memory.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.text.worker import Worker
from mamba_align_jax.errors import FieldError

_SCRIPT = Path(__file__).with_name("_grammar_worker.py")


def special_tokens_of(tokenizer: object) -> list[str]:
    """Returns the names of the special tokens of an engine's tokenizer; none if it has no tokenizer.json."""
    to_json = getattr(tokenizer, "to_json", None)
    return [] if to_json is None else [one["content"] for one in json.loads(to_json())["added_tokens"]]


class GrammarCheck:
    """Compiles grammars as a test, each in `time_limit` seconds. One thread may call it. The first call starts a process.

    What was found for the last 256 grammars is kept, also that they are wrong or take too long.
    """

    def __init__(self, time_limit: float, special_tokens: Callable[[], Sequence[str]] = tuple) -> None:
        """`special_tokens` returns the names of the model's special tokens, which rules may name."""
        self._time_limit, self._special_tokens = time_limit, special_tokens
        self._worker: Worker | None = None
        self._error_of = functools.lru_cache(256)(self._find_error)

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar as a test.

        Raises:
            FieldError: It is wrong, or takes too long or too much memory.
            WorkerLostError: The process was ended from outside.
        """
        error = self._error_of(grammar)
        if error is not None:
            raise error.renamed(error.field)

    def _find_error(self, grammar: Grammar) -> FieldError | None:
        if self._worker is None:
            self._worker = Worker(_SCRIPT, self._time_limit, json.dumps(self._special_tokens()))
        answer = self._worker.ask(json.dumps([grammar.kind, grammar.text]))
        if answer is None:
            wanted = f"compile within {self._time_limit:g} s of CPU time and the limits of memory"
            return FieldError("response_format", wanted, must="must")
        if answer["error"]:
            return FieldError("response_format", "what llguidance takes", answer["error"])
        return None
