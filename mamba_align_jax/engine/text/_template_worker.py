"""Renders one chat template, in a process of its own: see `chat_template.py`. Imports nothing of this package.

The first line of the input is the template, and each further one the variables of a prompt, as JSON. Each is answered by a
line. A line that takes longer than the first argument says, in seconds of CPU time, ends the process.
"""

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_MAX_BYTES = 1 << 30
_MAX_CHARACTERS = 1 << 24


class _Generation(Extension):
    """The block `generation`, which marks the model's answers for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Returns the statements in the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


_FUNCTIONS = MappingProxyType({"raise_exception": _raise_exception, "strftime_now": _strftime_now})


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the environment that transformers gives to chat templates."""
    extensions = [loopcontrols, _Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    return environment


def _texts(parts: Any) -> list[str]:
    return [part.get("text", "") for part in parts if isinstance(part, dict)]


def _with_texts(template: jinja2.Template, task: dict[str, Any]) -> dict[str, Any]:
    """Joins the parts of each message's content by line breaks, unless the template reads parts itself."""
    messages = task["messages"]
    in_parts = [isinstance(one, dict) and isinstance(one.get("content"), list) for one in messages]
    if not any(in_parts) or _reads_parts(template, task):
        return task
    joined = [
        one | {"content": "\n".join(_texts(one["content"]))} if is_in_parts else one
        for one, is_in_parts in zip(messages, in_parts, strict=True)
    ]
    return task | {"messages": joined}


def _reads_parts(template: jinja2.Template, task: dict[str, Any]) -> bool:
    # Others fail, or write parts as Python does.
    message = {"role": "user", "content": [{"type": "text", "text": "_text_of_a_part_"}]}
    try:
        text = template.render(task | {"messages": [message]})
    except Exception:
        return False
    return "_text_of_a_part_" in text and "'type'" not in text and '"type"' not in text


def _answer(make: Callable[[], str], time_limit: float) -> None:
    # What the alarm does is to end the process. A busy machine does not bring it forward: it counts CPU time.
    signal.setitimer(signal.ITIMER_PROF, time_limit)
    try:
        text = make()
        answer = {"text": text} if len(text) <= _MAX_CHARACTERS else {"error": f"a prompt of {len(text)} characters"}
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(answer), flush=True)


def _main(time_limit: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
    template = jinja2.Template("")

    def compile_template() -> str:
        nonlocal template
        template = _environment().from_string(json.loads(source), globals=dict(_FUNCTIONS))
        return ""

    source = sys.stdin.readline()
    _answer(compile_template, time_limit)
    for line in sys.stdin:
        _answer(lambda line=line: template.render(_with_texts(template, json.loads(line))), time_limit)


if __name__ == "__main__":
    _main(float(sys.argv[1]))
