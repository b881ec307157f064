"""The text of generated tokens as they come, and where a stop string ends it."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.engine.text.tokenizer import Tokenizer
from mamba_align_jax.errors import PanicError

# What a tokenizer writes for bytes that are not, or not yet, a character.
BROKEN = "\ufffd"
# A character has at most four bytes, so a token that comes completes one with at most the last three before it. Tokens
# without text wait for one with text, but not for ever: each token should cost the same.
_MAX_INCOMPLETE, MAX_UNSETTLED = 3, 16
# How many tokens at the end of a prompt are looked at for whole characters.
_SHORTEST_END, _LONGEST_END = 4, 24


class GeneratedText(NamedTuple):
    """The text of a request's first generated tokens, as it follows the text of the prompt. A stop token has none.

    It depends on these tokens and on the end of the prompt, not on the steps that the tokens came in.

    Attributes:
        tokenizer: Turns tokens into text.
        stop: The strings that end the request.
        min_tokens: Number of tokens up to which no stop string ends it.
        num_tokens: Number of generated tokens that were read.
        text: The text that no later token changes. After a stop string was found, it ends before the stop string.
        context: The last tokens whose text is in `text`. Tokenizers treat the first token of a text in another way than
            later ones, so new tokens are decoded after these.
        unsettled: The tokens after them. They end in the middle of a character, or have no text yet.
        found: The stop string that ends the request; None before it has come.
        before: The first `context`: the end of the prompt.
        skip_special_tokens: Whether special tokens have no text.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    num_tokens: int = 0
    text: str = ""
    context: tuple[int, ...] = ()
    unsettled: tuple[int, ...] = ()
    found: str | None = None
    before: tuple[int, ...] = ()
    skip_special_tokens: bool = True

    @classmethod
    def after(
        cls,
        prompt: tuple[int, ...],
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        *,
        skip_special_tokens: bool = True,
    ) -> "GeneratedText":
        """Returns the text of no tokens after a prompt."""
        text = cls(tokenizer, stop, min_tokens, skip_special_tokens=skip_special_tokens)
        return text._replace(before=_end_of(prompt, text._text_of)).fresh()

    def fresh(self) -> "GeneratedText":
        """Returns the text of no tokens."""
        return self._replace(num_tokens=0, text="", context=self.before, unsettled=(), found=None)

    def read(self, tokens: Iterable[int]) -> "GeneratedText":
        """Returns the text after further tokens."""
        text = self
        for token in tokens:
            unsettled = (*text.unsettled, token)
            piece = text._decode(unsettled)
            if piece and not piece.endswith(BROKEN):
                text = text._after(text.num_tokens + 1, piece, unsettled, ())
            elif len(unsettled) < MAX_UNSETTLED:
                text = text._after(text.num_tokens + 1, "", text.context, unsettled)
            else:
                settled = num_settled(text._decode, unsettled)
                piece, rest = text._decode(unsettled[:settled]), unsettled[settled:]
                # Tokens without text leave the context as it is.
                text = text._after(text.num_tokens + 1, piece, () if piece else text.context, rest)
        return text

    def read_stop_token(self) -> "GeneratedText":
        """Returns the text after a stop token."""
        return self._replace(num_tokens=self.num_tokens + 1)

    def of_all(self, tokens: tuple[int, ...]) -> "GeneratedText":
        """Returns the text of all tokens, but a stop token, of a request without stop strings that has ended."""
        fresh = self.fresh()
        return fresh._replace(num_tokens=len(tokens), text=fresh._decode(tokens))

    def ended(self) -> "GeneratedText":
        """Returns the text if no token follows. What is left of a character becomes a replacement character."""
        if not self.unsettled:
            return self
        return self._after(self.num_tokens, self._decode(self.unsettled), (), ())

    @property
    def shown(self) -> str:
        """The text that a reader may see already: not the end that may become part of a stop string."""
        if self.found is not None or not self.stop:
            return self.text
        return self.text[: min(self._begin(stop) for stop in self.stop)]

    def _begin(self, stop: str) -> int:
        """Returns where the longest end of the text begins that a stop string begins with."""
        begin = self.text.find(stop[0], max(len(self.text) - len(stop) + 1, 0))
        while begin >= 0 and not stop.startswith(self.text[begin:]):
            begin = self.text.find(stop[0], begin + 1)
        return begin if begin >= 0 else len(self.text)

    def _decode(self, tokens: tuple[int, ...]) -> str:
        """Returns the text of tokens that follow the context."""
        if not self.context:
            return self._text_of(tokens)
        before, both = self._text_of(self.context), self._text_of((*self.context, *tokens))
        # With broken bytes after it, a tokenizer may write the context in another way.
        return both[len(before) :] if both.startswith(before) else self._text_of(tokens)

    def _text_of(self, tokens: tuple[int, ...]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)

    def _after(
        self, num_tokens: int, piece: str, context: tuple[int, ...], unsettled: tuple[int, ...]
    ) -> "GeneratedText":
        """Returns the text with a piece more, unless a stop string has ended it."""
        text, found = self.text, self.found
        if found is None:
            text += piece
        if piece and found is None and self.stop and num_tokens > self.min_tokens:
            # A stop string counts where its last character is new. Of several the one that is complete first does, and of
            # those that end together the first one, so it doesn't matter which characters came with one token.
            begins = ((text.find(stop, max(len(self.text) - len(stop) + 1, 0)), stop) for stop in self.stop)
            complete = [(begin, stop) for begin, stop in begins if begin >= 0]
            begin, found = min(complete, key=lambda one: one[0] + len(one[1]), default=(len(text), None))
            text = text[:begin]
        return self._replace(num_tokens=num_tokens, text=text, context=context, unsettled=unsettled, found=found)


def num_settled(decode: Callable[[tuple[int, ...]], str], tokens: tuple[int, ...]) -> int:
    """Returns how many of the tokens no later token completes to a character."""
    count = len(tokens) - _MAX_INCOMPLETE
    # Several broken bytes may be one replacement character, which is not cut.
    while count > 1 and len(decode(tokens[: count + 1])) == len(decode(tokens[:count])):
        count -= 1
    return count


def _end_of(prompt: tuple[int, ...], decode: Callable[[tuple[int, ...]], str]) -> tuple[int, ...]:
    """Returns the last few tokens of a prompt if their text has whole characters only, or else none."""
    try:
        for count in range(min(len(prompt), _SHORTEST_END), min(len(prompt), _LONGEST_END) + 1):
            end = prompt[len(prompt) - count :]
            text = decode(end)
            if text and BROKEN not in text:
                return end
    except BaseException as raised:
        # A tokenizer that can't decode the prompt may still decode what follows it, but one that has panicked may not.
        error = failure(raised)
        if isinstance(error, PanicError):
            raise error  # noqa: B904
    return ()
