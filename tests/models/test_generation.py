"""Every model family through the engine: chunked prompts, prefix hits, drafts and preempted requests."""

import dataclasses
import functools

import numpy as np
import pytest
from fakes import delta_net_weights, kimi_weights, weights
from fakes.draft_head_weights import write_with_head
from fakes.driver import ATOL, DATA
from fakes.foresight import Foresight, found_in
from oracles import models as oracles
from safetensors.numpy import load_file, save_file

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.device.runner import StepRunner
from mamba_align_jax.engine.scheduling.buckets import Bucket
from mamba_align_jax.engine.scheduling.levels import Level
from mamba_align_jax.models import load_model
from mamba_align_jax.models.causal_lm import ATTENTION

PROMPT, LENGTH = 37, 69
CONFIG = EngineConfig(
    block_size=16, kv_page_size=8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96, num_state_blocks=24,
    num_kv_pages=16, num_speculative_tokens=2, checked=True,
)  # fmt: skip


def published(name):
    """A model in tests/data, the tokens that transformers generated with it, and their logits."""

    def read(path):
        arrays = oracles.reference(DATA / name)
        return DATA / name, arrays["tokens"][0], arrays["logits"]

    return read


def with_head(name):
    """As `published`, with a draft head that has learnt some of those tokens."""

    def read(path):
        source, tokens, logits = published(name)(path)
        return write_with_head(source, path, tokens[PROMPT - 1 :].tolist()), tokens, logits

    return read


def faint(path, scale=0.2):
    """Scales the embeddings down: the next token then depends less on the last token and more on the states."""
    tensors = load_file(path / "model.safetensors")
    embeddings = {name: w * np.float32(scale) for name, w in tensors.items() if "embed" in name}
    save_file(tensors | embeddings, path / "model.safetensors")
    return path


def random(make, oracle, seed=7):
    """A tiny random model, the tokens that its oracle in float64 generates, and their logits."""

    def read(path):
        weights.write(path, make)
        return path, *generated(functools.partial(oracle, *oracles.read(faint(path))), seed)

    return read


def ling(path):
    config, kind = kimi_weights.LING, "bailing_hybrid"
    tensors = kimi_weights.write_random(path, config)
    name = "model.embed_tokens.weight"
    tensors[name] = load_file(faint(path) / "model.safetensors")["model.word_embeddings.weight"]
    decode = functools.partial(oracles.kimi, config | kimi_weights.ORACLE[kind], kimi_weights.KINDS[kind], tensors)
    return path, *generated(decode, 7)


def generated(decode, seed):
    tokens = oracles.greedy(decode, np.random.default_rng(seed).integers(0, weights.VOCAB, PROMPT), LENGTH)
    return tokens, decode(tokens)


MODELS = {
    **{name: published(name) for name in ("kimi_linear", "mamba", "mamba2", "nemotron_h", "olmo_hybrid")},
    **{name: published(name) for name in ("bamba", "lfm2", "lfm2_moe", "zamba2")},
    "qwen3_5_text": published("qwen3_5_text"),
    "qwen3_next": with_head("qwen3_next"),
    "qwen3_5_moe_text": random(delta_net_weights.qwen3_5_moe, oracles.qwen),
    "bailing_hybrid": ling,
    "falcon_mamba": random(weights.falcon_mamba, oracles.falcon_mamba),
    "jamba": random(weights.jamba, oracles.jamba),
    "granitemoehybrid": random(weights.granitemoehybrid, oracles.granitemoehybrid),
    "falcon_h1": random(weights.falcon_h1, oracles.falcon_h1),
    "published nemotron_h": random(weights.nemotron_h, oracles.nemotron_h),
}


# Other models whose pools are laid out anew, with the layout of their states.
LAID_OUT = {"kimi_linear": "KV", "mamba2": "VK", "lfm2": "VK"}


@pytest.mark.parametrize("name", MODELS)
def test_engine_generates_the_reference_tokens(name, tmp_path, monkeypatch):
    path, tokens, logits = MODELS[name](tmp_path)
    # Logits with an error of ATOL choose the same tokens.
    best = np.sort(logits[PROMPT - 1 : -1])[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 2 * ATOL
    assert (logits[PROMPT - 1 : -1].argmax(1) == tokens[PROMPT:]).all()
    check_engine(load_model(path), tokens, monkeypatch)


# A model for each kind of mixer that keeps states. Kimi delta attention shares its code with gated delta nets.
KINDS = ("qwen3_5_text", "mamba", "nemotron_h", "lfm2")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.deep] if n in KINDS[1:] else []) for n in KINDS])
def test_engine_generates_the_reference_tokens_from_boundaries_inside_chunks(name, tmp_path, monkeypatch):
    path, tokens, _ = MODELS[name](tmp_path)
    # Chunks of 24 tokens end inside blocks of 16, and pass a boundary.
    config = dataclasses.replace(CONFIG, prefix_cache="all", max_num_batched_tokens=24)
    check_engine(load_model(path), tokens, monkeypatch, config)


# The families whose layers are gated delta nets or Mamba-2: one of each in every run.
DEFERRED = ("qwen3_5_text", "mamba2", "olmo_hybrid", "qwen3_next", "qwen3_5_moe_text")
DEFERRED += ("nemotron_h", "published nemotron_h", "granitemoehybrid", "bamba", "falcon_h1", "zamba2")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.deep] if n in DEFERRED[2:] else []) for n in DEFERRED]
)
@pytest.mark.parametrize("mode", ["align", pytest.param("all", marks=pytest.mark.deep)])
def test_engine_generates_the_reference_tokens_from_deferred_states(name, mode, tmp_path, monkeypatch):
    path, tokens, _ = MODELS[name](tmp_path)
    config = dataclasses.replace(CONFIG, policy="deferred", fold_length=8, prefix_cache=mode)
    check_engine(load_model(path), tokens, monkeypatch, config)


@pytest.mark.parametrize("name", ["qwen3_5_text", *(pytest.param(n, marks=pytest.mark.deep) for n in LAID_OUT)])
def test_engine_generates_the_reference_tokens_from_pools_of_another_layout(name, tmp_path, monkeypatch):
    """Windows are [channels, window]. States of the delta rule are [key_dim, value_dim], and others have one layout."""
    path, tokens, _ = MODELS[name](tmp_path)
    model = load_model(path)
    config = dataclasses.replace(CONFIG, window_layout="DS", state_layout=LAID_OUT.get(name, "KV"))
    engine = check_engine(model, tokens, monkeypatch, config)
    plain = model.state_groups()
    for group, other in zip(engine.align.groups, plain, strict=True):
        for state, same in zip(group.states, other.states, strict=True):
            shape, moved = same.block_shape(2), state.layout in ("DS", "KV")
            assert state.block_shape(2) == ((*shape[:-2], shape[-1], shape[-2]) if moved else shape)
            assert moved == (state.layout != same.layout)
    for pool, group in zip(engine.runner.device_state.pool.states, engine.align.groups, strict=True):
        assert [array.shape[2:] for array in pool] == [state.block_shape(2) for state in group.states]
    # The caller's model is as it was, so that another engine may have it.
    assert {state.layout for group in plain for state in group.states} <= {"SD", "VK"}
    assert engine.align.groups != plain


def check_engine(model, tokens, monkeypatch, config=CONFIG):
    """Runs the sequence in chunks, from cached states of its answer and its prompt, with and without drafts, preempted.

    Returns the engine.
    """
    if model.mtp is None:
        # None, one or both of the drafts are right, depending on the number of tokens.
        plan = lambda tokens: (config.num_speculative_tokens, len(tokens) // 4 % 3)
        engine = Engine(model, config, drafter=Foresight(found_in([tokens.tolist()]), plan, model.config.vocab_size))
    else:
        engine = Engine(model, dataclasses.replace(config, speculation="mtp"))
    # One program runs every step. Where padded prefill chunks take long, steps without a prompt have a second program.
    mixed = max(engine.runner.buckets)._replace(prefill_rows=config.max_num_seqs, level=Level.MOST_LIKELY)
    programs = [mixed, Bucket(config.max_num_seqs, 0, 0, Level.MOST_LIKELY)]
    monkeypatch.setattr(StepRunner, "buckets", programs if "kda" in model.mixers() else programs[:1])

    def answer(lengths, salts=("",), **params):
        """Requests the tokens after each of `lengths`; returns how many tokens of each prompt were cached."""
        ids = [
            engine.add_request(
                tokens[:length],
                SamplingParams(max_tokens=LENGTH - length, cache_salt=salt, ignore_eos=True, **params),
            )
            for length, salt in zip(lengths, salts, strict=True)
        ]
        outputs = {}
        while engine.has_unfinished:
            outputs |= {output.request_id: output for output in engine.step()}
        assert [list(outputs[n].token_ids) for n in ids] == [tokens[length:].tolist() for length in lengths]
        return [outputs[n].num_cached_tokens for n in ids]

    # A model without attention has pages without bytes, whose hashes name the states.
    assert (engine.sizes.kv_page_bytes == 0) == (ATTENTION not in model.mixers())
    assert answer([PROMPT]) == [0]
    assert answer([65], num_speculative_tokens=0) == [64]
    assert engine.stats.preemptions == 0
    # The second request is preempted for the first, and resumes from the last state of its prompt.
    assert answer([PROMPT, 53], ["", "other"]) == [32, 0]
    stats = engine.stats
    assert stats.preemptions == 1
    assert 0 < stats.prefill_tokens + stats.cached_tokens - stats.prompt_tokens < 48
    assert stats.draft_tokens[0] > stats.accepted_tokens[0] > stats.accepted_tokens[1] > 0
    assert stats.null_reads == 0
    engine.cache.check()
    return engine
