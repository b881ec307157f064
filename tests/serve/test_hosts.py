"""A server of this machine answers only those who call it by its own names, and leads nobody to another."""

import pytest
from fakes.http import Served
from fakes.raw_http import connect, head, read_to_end, status_and_code
from serve.conftest import LIMITS

from mamba_align_jax.serve.limits.connections import PROBES
from mamba_align_jax.serve.limits.hosts import Hosts
from mamba_align_jax.serve.refusals import Refusal
from mamba_align_jax.serve.settings import Settings

OWN = ["localhost", "localhost:8000", "LocalHost.", "127.0.0.1:8000", "127.0.0.2", "[::1]:8000", "[::1]"]
OTHERS = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost@evil.example",
    "10.0.0.1",
    "",
    "[",
    "::1",
]


def allows(hosts, name, value):
    """Whether a call with a header is let in."""
    try:
        hosts.check([(b"accept", b"*/*"), (name, value.encode())])
    except Refusal:
        return False
    return True


@pytest.mark.parametrize("listening", ["127.0.0.1", "localhost", "::1", "127.0.0.9"])
def test_a_server_of_this_machine_is_called_by_its_own_names(listening):
    hosts = Hosts(listening, [])
    assert all(allows(hosts, b"host", host) and allows(hosts, b"origin", f"http://{host}") for host in OWN)
    assert not any(allows(hosts, b"host", host) or allows(hosts, b"origin", f"https://{host}") for host in OTHERS)
    assert not allows(hosts, b"origin", "null")
    assert allows(Hosts(listening, ["Evil.example"]), b"host", "evil.example:8000")


def test_a_public_server_checks_only_if_it_knows_its_names():
    assert all(allows(Hosts("0.0.0.0", []), b"host", host) for host in OTHERS)
    hosts = Hosts("10.0.0.1", ["api.example.org"])
    assert all(allows(hosts, b"host", host) for host in ("api.example.org", "10.0.0.1:80", "localhost"))
    assert not allows(hosts, b"host", "evil.example")


@pytest.mark.parametrize("name", ["host", "origin"])
def test_calls_for_another_host_are_refused_but_for_those_that_ask_how_the_process_is(served, name):
    wrong = {name: "evil.example" if name == "host" else "http://evil.example"}
    for path in ("/", "/v1/models", "/nowhere"):
        reply = served.client.get(path, headers=wrong)
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "host_not_allowed")
    with connect(served) as connection:
        # A client that sends its body in spite of the refusal can read it.
        body = b"x" * 2**16
        connection.sendall(
            head(len(body)).replace(
                b"host: localhost", b"\r\n".join(b"%s: %s" % (k.encode(), v.encode()) for k, v in wrong.items())
            )
        )
        connection.sendall(body[:10])
        connection.sendall(body[10:])
        assert status_and_code(read_to_end(connection)) == (403, "host_not_allowed")
    for path in PROBES:
        assert served.client.get(path, headers=wrong).status_code == 200


def test_allowed_hosts_are_the_operators_choice(engine):
    with Served(engine, Settings(warmup="none", limits=LIMITS, allowed_hosts=("api.example.org",))) as served:
        for host, status in (("api.example.org", 200), ("localhost", 200), ("example.org", 403)):
            assert served.client.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/models/", "/health/"])
def test_a_trailing_slash_leads_nowhere(served, path):
    reply = served.client.get(path, headers={"host": "localhost"})
    assert reply.status_code == 404
    assert "location" not in reply.headers
