"""The short form of `make soak-serve`: 32 clients for ten seconds or a little longer, against a server in a thread."""

import asyncio
import random

from fakes.engines import load_two_layers
from fakes.http import Served
from serve import load
from serve.conftest import LIMITS

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.serve.settings import Settings


def test_streams_are_right_beside_rude_clients_and_nothing_leaks(engine, caplog):
    random.seed(1)
    prompts, seen = load.make_prompts(random.Random(1), 12), load.Seen()
    enough = lambda: seen.finished >= 8 and len(seen.rude) >= 5
    settings = Settings(model_name=load.MODEL, api_keys=(load.KEY,), warmup="none", limits=LIMITS)
    with Served(engine, settings) as served:
        asyncio.run(load.run_clients(served.port, prompts, seen, streams=32, seconds=10, enough=enough))
        assert load.leaked(served.port) == 0
        served.wait_until_idle()
    assert not seen.faults, sorted(set(seen.faults))
    assert not [record for record in caplog.records if record.exc_info], "a client made the server log an error"
    assert enough(), seen
    assert load.judge(seen.answers, load_two_layers(BYTE_MODEL))[0] == 0


def test_a_wrong_token_and_a_fault_are_noticed():
    prompt = tuple(b"def read(self")
    assert load.judge({(prompt, (0, 0, 0))}, load_two_layers(BYTE_MODEL))[0] == 1
    seen = load.Seen()
    seen.expect(False, "a fault")
    assert seen.faults == ["a fault"]
