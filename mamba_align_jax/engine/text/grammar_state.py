"""Structured output: which tokens may follow so that the generated text matches a grammar. Needs the extra `structured`.

llguidance (https://github.com/guidance-ai/llguidance) says which tokens a grammar allows. It runs on the host.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.errors import FieldError, GrammarError

# What may stand between the parts of a JSON text. Any amount would let a model write spaces for ever.
_WHITESPACE = " ?"
# Seconds of CPU time that a request's masks may take: together, and more for each of them. Those of usual grammars take less
# than a millisecond each, so a request on a busy machine never comes near.
_REQUEST_S, _TOKEN_S = 1.0, 0.005
# Up to this mean cost of a mask, in seconds of CPU time, a grammar is cheap.
_CHEAP_S = 0.002
# llguidance's limits of what a grammar may become, where its own are larger: a state of its lexer takes 1 to 2 KB.
_MAX_LEXER_STATES = 50_000
# The number of grammars that are kept although no request has them.
_MAX_KEPT = 32


class GrammarState:
    """The state of one request's grammar, which follows from the request's tokens. One thread at a time may use it.

    Attributes:
        cost_s: Seconds of CPU time that its masks have taken.
    """

    def __init__(self, matcher: Any, vocab_size: int, end_tokens: Collection[int]) -> None:
        """Starts before the first generated token.

        Args:
            matcher: llguidance's matcher, in its first state. No one else may use it.
            vocab_size: Number of the model's tokens.
            end_tokens: The model's end tokens.
        """
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, end_tokens
        # The number of tokens that the matcher has read; None if a call was cut off, so that it is unknown.
        self._num_read: int | None = 0
        self._error: Exception | None = None
        self._first: np.ndarray | None = None
        self.cost_s, self._num_masks = 0.0, 0

    @property
    def is_cheap(self) -> bool:
        """Whether the masks have cost so little that the next one can be waited for."""
        return self.cost_s <= _CHEAP_S * (1 + self._num_masks)

    def keep_first(self) -> None:
        """Makes the mask before the first token, which is the same for all copies. What it raises, `allow` raises again."""
        with contextlib.suppress(Exception):
            _, self._first = self.allow((), 0)

    def copy(self) -> "GrammarState":
        """Returns the same state for another request. Its first mask counts as its own."""
        other = GrammarState(self._matcher.deep_copy(), self._vocab_size, self._end_tokens)
        other._first, other._error = self._first, self._error
        other.cost_s, other._num_masks = self.cost_s, self._num_masks
        return other

    def allow(self, tokens: Sequence[int], start: int, drafts: Sequence[int] = ()) -> tuple[list[int], np.ndarray]:
        """Says which tokens may follow.

        Args:
            tokens: The request's tokens.
            start: The number of them that are the prompt's.
            drafts: Tokens that may follow.

        Returns:
            The first of the drafts, as far as the grammar allows them and goes on after them. And the tokens that may
            follow after each number of these drafts, from none to all: bit `t % 32` of word `t // 32` of a row says
            whether token t may. int32 [1 + drafts, words]

        Raises:
            GrammarError: No token may follow, or the grammar is too complex, or its masks have taken too long.
            Exception: llguidance's. A state that has raised is not used again, and raises the same.
        """
        if self._error is not None:
            raise self._error
        if self._first is not None and len(tokens) == start and not drafts:
            return [], self._first
        begin = time.thread_time()
        try:
            allowed = self._allow(tokens, start, drafts)
            self.cost_s += time.thread_time() - begin
            self._num_masks += len(allowed[1])
            self._check_cost()
        except BaseException as raised:
            self._error = failure(raised)
            raise self._error  # noqa: B904
        return allowed

    def _check_cost(self) -> None:
        limit = _REQUEST_S + _TOKEN_S * self._num_masks
        if self.cost_s > limit:
            raise GrammarError(
                f"grammar: it is too complex: {self._num_masks} masks have taken {self.cost_s:.2g} s of CPU time, "
                f"and at most {limit:.2g} s are allowed"
            )

    def _allow(self, tokens: Sequence[int], start: int, drafts: Sequence[int]) -> tuple[list[int], np.ndarray]:
        self._read(tokens, start)
        num_read, self._num_read = self._num_read, None
        masks = np.zeros((1 + len(drafts), mask_words(self._vocab_size)), np.int32)
        num_allowed = 0
        for mask in masks:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check(bool(mask.any()))
            if num_allowed == len(drafts):
                break
            draft = drafts[num_allowed]
            # The grammar does not go on after an end token.
            if draft in self._end_tokens or not mask[draft // 32] >> (draft % 32) & 1:
                break
            self._check(self._matcher.consume_token(draft))
            num_allowed += 1
        self._check(self._matcher.rollback(num_allowed))
        self._num_read = num_read
        return list(drafts[:num_allowed]), masks[: 1 + num_allowed]

    def _read(self, tokens: Sequence[int], start: int) -> None:
        """Brings the matcher to the state after the request's tokens."""
        if self._num_read is None or self._num_read > len(tokens) - start:
            self._num_read = None
            self._matcher.reset()
            self._num_read = 0
        new = tokens[start + self._num_read :]
        if new:
            self._num_read = None
            self._check(self._matcher.consume_tokens(list(new)))
            self._num_read = len(tokens) - start

    def _check(self, success: bool) -> None:
        if not success or self._matcher.is_error():
            error = self._matcher.get_error() or "no token may follow"
            raise GrammarError(f"grammar: {error.splitlines()[0]}")


class GrammarCompiler:
    """Compiles grammars for one model and its tokenizer. It keeps those that are in use, and the last 32. For any thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """Takes note of the model. Nothing is loaded before the first grammar comes.

        Args:
            tokenizer: The engine's tokenizer, or None. Its method `to_json` returns a tokenizer.json.
            vocab_size: Number of the model's tokens.
            end_tokens: The model's end tokens, which are allowed exactly where the grammar may end.
        """
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._vocabulary = functools.cache(self._load_vocabulary)
        self._known: weakref.WeakValueDictionary[Grammar, GrammarState] = weakref.WeakValueDictionary()
        self._last: deque[GrammarState] = deque(maxlen=_MAX_KEPT)
        self._lock = threading.Lock()

    def known(self, grammar: Grammar) -> GrammarState | None:
        """Returns what `check` would, if the grammar is compiled already."""
        with self._lock:
            return self._known.get(grammar)

    def check(self, grammar: Grammar) -> GrammarState:
        """Compiles a grammar, unless it is known, and returns its first state, which no request may use.

        As long as someone holds that, a later call of `start` compiles nothing.

        Raises:
            ValueError: The grammar is wrong, or the engine can't use any: it has no tokenizer.json, the model has no end
                token, or llguidance isn't installed.
        """
        found = self.known(grammar)
        if found is None:
            found = GrammarState(self._compile(grammar), self._vocab_size, self._end_tokens)
            found.keep_first()
            with self._lock:
                self._known[grammar] = found
        self._last.append(found)
        return found

    def start(self, grammar: Grammar) -> GrammarState:
        """Returns the state of a grammar before the first token. Raises what `check` raises."""
        try:
            return self.check(grammar).copy()
        except BaseException as raised:
            raise failure(raised)  # noqa: B904

    def _load_vocabulary(self) -> Any:
        try:
            import llguidance
        except ImportError as error:
            raise FieldError("grammar", "None unless llguidance is installed (the extra 'structured')") from error
        to_json = getattr(self._tokenizer, "to_json", None)
        if to_json is None:
            raise FieldError("grammar", "None in an engine without the tokenizer of a tokenizer.json")
        if not self._end_tokens:
            raise FieldError("grammar", "None for a model without an end token")
        try:
            return llguidance.LLTokenizer(to_json(), n_vocab=self._vocab_size, eos_token=self._end_tokens)
        except BaseException as raised:  # llguidance documents no exceptions here
            error = failure(raised)
            raise FieldError("grammar", f"None, because llguidance can't use the tokenizer: {error}") from error

    def _compile(self, grammar: Grammar) -> Any:
        vocabulary = self._vocabulary()
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        try:
            if grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            elif grammar.kind == "lark":
                text = LLMatcher.grammar_from_lark(grammar.text)
            else:
                schema = grammar.text or '{"type": "object"}'
                text = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
            matcher = LLMatcher(vocabulary, text, log_level=0, limits=limits)
            error = matcher.get_error()
        except BaseException as raised:
            error = failure(raised)
            raise FieldError("grammar", f"a {grammar.kind} that llguidance takes: {error}") from error
        values.require(not error, "grammar", f"a {grammar.kind} that llguidance takes ({error})", grammar.text)
        return matcher


def mask_words(vocab_size: int) -> int:
    """Returns the number of words of a mask with one bit for each token."""
    return -(-vocab_size // 32)
