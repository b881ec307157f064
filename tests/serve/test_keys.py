"""Keys: who has none is refused, and what one client caches is not there for another."""

import pytest
from serve.conftest import ADMIN, KEYS

import mamba_align_jax
from mamba_align_jax.serve.keys import cache_salt

PROMPT = "def read(self, name):\n    " * 8


def ask(locked, key, salt=None, prompt=PROMPT):
    fields = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
    return locked.post("/v1/completions", fields, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/version"]
)
def test_an_unknown_key_is_refused(locked, path):
    headers = [
        {}, {"authorization": KEYS[0]}, {"authorization": "Bearer"}, {"authorization": "Bearer sk-wrong"},
        {"authorization": f"Bearer {KEYS[0]}x"}, {"authorization": f"Basic {KEYS[0]}"},
        {"authorization": "Bearer ä".encode("latin-1")}, {"authorization": "Bearer " + "x" * 5000}, {"api-key": KEYS[0]},
    ]  # fmt: skip
    method = "GET" if path in ("/v1/models", "/version") else "POST"
    replies = [locked.client.request(method, path, headers=one) for one in headers]
    assert {reply.status_code for reply in replies} == {401}
    assert {reply.json()["error"]["code"] for reply in replies} == {"invalid_api_key"}
    assert {reply.headers["www-authenticate"] for reply in replies} == {"Bearer"}
    # All look alike, and none waits for its body.
    assert len({reply.content for reply in replies}) == 1
    assert locked.client.get(path, headers={"authorization": f"bearer  {KEYS[0]}"}).status_code in (200, 405)


def test_administrators_alone_reset_the_cache(locked):
    cached = lambda: ask(locked, KEYS[0], "reset").json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    reset = lambda key: locked.post("/reset_prefix_cache", {}, headers={"authorization": f"Bearer {key}"})
    assert [cached(), cached() > 0] == [0, True]
    assert reset(KEYS[0]).status_code == 401
    assert cached() > 0
    assert reset(ADMIN).json() == {"object": "prefix_cache", "reset": True}
    assert cached() == 0
    # An administrator's key is no client's.
    assert ask(locked, ADMIN).status_code == 401


def test_without_administrators_there_is_no_address_of_theirs(served):
    assert served.post("/reset_prefix_cache", {}).status_code == 404
    assert served.client.get("/version").json() == {"version": mamba_align_jax.__version__}


def test_health_and_metrics_need_no_key(locked):
    for path in ("/health", "/ready", "/metrics"):
        assert locked.client.get(path).status_code == 200


def test_clients_with_other_keys_or_salts_share_no_prefix(locked):
    cached = lambda *who: ask(locked, *who).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    first, second = KEYS
    for who in ((first,), (second,), (first, "a"), (second, "a"), (first, "b")):
        assert cached(*who) == 0, who
        assert cached(*who) >= 128, who
    # A client that knows another's salt, as the engine has it, does not get there either.
    assert cached(second, cache_salt(first.encode(), "")) == 0


def test_misses_tell_nothing_of_other_clients(locked):
    """With what another client has cached, a new prompt misses for the reason for which it misses without."""
    first, second = KEYS
    reasons = []
    for text in ("x = 1\n" * 30, "y = 2\n" * 30):
        ask(locked, first, prompt=text)
        reasons.append(ask(locked, second, prompt=text).json()["usage"]["cache_miss"])
    reasons.append(ask(locked, second, prompt="z = 3\n" * 30).json()["usage"]["cache_miss"])
    assert set(reasons) == {"not identical"}


def test_salts_of_different_keys_differ():
    salts = {cache_salt(key, salt) for key in (b"a", b"b") for salt in ("", "a", "b", "ab")}
    assert len(salts) == 8
    assert cache_salt(None, "a") == "a"
