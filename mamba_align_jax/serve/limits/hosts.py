"""Refuses calls that a browser makes for a page of somebody else, as DNS rebinding lets it."""

import contextlib
import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from mamba_align_jax.serve.refusals import Refusal


class Hosts:
    """The hosts that a call may name in the headers `host` and `origin`.

    A server of this machine alone is called by the machine's own names. A page whose name an attacker maps to this machine
    would otherwise be the server's own page for the browser.
    """

    def __init__(self, listening: str, allowed: Sequence[str]) -> None:
        """Takes where the server listens, and which other hosts are allowed. Without any, a public server checks nothing."""
        self._allowed = frozenset(one.lower().strip("[]") for one in (listening, *allowed))
        self._checks = _is_own(listening) or bool(allowed)

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Raises a Refusal if a call's headers name a host that is not allowed."""
        if not self._checks:
            return
        for name, value in headers:
            if name in (b"host", b"origin"):
                text = value.decode("latin-1").strip()
                host = _host_of(text if name == b"origin" else f"//{text}")
                if host is None or not (host in self._allowed or _is_own(host)):
                    known = "a host that this server allows: see --allowed-host"
                    message = f"the header {name.decode()} must name {known}, got {text[:80]!r}"
                    raise Refusal(403, message, code="host_not_allowed")


def _host_of(address: str) -> str | None:
    """Returns the host of a URL; None if it has none."""
    with contextlib.suppress(ValueError):
        return (urlsplit(address).hostname or "").rstrip(".") or None
    return None


def _is_own(host: str) -> bool:
    """Whether a host is this machine, whoever asks."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host.lower() == "localhost"
