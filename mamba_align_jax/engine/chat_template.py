"""Messages of a chat as one prompt, by the chat template of a model's directory. Needs the extra `text`.

A template is a program from the model's publisher. It runs in Jinja's sandbox, in a process of its own that has a limit of
time and of memory, so a bad template can neither read files nor stop its caller.
"""

import contextlib
import importlib.util
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mamba_align_jax import _values as values

_WORKER = Path(__file__).with_name("_template_worker.py")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Turns messages into a prompt. Any thread may call it; one at a time is served.

    Attributes:
        source: The template's text.
        variables: What the template may use besides the messages, for instance `bos_token`.
        time_limit: Number of seconds that a prompt may take.
    """

    def __init__(self, source: str, variables: Mapping[str, Any] | None = None, *, time_limit: float = 2.0) -> None:
        """Compiles a template in a process of its own.

        Raises:
            ValueError: The template is wrong.
        """
        self.source, self.variables, self.time_limit = source, dict(variables or {}), time_limit
        self._lock = threading.Lock()
        self._worker = _Worker(source, time_limit)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Returns the prompt for messages. A tokenizer encodes it with `add_special_tokens=False`.

        Args:
            messages: The chat so far, each message with its "role" and "content".
            add_generation_prompt: Whether the prompt ends where the model's answer begins.
            **variables: What else this template uses, for instance `tools`.

        Raises:
            ValueError: The template refuses the messages, fails, or takes too long or too much memory.
        """
        given = dict(messages=messages, add_generation_prompt=add_generation_prompt)
        try:
            task = json.dumps(self.variables | variables | given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"messages must be what JSON can hold, got {error}") from error
        with self._lock:
            if not self._worker.is_alive:
                self._worker = _Worker(self.source, self.time_limit)
            return self._worker.ask(task)


class _Worker:
    """The process that renders one template."""

    def __init__(self, source: str, time_limit: float) -> None:
        command = [sys.executable, "-P", str(_WORKER), str(time_limit)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf8",
        )
        self._stop = weakref.finalize(self, _stop, self._process)
        self.ask(json.dumps(source))

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, task: str) -> str:
        """Sends a line and waits for the answer, which comes in time: the process ends itself if it takes too long."""
        assert self._process.stdin
        assert self._process.stdout
        answer = ""
        try:
            self._process.stdin.write(task + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        except BaseException:
            # The answer would be taken for that of the next question.
            self._stop()
            raise
        if not answer:
            self._stop()
            raise ValueError("the chat template must be done within its limits, got one that takes longer")
        result = json.loads(answer)
        if "error" in result:
            raise ValueError(f"the chat template must accept the messages, got {result['error']}")
        return result["text"]


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe
            pipe.close()


def load_chat_template(path: str | Path) -> ChatTemplate | None:
    """Loads the chat template of a Hugging Face directory, from chat_template.jinja or tokenizer_config.json.

    Returns:
        The template; None if the directory has none, or if `jinja2` isn't installed.

    Raises:
        ValueError: The template or tokenizer_config.json is wrong.
    """
    directory, config = Path(path), {}
    if importlib.util.find_spec("jinja2") is None:
        return None
    with contextlib.suppress(FileNotFoundError):
        try:
            config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf8"))
        except ValueError as error:
            raise ValueError(f"tokenizer_config.json must be JSON, got {error}") from error
    values.require(isinstance(config, Mapping), "tokenizer_config.json", "an object", config)
    source = config.get("chat_template")
    with contextlib.suppress(FileNotFoundError):
        source = (directory / "chat_template.jinja").read_text(encoding="utf8")
    if isinstance(source, list):
        # Several templates with names.
        named = [one for one in source if isinstance(one, Mapping) and one.get("name") == "default"]
        source = named[0].get("template") if named else None
    if source is None:
        return None
    values.require(isinstance(source, str), "chat_template", "text", source)
    return ChatTemplate(source, _special_tokens(config))


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens that a template may name. A file has each as text, or as an object with its content."""
    found = {}
    for name in _SPECIAL_TOKENS:
        token = config.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found[name] = token
    return found
