"""Why a call is refused, in the form of OpenAI's errors."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

# A status says whose fault it was; clients of OpenAI's API read the type.
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# `json.dumps` would make one for each event.
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Refusal(Exception):
    """A call gets no answer but this one.

    Attributes:
        status: The HTTP status.
        message: What was wrong, for a person.
        param: The field that was wrong; None if it was none.
        code: What was wrong, for a program; None if the status says it.
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def content(self) -> dict[str, Any]:
        """The JSON of the response's body."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Returns the response."""
        return json_response(self.content, self.status, self.headers)


def overloaded(message: str) -> Refusal:
    """Returns the refusal of a call that may succeed a little later."""
    return Refusal(503, message, code="overloaded", headers={"retry-after": "1"})


def internal_error() -> Refusal:
    """Returns the refusal of a call at which the server itself failed. What was raised is in its log."""
    # uvicorn closes the connection. A client that isn't told would send its next call there.
    headers = {"connection": "close"}
    return Refusal(500, "the server failed while it answered this call", code="internal_error", headers=headers)


def to_json(content: Any) -> bytes:
    """Returns a value as JSON, in ASCII, so that any text can be sent, even half of a surrogate pair."""
    return _ENCODER.encode(content).encode("ascii")


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a JSON body."""
    return Response(to_json(content), status, headers, "application/json")
