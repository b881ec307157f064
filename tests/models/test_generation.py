"""Every family through the engine: greedy tokens of chunked prompts, prefix hits, drafts and preempted requests."""

import dataclasses
import functools

import numpy as np
import pytest
from fakes import delta_net_weights, kimi_weights, weights
from fakes.draft_head_weights import write_with_head
from models.driver import ATOL, DATA
from oracles import models as oracles
from safetensors.numpy import load_file, save_file

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.engine.packing import Bucket
from mamba_align_jax.engine.runner import StepRunner
from mamba_align_jax.models import load_model
from mamba_align_jax.models.causal_lm import ATTENTION

PROMPT, LENGTH = 37, 69
CONFIG = EngineConfig(
    block_size=16, kv_page_size=8, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=96, num_state_blocks=24,
    num_kv_pages=16, num_speculative_tokens=2, checked=True,
)  # fmt: skip


def published(name):
    """A checkpoint of transformers, with the tokens that it generated and their logits."""

    def read(path):
        arrays = oracles.reference(DATA / name)
        return DATA / name, arrays["tokens"][0], arrays["logits"]

    return read


def with_head(name):
    """The same with a draft head, which has learnt some of those tokens."""

    def read(path):
        source, tokens, logits = published(name)(path)
        return write_with_head(source, path, tokens[PROMPT - 1 :].tolist()), tokens, logits

    return read


def faint(path, scale=0.2):
    """With smaller embeddings what comes next follows less from the last token than from those before, which states hold."""
    tensors = load_file(path / "model.safetensors")
    embeddings = {name: w * np.float32(scale) for name, w in tensors.items() if "embed" in name}
    save_file(tensors | embeddings, path / "model.safetensors")
    return path


def random(make, oracle, seed=7):
    """A tiny checkpoint, and what the recurrence in float64 generates."""

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


class Foresight:
    """Drafts of the sequence that will come, of which none, one or both are right, by turns."""

    def __init__(self, tokens, vocab_size):
        self.tokens, self.vocab_size = tokens.tolist(), vocab_size

    def draft(self, request, tokens, most):
        begin = len(tokens)
        right = begin + begin // 4 % 3
        return [
            token if place < right else (token + 1) % self.vocab_size
            for place, token in enumerate(self.tokens[begin : begin + most], begin)
        ]

    def forget(self, request):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_a_token(name, tmp_path, monkeypatch):
    path, tokens, logits = MODELS[name](tmp_path)
    # Whatever rounds these logits within ATOL makes the same choices.
    best = np.sort(logits[PROMPT - 1 : -1])[:, -2:]
    assert (best[:, 1] - best[:, 0]).min() > 2 * ATOL
    assert (logits[PROMPT - 1 : -1].argmax(1) == tokens[PROMPT:]).all()
    check_engine(load_model(path), tokens, monkeypatch)


def check_engine(model, tokens, monkeypatch):
    """A prompt in chunks; resumed from its answer's last state and from its own; with and without drafts; preempted."""
    if model.mtp is None:
        engine = Engine(model, CONFIG, drafter=Foresight(tokens, model.config.vocab_size))
    else:
        engine = Engine(model, dataclasses.replace(CONFIG, speculation="mtp"))
    # One program can run every step. Only where a chunk of padding takes long, steps without a prompt have their own.
    mixed = max(engine.runner.buckets)._replace(prefill_rows=CONFIG.max_num_seqs, draws=False)
    programs = [mixed, Bucket(CONFIG.max_num_seqs, 0, 0, draws=False)]
    monkeypatch.setattr(StepRunner, "buckets", programs if "kda" in model.mixers() else programs[:1])

    def answer(lengths, salts=("",), **params):
        """Asks for the rest behind so many tokens each; returns how many of them were cached."""
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

    # Without attention, pages of no bytes name the states.
    assert (engine.sizes.kv_page_bytes == 0) == (ATTENTION not in model.mixers())
    assert answer([PROMPT]) == [0]
    assert answer([65], num_speculative_tokens=0) == [64]
    assert engine.stats.preemptions == 0
    # The second one has to give way to the first, and goes on from its prompt's last state.
    assert answer([PROMPT, 53], ["", "other"]) == [32, 0]
    stats = engine.stats
    assert stats.preemptions == 1
    assert 0 < stats.prefill_tokens + stats.cached_tokens - stats.prompt_tokens < 48
    assert stats.draft_tokens[0] > stats.accepted_tokens[0] > stats.accepted_tokens[1] > 0
    assert stats.null_reads == 0
    engine.cache.check()
