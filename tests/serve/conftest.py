"""A server of two layers of the bundled model, which the tests of a module share. Other modules share its programs."""

import pytest
from fakes.engines import load_two_layers
from fakes.http import Served

from mamba_align_jax import Engine, EngineConfig
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.chat_template import load_chat_template
from mamba_align_jax.engine.text.tokenizer import load_tokenizer
from mamba_align_jax.serve.settings import Limits, Settings

SIZES = dict(max_num_seqs=4, max_num_batched_tokens=128, max_prefill_rows=2, max_model_len=512, max_waiting=128)
# Short, so that the tests of clients that are late are.
LIMITS = Limits(
    body_bytes=2**16, tool_bytes=2**14, head_bytes=2**13, connections=128, receive_s=4, send_s=4, call_s=600, drain_s=20
)
KEYS, ADMIN = ("sk-first", "sk-second"), "sk-admin"


@pytest.fixture(scope="module")
def engine(few_programs):
    engine = Engine(load_two_layers(BYTE_MODEL), EngineConfig(**SIZES), tokenizer=load_tokenizer(BYTE_MODEL))
    engine.generate([1, 2, 3])
    return engine


@pytest.fixture(scope="module")
def served(engine):
    """A server without keys."""
    settings = Settings(model_name="bytes", warmup="none", limits=LIMITS)
    with Served(engine, settings, load_chat_template(BYTE_MODEL)) as served:
        yield served


@pytest.fixture
def locked(engine):
    """A server with two keys. If a module has the other server too, one of them is idle: both step one engine."""
    settings = Settings(model_name="bytes", api_keys=KEYS, admin_keys=(ADMIN,), warmup="none", limits=LIMITS)
    with Served(engine, settings) as served:
        yield served
