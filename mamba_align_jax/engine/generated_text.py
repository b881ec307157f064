"""The text of generated tokens as they come, and where a stop string ends it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from mamba_align_jax.engine.text import Tokenizer

# What a tokenizer writes for bytes that are not, or not yet, a character.
_BROKEN = "\ufffd"
# A character has at most four bytes, so it is whole after four tokens, and before that it lacks its last ones. Tokens
# without text wait for the next one with text, at most so many.
_MAX_INCOMPLETE, _MAX_UNSETTLED = 3, 16


@dataclass(frozen=True)
class GeneratedText:
    """The text of a request's first generated tokens. It depends on these tokens alone, not on the steps they came in.

    Attributes:
        tokenizer: Turns tokens into text.
        stop: The strings that end the request.
        num_tokens: Number of generated tokens that were read.
        text: The text that no later token changes. After a stop string was found, it ends before the stop string.
        context: The last tokens whose text is in `text`. Tokenizers treat the first token of a text in another way than
            later ones, so new tokens are decoded after these.
        unsettled: The tokens after them. They end in the middle of a character, or have no text yet.
        found: The stop string that ends the request; None before it has come.
    """

    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()
    num_tokens: int = 0
    text: str = ""
    context: tuple[int, ...] = ()
    unsettled: tuple[int, ...] = ()
    found: str | None = None

    def fresh(self) -> Self:
        """Returns the text of no tokens."""
        return type(self)(self.tokenizer, self.stop)

    def read(self, tokens: Iterable[int]) -> Self:
        """Returns the text after further tokens."""
        text = self
        for token in tokens:
            text = text._read(token)
        return text

    def _read(self, token: int) -> Self:
        text = replace(self, num_tokens=self.num_tokens + 1, unsettled=(*self.unsettled, token))
        piece = text._decode(text.unsettled)
        if piece and not piece.endswith(_BROKEN):
            return replace(text._append(piece), context=text.unsettled, unsettled=())
        if len(text.unsettled) < _MAX_UNSETTLED:
            return text
        # These bytes will never be characters, but the last ones may.
        broken, last = text.unsettled[:-_MAX_INCOMPLETE], text.unsettled[-_MAX_INCOMPLETE:]
        return replace(text._append(text._decode(broken)), context=(), unsettled=last)

    def ended(self) -> Self:
        """Returns the text if no token follows. What is left of a character becomes a replacement character."""
        if not self.unsettled or self.found is not None:
            return self
        return replace(self._append(self._decode(self.unsettled)), context=(), unsettled=())

    @property
    def shown(self) -> str:
        """The text that a reader may see already: not the end that may become part of a stop string."""
        if self.found is not None:
            return self.text
        held = (
            length
            for stop in self.stop
            for length in range(min(len(stop) - 1, len(self.text)), 0, -1)
            if self.text.endswith(stop[:length])
        )
        return self.text[: len(self.text) - max(held, default=0)]

    def _decode(self, tokens: tuple[int, ...]) -> str:
        """Returns the text of tokens that follow the context."""
        if not self.context:
            return self.tokenizer.decode(tokens)
        before, both = self.tokenizer.decode(self.context), self.tokenizer.decode((*self.context, *tokens))
        # With broken bytes after it, a tokenizer may write the context in another way.
        return both[len(before) :] if both.startswith(before) else self.tokenizer.decode(tokens)

    def _append(self, piece: str) -> Self:
        if self.found is not None:
            return self
        text = self.text + piece
        # A stop string counts where its last character is new. Of several the one that begins first does.
        begins = ((text.find(stop, max(len(self.text) - len(stop) + 1, 0)), stop) for stop in self.stop)
        begin, found = min(((begin, stop) for begin, stop in begins if begin >= 0), default=(len(text), None))
        return replace(self, text=text[:begin], found=found)
