"""Messages of a chat as one prompt, by the chat template of a model's directory. Needs the extra `text`.

A template is a program from the model's publisher. It runs in Jinja's sandbox, in a process of its own that has a limit of
time and of memory, so a bad template can neither read files nor stop its caller.
"""

import contextlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mamba_align_jax import _values as values
from mamba_align_jax.engine.text.worker import Worker
from mamba_align_jax.engine.turns import Turns

_SCRIPT = Path(__file__).with_name("_template_worker.py")
# What transformers hands to every template. A template may ask whether it is none.
_UNUSED = MappingProxyType({"tools": None, "documents": None})
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Turns messages into a prompt. Any thread may call it; one at a time is served.

    Attributes:
        source: The template's text.
        variables: What the template may use besides the messages, for instance `bos_token`.
        time_limit: Number of seconds of CPU time that a prompt may take, at most a day.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, *, time_limit: float = 2.0) -> None:
        """Compiles a template in a process of its own.

        Raises:
            ValueError: The template is wrong, or an argument is of another type or out of range.
        """
        values.require(isinstance(source, str), "source", "text", source)
        values.instance("variables", variables, Mapping, optional=True)
        self.time_limit = values.time_limit("time_limit", time_limit)
        self.source, self.variables = source, dict(variables or {})
        self._turns = Turns("the chat template")
        self._worker = Worker(_SCRIPT, self.time_limit, json.dumps(source))
        _text_of(self._worker.start())

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the prompt for messages. A tokenizer encodes it with `add_special_tokens=False`.

        Args:
            messages: The chat so far, each message with its "role" and "content". A content is text, or a list of parts
                `{"type": "text", "text": ...}`. The parts are lines of a text if the template takes texts only.
            add_generation_prompt: Whether the prompt ends where the model's answer begins.
            **variables: What else this template uses, for instance `tools`, which are none otherwise.

        Raises:
            ValueError: An argument is of another type, or the template refuses the messages, fails, or takes too long or too
                much memory.
            WorkerLostError: The process that renders was ended or stopped from outside, and so was the one after it.
            RuntimeError: This process was forked from the one that made the template.
        """
        chat, wanted = values.members("messages", messages, "a sequence of messages"), "a mapping with role and content"
        for number, message in enumerate(chat):
            values.require(isinstance(message, Mapping), f"messages[{number}]", wanted, message)
        add_generation_prompt = values.flag("add_generation_prompt", add_generation_prompt)
        given = dict(messages=chat, add_generation_prompt=add_generation_prompt)
        try:
            task = json.dumps(_UNUSED | self.variables | variables | given)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"messages must be what JSON can hold, got {error}") from error
        return values.text("the chat template's prompt", _text_of(self._turns.take(self._worker.ask, task)))


def _text_of(answer: Any) -> str:
    """Returns the text of a worker's answer, or raises the error that it tells."""
    if answer is None:
        raise ValueError("the chat template must be done within its limits, got one that takes longer")
    if "error" in answer:
        raise ValueError(f"the chat template must accept the messages, got {answer['error']}")
    return answer["text"]


def load_chat_template(path: str | Path, source: str | None = None) -> ChatTemplate | None:
    """Loads the chat template of a Hugging Face directory, from chat_template.jinja or tokenizer_config.json.

    Args:
        path: The directory.
        source: The text of another template, which is taken instead. It may name the directory's special tokens.

    Returns:
        The template; None if there is none, or if `jinja2` isn't installed.

    Raises:
        ValueError: The template or tokenizer_config.json is wrong.
    """
    values.instance("path", path, str, Path)
    directory, config = Path(path), {}
    if importlib.util.find_spec("jinja2") is None:
        return None
    with contextlib.suppress(FileNotFoundError):
        try:
            config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf8"))
        except ValueError as error:
            raise ValueError(f"tokenizer_config.json must be JSON, got {error}") from error
    values.require(isinstance(config, Mapping), "tokenizer_config.json", "an object", config)
    source = _own_template(directory, config) if source is None else source
    return None if source is None else ChatTemplate(source, _special_tokens(config))


def _own_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the text of a directory's own template; None if it has none."""
    source = config.get("chat_template")
    with contextlib.suppress(FileNotFoundError):
        source = (directory / "chat_template.jinja").read_text(encoding="utf8")
    if isinstance(source, list):
        # Several templates with names.
        named = [one for one in source if isinstance(one, Mapping) and one.get("name") == "default"]
        source = named[0].get("template") if named else None
    values.require(source is None or isinstance(source, str), "chat_template", "text", source)
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a template may name. A file has each as text, or as an object with its content."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found
