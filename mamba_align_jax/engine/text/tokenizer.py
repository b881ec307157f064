"""Text in and out of an engine, with the tokenizer.json of its model's directory. Needs the extra `text`."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from mamba_align_jax import _values as values
from mamba_align_jax.engine.interrupts import failure
from mamba_align_jax.engine.text.longest_token import longest_token
from mamba_align_jax.errors import FieldError

# So many are decoded in a fraction of a millisecond, with Python's lock held.
_MANY_TOKENS = 1024


class Tokenizer(Protocol):
    """What an engine needs of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        """Returns the token ids of a text, with the special tokens that the model's prompts begin and end with.

        A chat template writes these tokens itself, so the prompts of chats are encoded without them.
        """
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids, without that of special tokens unless it is asked for.

        Broken characters become replacement characters.
        """
        ...


class _FileTokenizer:
    # A panic of the library is a PanicError here, for all who have no request that it would end.

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @functools.cached_property
    def longest_token(self) -> int | None:
        """The largest number of a text's characters that become one token; None if it is not known."""
        return longest_token(json.loads(self.to_json()))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        # `encode` would keep all other threads waiting, for seconds if the text is long.
        try:
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as raised:
            raise failure(raised)  # noqa: B904

    def to_json(self) -> str:
        """Returns the tokenizer.json, for grammars."""
        return self._tokenizer.to_str()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        try:
            if len(token_ids) > _MANY_TOKENS:
                # `decode` would keep all other threads waiting, as `encode` does.
                return self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0]
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except BaseException as raised:
            raise failure(raised)  # noqa: B904


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """Loads the tokenizer of a Hugging Face directory.

    Returns:
        The tokenizer; None if the directory has no tokenizer.json, or if `tokenizers` isn't installed.

    Raises:
        ValueError: tokenizer.json is not a file of Hugging Face tokenizers.
    """
    values.instance("path", path, str, Path)
    file = Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        import tokenizers
    except ImportError:
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except BaseException as raised:  # tokenizers raises no narrower exception
        error = failure(raised)
        raise ValueError(f"tokenizer.json must be a file of Hugging Face tokenizers, got {file}: {error}") from error
    # Files often hold how batches of training were cut and filled up. transformers does neither unless it is asked to.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return _FileTokenizer(tokenizer)


def token_ids(tokenizer: Tokenizer | None, prompts: Any) -> list[Any]:
    """Returns the token ids of each prompt. `check_request` checks them.

    Args:
        tokenizer: Encodes prompts that are text.
        prompts: One prompt or several; each is text or token ids, and token ids are a sequence or an array.

    Raises:
        ValueError: There is no prompt, one is text and there is no tokenizer, or the tokenizer can't encode it.
    """
    is_sequence = isinstance(prompts, Sequence) or getattr(prompts, "ndim", 0) > 0
    wanted = "one prompt or several, each text or token ids"
    values.require(is_sequence and not isinstance(prompts, bytes | bytearray | memoryview), "prompts", wanted, prompts)
    values.require(
        bool(prompts) if isinstance(prompts, range) else len(prompts) > 0, "prompts", f"{wanted}, at least one", prompts
    )
    # A range has numbers only, and may have more than anyone can look at.
    several = not isinstance(prompts, str | range) and any(map(_is_prompt, prompts))
    return [_encode(tokenizer, prompt) for prompt in (prompts if several else [prompts])]


def _is_prompt(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0


def _encode(tokenizer: Tokenizer | None, prompt: Any) -> Any:
    if not isinstance(prompt, str):
        return prompt
    wanted = "token ids without a tokenizer (tokenizer.json in the model's directory, and the extra 'text')"
    if tokenizer is None:
        raise FieldError("prompts", wanted, repr(prompt[:40]))
    text = values.text("prompts", prompt)
    try:
        return tokenizer.encode(text)
    except BaseException as raised:
        raise failure(raised)  # noqa: B904
