"""One call delays no other, a refused one costs little, and a slow reader gets all of its answer."""

import socket
import threading
import time

import pytest
from fakes.http import Served

from mamba_align_jax.engine.config import SamplingParams
from mamba_align_jax.engine.running.admission import NUM_SEEDS, seeded, with_seed
from mamba_align_jax.serve.settings import Limits, Settings

PATIENCE_S = 300


class Held:
    """A tokenizer whose `decode` of many tokens waits until the test lets it go on."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.entered, self.released = threading.Semaphore(0), threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, tokens, **options):
        if len(tokens) > 100:
            self.entered.release()
            self.released.acquire(timeout=2 * PATIENCE_S)
        return self._tokenizer.decode(tokens, **options)


@pytest.mark.parametrize(
    ("path", "fields", "num_texts"),
    [
        ("/detokenize", {"tokens": [65] * 200}, 1),
        ("/v1/completions", {"prompt": [[65] * 200] * 2, "n": 4, "echo": True, "max_tokens": 0}, 2),
    ],
)
def test_tokens_become_text_while_other_calls_go_on(served, monkeypatch, path, fields, num_texts):
    """Each prompt is decoded once, and not for each choice."""
    tokenizer, replies = Held(served.engine.tokenizer), []
    monkeypatch.setattr(served.engine, "tokenizer", tokenizer)
    asking = threading.Thread(target=lambda: replies.append(served.post(path, fields)))
    asking.start()
    try:
        with served.new_client() as client:
            for _ in range(num_texts):
                assert tokenizer.entered.acquire(timeout=PATIENCE_S)
                assert client.get("/health", timeout=PATIENCE_S).status_code == 200
                assert not replies
                tokenizer.released.release()
    finally:
        tokenizer.released.release(100)
        asking.join()
    assert [reply.status_code for reply in replies] == [200]
    assert not tokenizer.entered.acquire(blocking=False)


def test_long_texts_are_read_one_at_a_time_and_short_ones_beside_them(served, monkeypatch):
    """Each takes a thread of those that all calls share, of which there are few more than processors."""
    engine, active, most = served.engine, [], []

    class Watched:
        longest_token = None  # Otherwise the length alone would tell that these texts do not fit.

        def __getattr__(self, name):
            return getattr(tokenizer, name)

        def encode(self, text, **options):
            if len(text) > 100:
                active.append(text)
                most.append(len(active))
                time.sleep(0.1)
                active.pop()
            return tokenizer.encode(text, **options)

    tokenizer = engine.tokenizer
    monkeypatch.setattr("mamba_align_jax.serve.api.service._LONG_TEXT", 100)
    monkeypatch.setattr(engine, "tokenizer", Watched())

    def ask():
        with served.new_client() as client:
            assert client.post("/v1/completions", json={"prompt": "x" * 2000}).status_code == 400

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    assert served.post("/tokenize", {"prompt": "x"}).json()["count"] == 1
    for thread in threads:
        thread.join()
    assert (len(most), max(most)) == (12, 1)


def test_a_call_of_too_many_choices_is_refused_before_anything_is_made_of_it(served, monkeypatch):
    def fail(*args, **options):
        raise AssertionError

    monkeypatch.setattr(served.service, "choices_of", fail)
    monkeypatch.setattr(served.service, "encode", fail)
    reply = served.post("/v1/completions", {"prompt": ["x"] * 128, "n": 2})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")


def test_another_seed_is_the_only_difference():
    params = SamplingParams(logit_bias={3: 1}, seed=NUM_SEEDS - 1, top_k=4)
    first, second = seeded(params, 2)
    assert (first, second) == (params, SamplingParams(logit_bias={3: 1}, seed=0, top_k=4))
    assert with_seed(params, 2**40 + 5).seed == 5
    assert params.seed == NUM_SEEDS - 1


def test_equal_prompts_of_one_call_without_a_seed_get_answers_of_their_own(served):
    reply = served.complete(["def f("] * 4, max_tokens=16, temperature=1.5)
    assert len({choice["text"] for choice in reply["choices"]}) > 1
    reply = served.complete(["def f("] * 2, max_tokens=16, temperature=1.5, seed=3)
    assert len({choice["text"] for choice in reply["choices"]}) == 1


@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_reads_a_long_answer_slowly_gets_all_of_it(engine, reads):
    limits = Limits(send_s=4.0, connections=4)
    # A token of two bytes in the call is one of six in the answer.
    body = b'{"tokens":[' + b"1," * 1_999_999 + b"1]}"
    head = (
        b"POST /detokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    with Served(engine, Settings(warmup="none", limits=limits)) as served, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
        client.settimeout(300)
        client.connect(("127.0.0.1", served.port))
        client.sendall(head % len(body) + body)
        got = client.recv(2**16)
        begin, _, rest = got.partition(b"\r\n\r\n")
        size, got = int(begin.lower().split(b"content-length: ")[1].split(b"\r\n")[0]), len(rest)
        if not reads:
            time.sleep(8)
        try:
            while got < size and (part := client.recv(2**18)):
                got += len(part)
                if reads:
                    time.sleep(0.1)
        except ConnectionError:
            pass
        assert size > 10_000_000
        assert (got == size) == reads


@pytest.mark.parametrize("grammar_s", [0, 1e10])
def test_a_grammar_always_has_a_limit_that_the_system_has_timers_for(grammar_s):
    with pytest.raises(ValueError, match="grammar_s must be a number of seconds"):
        Limits(grammar_s=grammar_s)


def test_a_token_has_one_name_among_the_biases(served):
    reply = served.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logit_bias": {"65": 100, "065": -100}})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias")
