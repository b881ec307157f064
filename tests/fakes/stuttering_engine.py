"""An engine that runs the speller under every way of stepping, and the greedy tokens of adjusted logits."""

import numpy as np
from fakes.speller import VOCAB, Speller, next_token
from oracles.sampling import adjusted

from mamba_align_jax import SamplingParams

STUTTER, END = 2, 7
SIZES = dict(block_size=8, kv_page_size=4, max_num_seqs=3, max_num_batched_tokens=20, max_model_len=64)
SIZES |= dict(num_state_blocks=40, num_kv_pages=60, prompt_lookup_min=1)
# Logits of the speller are whole numbers, so that sums and products with these are exact.
OPTIONS = {
    "neutral": dict(),
    "repetition": dict(repetition_penalty=1.5),
    "presence": dict(presence_penalty=1.25),
    "frequency": dict(frequency_penalty=0.75),
    "reward": dict(presence_penalty=-1.5, frequency_penalty=-0.25),
    "bias": dict(logit_bias={3: 4.5, 11: -100, 12: 100, 60: 2.5}),
    "min_tokens": dict(min_tokens=9, stop_token_ids=(3, 5, 11, 20, 33, 48), ignore_eos=False),
    "all": dict(
        repetition_penalty=1.25, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={9: 3.5}, min_tokens=4,
        stop_token_ids=(30, 31, 32),
    ),
}  # fmt: skip
DRAWN = {
    "drawn": dict(temperature=40.0, seed=3),
    "min_p": dict(temperature=40.0, min_p=0.3, seed=4),
    "drawn_all": dict(OPTIONS["all"], temperature=30.0, min_p=0.1, top_k=20, top_p=0.95, seed=5),
}
STEPPING = {
    "plain": dict(),
    "tight": dict(num_state_blocks=12, num_kv_pages=18, checked=True),
    "uncached": dict(prefix_cache="none", num_state_blocks=6),
    "drafts": dict(num_speculative_tokens=3, num_state_blocks=16, num_kv_pages=20),
    "async": dict(async_stepping=True),
    "async_drafts": dict(async_stepping=True, num_speculative_tokens=3, num_state_blocks=20, num_kv_pages=20),
}


def params_of(name, **fields):
    return SamplingParams(**(dict(max_tokens=18, ignore_eos=True) | (OPTIONS | DRAWN)[name] | fields))


def speller():
    model = Speller(STUTTER)
    model.config = model.config._replace(eos_token_id=END)
    return model


MODEL = speller()


def expected(prompt, params):
    """The greedy tokens after a prompt, one by one."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        logits = -((np.arange(VOCAB) - next_token(tokens, STUTTER)) ** 2.0)
        generated = tokens[len(prompt) :]
        tokens.append(int(np.argmax(adjusted(logits, params, prompt, generated, [END]))))
        if tokens[-1] in params.stop_token_ids or (tokens[-1] == END and not params.ignore_eos):
            break
    return tokens[len(prompt) :]


def asked(rng):
    """Prompts with a shared beginning, and each prompt twice so that the second one may hit."""
    shared = rng.integers(0, VOCAB, 19).tolist()
    prompts = [shared + rng.integers(0, VOCAB, n).tolist() for n in (1, 5, 9)]
    return [*prompts, rng.integers(0, VOCAB, 26).tolist(), *prompts]


def serve(engine, requests, before_step=lambda number: None):
    """Runs pairs of a prompt and parameters, and returns their outputs in order."""
    ids, outputs = [engine.add_request(*request) for request in requests], {}
    for number in range(900):
        if not engine.has_unfinished:
            break
        before_step(number)
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except KeyboardInterrupt:
            continue
    assert outputs.keys() == set(ids)
    assert engine.cache.states.pool.num_held == engine.cache.kv.pool.num_held == 0
    return [outputs[number] for number in ids]
