"""Checks clients' keys, and keeps the cached prefixes of clients with different keys apart."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from mamba_align_jax.serve.refusals import Refusal


class Keys:
    """The keys that clients may have. Without any, no client needs one."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = tuple(key.encode() for key in keys)
        self._digests = tuple(hashlib.sha256(key).digest() for key in self._keys)

    def check(self, headers: Mapping[str, str]) -> bytes | None:
        """Returns the key with which a call came; None if no client needs one. It is refused without a key that is known.

        The time that this takes depends neither on the keys nor on which of them matches.
        """
        if not self._keys:
            return None
        digest = hashlib.sha256(_key_in(headers)).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            message = "the header authorization must be 'Bearer' and a key that this server knows, or x-api-key the key"
            raise Refusal(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return self._keys[matches.index(True)]

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Returns a name for who calls with a key, which tells nothing of the key; "" if no client needs one.

        The key may be wrong: see `check`.
        """
        return hashlib.sha256(_key_in(headers)).hexdigest() if self._keys else ""


def _key_in(headers: Mapping[str, str]) -> bytes:
    """Returns the key, which clients of Anthropic's API send in a header of its own; empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return key.strip().encode("latin-1", "replace")


def cache_salt(key: bytes | None, salt: str) -> str:
    """Returns the salt of a client's requests: calls share prefixes if they have the same key and the same salt."""
    return salt if key is None else hmac.new(key, b"cache_salt:" + salt.encode(), hashlib.sha256).hexdigest()
