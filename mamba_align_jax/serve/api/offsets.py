"""Where the tokens of an answer begin in its text."""

from mamba_align_jax.engine.text.generated_text import BROKEN, MAX_UNSETTLED, num_settled
from mamba_align_jax.serve.api.service import Service


class TextOffsets:
    """Counts the characters of one choice's text, token by token.

    A token that ends within a character adds none. The one that completes the character adds those of all of them.

    Attributes:
        end: The number of characters before the next token.
    """

    def __init__(
        self, service: Service, echo: str = "", num_echoed: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        """Begins at the first token. `echo` is the text of the prompt's `num_echoed` tokens if the choice begins with it."""
        self.end, self._skips_special = 0, skip_special_tokens
        self._service, self._echo, self._num_left = service, echo, num_echoed
        # The last tokens, which end within a character.
        self._open: tuple[int, ...] = ()

    def add(self, token: int) -> int:
        """Takes the next token, and returns where it begins."""
        if self._echo and self._num_left == 0:
            # The engine's text begins anew after the prompt's, even within a character.
            self._open, self.end, self._echo = (), len(self._echo), ""
        self._num_left -= 1
        text = self._service.token_text(token)
        if not text and not self._skips_special:
            text = self._service.special_text(token)
        if BROKEN in text:
            begin = self.end
            self._add_open(token)
            return begin
        if text or self._echo:
            # What comes before whole characters is never completed.
            self._settle(len(self._open))
        begin = self.end
        self.end += self._length(token, text)
        return begin

    def _add_open(self, token: int) -> None:
        self._open += (token,)
        if not self._decode(self._open).endswith(BROKEN):
            self._settle(len(self._open))
        elif len(self._open) == MAX_UNSETTLED:
            self._settle(num_settled(self._decode, self._open))

    def _settle(self, count: int) -> None:
        """Counts the characters of the first open tokens."""
        if count:
            self.end += len(self._decode(self._open[:count]))
            self._open = self._open[count:]

    def _decode(self, tokens: tuple[int, ...]) -> str:
        return self._service.tokenizer("prompt").decode(tokens)

    def _length(self, token: int, text: str) -> int:
        """Returns how many characters a token of whole characters has in the choice's text."""
        if not self._echo:
            return len(text)
        # An echo shows the special tokens that the prompt had as text, and its first word may lack the space before it.
        shown = (text or self._service.special_text(token), text.removeprefix(" "))
        return next((len(one) for one in shown if self._echo.startswith(one, self.end)), len(text))
