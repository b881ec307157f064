"""Compiles grammars, in a process of its own: see `grammars.py`. Imports nothing of this package.

The first line of the input is a list of the names of the model's special tokens, as JSON. Each further one is a grammar, as
a list of its kind and its text. Each line is answered by one with the error or null. A grammar that takes longer than the
first argument says, in seconds of CPU time, ends the process.
"""

import json
import resource
import signal
import sys
from collections.abc import Sequence

from llguidance import LLMatcher, LLTokenizer

_MAX_BYTES = 4 << 30


def _vocabulary(special_tokens: Sequence[str]) -> LLTokenizer:
    """Returns a vocabulary of the 256 bytes, an end token, and special tokens, which rules may name.

    The lexer, which is what may take long, reads bytes whatever the tokens are.
    """
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in visible)
    # A tokenizer.json names each byte by a character that can be seen.
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    names = ["<end of text>", *special_tokens]
    added = [dict(id=256 + place, content=name, special=True) for place, name in enumerate(names)]
    plain = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    bytewise = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    model = dict(type="BPE", vocab={letter: byte for byte, letter in letters.items()}, merges=[])
    parts = dict(added_tokens=[plain | one for one in added], pre_tokenizer=bytewise, decoder=bytewise, model=model)
    return LLTokenizer(json.dumps(dict(version="1.0") | parts), eos_token=256)


def _error(kind: str, text: str, vocabulary: LLTokenizer) -> str | None:
    make_rules = {
        "regex": LLMatcher.grammar_from_regex,
        "lark": LLMatcher.grammar_from_lark,
        "json_schema": LLMatcher.grammar_from_json_schema,
    }
    try:
        matcher = LLMatcher(vocabulary, make_rules[kind](text), log_level=0)
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
    vocabulary = _vocabulary(json.loads(sys.stdin.readline()))
    _answer(None)
    for line in sys.stdin:
        kind, text = json.loads(line)
        # What the alarm does is to end the process. A busy machine does not bring it forward: it counts CPU time.
        signal.setitimer(signal.ITIMER_PROF, time_limit)
        error = _error(kind, text, vocabulary)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(error)


def _answer(error: str | None) -> None:
    print(json.dumps({"error": error and error[:500]}), flush=True)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
