"""Reads a call's body: JSON of bounded size, whose fields are taken one by one and checked."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

from starlette.requests import ClientDisconnect, Request

from mamba_align_jax import _values as values
from mamba_align_jax.serve.api.field_table import ApiField
from mamba_align_jax.serve.api.json_slices import SLICE_BYTES, TooManyValues, decode
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits

T = TypeVar("T")
P = ParamSpec("P")
# Runs a function in a thread, and returns what it returns.
Run = Callable[..., Awaitable[Any]]


class Fields:
    """The fields of a JSON object. Each is taken once, and none may be left at the end. A null counts as absent."""

    def __init__(self, path: str, content: Any, run: Run | None = None) -> None:
        """Takes the JSON value of the field `path`, empty for a body. It is refused if it is no object.

        `run` runs a function in a thread, where the fields of a long body are checked: see `aside`.
        """
        if not isinstance(content, Mapping):
            raise Refusal(400, f"{path or 'the body'} must be a JSON object", param=path or None)
        self._content, self._path, self._run = content, path, run
        self._taken: set[str] = set()

    def take(self, name: str, check: Callable[..., T], *limits: Any) -> T | None:
        """Returns a field's value as `check(name, value, *limits)` returns it; None if the field is absent.

        Raises:
            Refusal: The check raised a ValueError.
        """
        value = self._value(name)
        if value is None:
            return None
        try:
            return check(self._name(name), value, *limits)
        except ValueError as error:
            raise Refusal(400, str(error), param=self._name(name)) from error

    def need(self, name: str, check: Callable[..., T], *limits: Any) -> T:
        """Returns a field's value as `take` does. If the field is absent, the call is refused."""
        value = self.take(name, check, *limits)
        if value is None:
            raise Refusal(400, f"{self._name(name)} is missing", param=self._name(name))
        return value

    async def aside(self, take: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Returns what a function that takes fields returns, as `await fields.aside(fields.need, "prompt", check)`.

        If the body is long, it runs in a thread, so that other calls go on meanwhile. It is for fields that may be long.
        """
        if self._run is None:
            return take(*args, **kwargs)
        return await self._run(take, *args, **kwargs)

    def refuse(self, name: str, neutral: tuple[Any, ...], reason: str) -> None:
        """Takes a field that is not supported, and refuses the call unless the value is one that asks for nothing."""
        value = self._value(name)
        if value is not None and value not in neutral:
            raise Refusal(400, f"{self._name(name)} {reason}", param=self._name(name), code="unsupported_field")

    def end(self, known: Mapping[str, ApiField] = MappingProxyType({})) -> None:
        """Refuses the call if a field was not taken, unless it is one of the `known` ones and asks for nothing."""
        for name, value in self._content.items():
            if value is None or name in self._taken:
                continue
            field = known.get(name)
            if field is None or field.use == "used":
                unknown = self._name(name)[:80]
                raise Refusal(400, f"{unknown} is not known", param=unknown, code="unknown_field")
            if not field.takes(value):
                message = f"{name} is not taken here: {field.instead}"
                raise Refusal(400, message, param=name, code="unsupported_field")

    def _value(self, name: str) -> Any:
        """Takes a field as it came, once."""
        if name in self._taken:
            return None
        self._taken.add(name)
        return self._content.get(name)

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def as_it_came(name: str, value: T) -> T:
    """Returns a field's value, which is checked elsewhere or changes nothing."""
    return value


def json_object(name: str, value: Any) -> dict[str, Any]:
    """Checks a field whose value is a JSON object."""
    values.require(isinstance(value, dict), name, "a JSON object", type(value))
    return value


def tool_list(name: str, value: Any, limits: Limits, take: Callable[[str, Any], T]) -> list[T]:
    """Returns what `take` makes of each tool of a list of at most `limits.tools` tools."""
    values.require(isinstance(value, list) and len(value) <= limits.tools, name, f"at most {limits.tools} tools", value)
    return [take(f"{name}[{number}]", one) for number, one in enumerate(value)]


async def read_fields(request: Request, limits: Limits, run: Run) -> Fields:
    """Reads a call's body, or refuses it if it is too large, too slow, not UTF-8, no JSON object, or not said to be JSON.

    A long one is decoded where `run` runs functions: in a thread, where other calls don't wait for it.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Otherwise a page of any site could call a server on the reader's own machine.
        raise Refusal(415, "the header content-type must be application/json")
    try:
        async with asyncio.timeout(limits.receive_s):
            body = await _read_body(request, limits.body_bytes)
    except TimeoutError:
        message = f"the body must arrive within {limits.receive_s:g} s"
        raise Refusal(408, message, code="body_timeout", headers={"connection": "close"}) from None
    try:
        if len(body) <= SLICE_BYTES:
            return Fields("", decode(body, limits.body_values))
        return Fields("", await run(decode, body, limits.body_values), run)
    except TooManyValues as error:
        raise Refusal(413, f"the body {error}", code="body_too_large") from error
    except RecursionError as error:
        raise Refusal(400, "the body must be JSON that is not nested so deeply") from error
    except ValueError as error:
        raise Refusal(400, f"the body must be JSON in UTF-8, without lone surrogates: {error}") from error


async def _read_body(request: Request, limit: int) -> bytes:
    message = f"the body must have at most {limit} bytes"
    too_large = Refusal(413, message, code="body_too_large", headers={"connection": "close"})
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or (length.isdecimal() and int(length) > limit):
        raise too_large
    body = bytearray()
    try:
        async for part in request.stream():
            body += part
            if len(body) > limit:
                raise too_large
    except ClientDisconnect as error:
        raise Refusal(400, "the client left before its body was read", code="client_left") from error
    return bytes(body)
