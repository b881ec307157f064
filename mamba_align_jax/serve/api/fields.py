"""Reads a call's body: JSON of bounded size, whose fields are taken one by one and checked."""

import asyncio
import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from starlette.requests import ClientDisconnect, Request

from mamba_align_jax.serve.api.field_table import ApiField
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Limits

T = TypeVar("T")


class Fields:
    """The fields of a JSON object. Each is taken once, and none may be left at the end. A null counts as absent."""

    def __init__(self, path: str, content: Any) -> None:
        """Takes the JSON value of the field `path`, empty for a body. It is refused if it is no object."""
        if not isinstance(content, Mapping):
            raise Refusal(400, f"{path or 'the body'} must be a JSON object", param=path or None)
        self._left = {name: value for name, value in content.items() if value is not None}
        self._path = path

    def take(self, name: str, check: Callable[..., T], *limits: Any) -> T | None:
        """Returns a field's value as `check(name, value, *limits)` returns it; None if the field is absent.

        Raises:
            Refusal: The check raised a ValueError.
        """
        if name not in self._left:
            return None
        try:
            return check(self._name(name), self._left.pop(name), *limits)
        except ValueError as error:
            raise Refusal(400, str(error), param=self._name(name)) from error

    def need(self, name: str, check: Callable[..., T], *limits: Any) -> T:
        """Returns a field's value as `take` does. If the field is absent, the call is refused."""
        value = self.take(name, check, *limits)
        if value is None:
            raise Refusal(400, f"{self._name(name)} is missing", param=self._name(name))
        return value

    def refuse(self, name: str, neutral: tuple[Any, ...], reason: str) -> None:
        """Takes a field that is not supported, and refuses the call unless the value is one that asks for nothing."""
        value = self._left.pop(name, None)
        if value is not None and value not in neutral:
            raise Refusal(400, f"{self._name(name)} {reason}", param=self._name(name), code="unsupported_field")

    def end(self, known: Mapping[str, ApiField] = MappingProxyType({})) -> None:
        """Refuses the call if a field was not taken, unless it is one of the `known` ones and asks for nothing."""
        for name, value in self._left.items():
            field = known.get(name)
            if field is None or field.use == "used":
                unknown = self._name(name)[:80]
                raise Refusal(400, f"{unknown} is not known", param=unknown, code="unknown_field")
            if not field.takes(value):
                message = f"{name} is not taken here: {field.instead}"
                raise Refusal(400, message, param=name, code="unsupported_field")

    def _name(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


async def read_fields(request: Request, limits: Limits) -> Fields:
    """Reads a call's body, or refuses it if it is too large, too slow, not UTF-8, no JSON object, or not said to be JSON."""
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
        return Fields("", json.loads(body.decode(), parse_constant=_no_constant))
    except UnicodeDecodeError as error:
        raise Refusal(400, f"the body must be UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise Refusal(400, "the body must be JSON that is not nested so deeply") from error
    except ValueError as error:
        raise Refusal(400, f"the body must be JSON: {error}") from error


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
