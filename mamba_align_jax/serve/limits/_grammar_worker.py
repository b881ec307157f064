"""Compiles grammars, in a process of its own: see `grammars.py`. Imports nothing of this package.

Each line of the input is a JSON schema, in a JSON string. It is answered by a line with the error or null. A line that takes
longer than the first argument says, in seconds, ends the process.
"""

import json
import resource
import signal
import sys

from llguidance import LLMatcher, LLTokenizer

_MAX_BYTES = 4 << 30


def _error(schema: str, bytes_: LLTokenizer) -> str | None:
    try:
        rules = LLMatcher.grammar_from_json_schema(schema)
        matcher = LLMatcher(bytes_, rules, log_level=0)
        # What the first step does is to look at every rule.
        matcher.compute_bitmask()
        return matcher.get_error() or None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # A library in Rust may panic, which is no Exception.
        return str(error)


def _main(time_limit: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    # The lexer, which is what may take long, reads bytes whatever the tokens are.
    bytes_ = LLTokenizer("byte")
    for line in sys.stdin:
        # What the alarm does is to end the process.
        signal.setitimer(signal.ITIMER_REAL, time_limit)
        error = _error(json.loads(line), bytes_)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps({"error": error and error[:500]}), flush=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
