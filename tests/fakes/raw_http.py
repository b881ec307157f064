"""Calls as bytes on a connection, for what no client library would send."""

import json
import re
import socket

LONG = {"prompt": "def read(self):", "max_tokens": 400, "ignore_eos": True, "temperature": 0}


def connect(served):
    return socket.create_connection(("127.0.0.1", served.port), timeout=300)


def head(length):
    kind = "content-type: application/json"
    lines = ("POST /v1/completions HTTP/1.1", "host: localhost", kind, f"content-length: {length}", "", "")
    return "\r\n".join(lines).encode()


def call(content):
    body = json.dumps(content).encode()
    return head(len(body)) + body


def read_to_end(connection):
    parts = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


def read_answer(connection):
    """Reads one answer, which may come in parts, and leaves the connection open."""
    data = b""
    while not (end := data.find(b"\r\n\r\n")) + 1:
        data += _more(connection)
    length = int(re.search(rb"content-length: (\d+)", data).group(1))
    while len(data) < end + 4 + length:
        data += _more(connection)
    return data


def _more(connection):
    part = connection.recv(2**16)
    assert part, "the connection was closed before the answer was complete"
    return part


def status_and_code(data):
    first, _, rest = data.partition(b"\r\n")
    return int(first.split()[1]), json.loads(rest.partition(b"\r\n\r\n")[2])["error"]["code"]


def refused(served, status, code):
    """How many calls were refused for a reason."""
    served.client.get("/nowhere")  # a metric without any count is not shown
    return served.metric("mamba_align:refused_calls_total", status=str(status), code=code)
