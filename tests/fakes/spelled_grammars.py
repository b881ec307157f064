"""Grammars over the speller's tokens as text, and what the stuttering model generates under them."""

import itertools
import string

import numpy as np
import pytest
from fakes.speller import VOCAB, next_token
from fakes.stuttering_engine import END, STUTTER
from oracles.sampling import adjusted

from mamba_align_jax import Grammar, SamplingParams
from mamba_align_jax.engine.text.tokenizer import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
# The speller's tokens as text. Some have several characters, and the last ones are in no text.
TEXTS = [*string.ascii_lowercase, *string.digits, *'{}[]":,.- ', "ab", "ba", "aab", "true", '":', "}}"]
TEXTS[END] = "</s>"
TEXTS += [f"<{number}>" for number in range(VOCAB - len(TEXTS))]
# All strings of a language whose regular expression is the key's.
LANGUAGES = {
    "[ab]{3,9}": ["".join(letters) for n in range(3, 10) for letters in itertools.product("ab", repeat=n)],
    "(ab|c){1,5}d?": [
        "".join(parts) + end
        for n in range(1, 6)
        for parts in itertools.product(("ab", "c"), repeat=n)
        for end in ("", "d")
    ],
}


def spelled_tokenizer(path):
    """A tokenizer.json of the speller's tokens, in a folder."""
    vocabulary = {text.replace(" ", "Ġ"): number for number, text in enumerate(TEXTS)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([TEXTS[END], *TEXTS[-3:]])
    made.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


def params_of(pattern, **fields):
    return SamplingParams(**dict(max_tokens=24, grammar=Grammar("regex", pattern)) | fields)


def allowed(text, language, ends=(END,)):
    """The tokens that may follow `text`."""
    tokens = [n for n, each in enumerate(TEXTS) if any(whole.startswith(text + each) for whole in language)]
    return sorted([*tokens, *(ends if text in language else ())])


def expected(prompt, params):
    """The greedy tokens after a prompt, one by one."""
    tokens, language = list(prompt), LANGUAGES[params.grammar.text]
    while len(tokens) < len(prompt) + params.max_tokens and tokens[len(prompt) :][-1:] != [END]:
        generated = tokens[len(prompt) :]
        logits = -((np.arange(VOCAB) - next_token(tokens, STUTTER)) ** 2.0)
        logits = adjusted(logits, params, prompt, generated)
        may = allowed("".join(TEXTS[token] for token in generated), language)
        tokens.append(max(may, key=lambda token: (logits[token], -token)))
    return tokens[len(prompt) :]
