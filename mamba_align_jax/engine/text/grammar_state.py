"""Structured output: which tokens may follow so that the generated text matches a grammar. Needs the extra `structured`.

llguidance (https://github.com/guidance-ai/llguidance) says which tokens a grammar allows. It runs on the host.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from mamba_align_jax import _values as values
from mamba_align_jax.engine.grammar import Grammar
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.errors import FieldError, GrammarError

# What may stand between the parts of a JSON text. Any amount would let a model write spaces for ever.
_WHITESPACE = " ?"


class GrammarState:
    """The state of one request's grammar, which follows from the request's tokens."""

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
            GrammarError: No token may follow, or the grammar is too complex.
            Exception: llguidance's. A state that has raised is not used again, and raises the same.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._allow(tokens, start, drafts)
        except BaseException as raised:
            self._error = failure(raised)
            raise self._error  # noqa: B904

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
    """Compiles grammars for one model and its tokenizer. It keeps the last 32 that it has compiled."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        """Takes note of the model. Nothing is loaded before the first grammar comes.

        Args:
            tokenizer: The engine's tokenizer, or None. Its method `to_json` returns a tokenizer.json.
            vocab_size: Number of the model's tokens.
            end_tokens: The model's end tokens, which are allowed exactly where the grammar may end.
        """
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._vocabulary = functools.cache(self._load_vocabulary)
        self._compiled = functools.lru_cache(32)(self._compile)

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar, which a later call of `start` may use.

        Raises:
            ValueError: The grammar is wrong, or the engine can't use any: it has no tokenizer.json, the model has no end
                token, or llguidance isn't installed.
        """
        self._compiled(grammar)

    def start(self, grammar: Grammar) -> GrammarState:
        """Returns the state of a grammar before the first token. Raises what `check` raises."""
        try:
            return GrammarState(self._compiled(grammar).deep_copy(), self._vocab_size, self._end_tokens)
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
        from llguidance import LLMatcher

        try:
            if grammar.kind == "regex":
                text = LLMatcher.grammar_from_regex(grammar.text)
            elif grammar.kind == "lark":
                text = LLMatcher.grammar_from_lark(grammar.text)
            else:
                schema = grammar.text or '{"type": "object"}'
                text = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
            matcher = LLMatcher(vocabulary, text, log_level=0)
            error = matcher.get_error()
        except BaseException as raised:
            error = failure(raised)
            raise FieldError("grammar", f"a {grammar.kind} that llguidance takes: {error}") from error
        values.require(not error, "grammar", f"a {grammar.kind} that llguidance takes ({error})", grammar.text)
        return matcher


def mask_words(vocab_size: int) -> int:
    """Returns the number of words of a mask with one bit for each token."""
    return -(-vocab_size // 32)
