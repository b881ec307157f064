"""Text prompts generate the same tokens as their ids, and raise without a tokenizer."""

import dataclasses
import json
import re
import shutil
import sys
import threading
import time

import pytest
from fakes.driver import DATA

from mamba_align_jax import Engine, EngineConfig, SamplingParams
from mamba_align_jax.cli.commands import main
from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.generated_text import GeneratedText
from mamba_align_jax.engine.text.tokenizer import load_tokenizer, token_ids

tokenizers = pytest.importorskip("tokenizers")
CHECKPOINT = DATA / "qwen3_5_text"
SIZES = dict(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=128, num_state_blocks=8, num_kv_pages=16)
TEXT, PARAMS = "Höher, a bit\nhigher", SamplingParams(max_tokens=6, ignore_eos=True)


def by_hand(text):
    """Encodes like the tokenizer below: a start token, then b ^ 1 for each byte b other than 6."""
    return [7, *(byte ^ 1 for byte in text.encode())]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The tiny model with a tokenizer that does not map each byte to itself."""
    path = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(CHECKPOINT / name, path)
    # As GPT-2 has it: printable bytes stand for themselves, the others for characters from 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    vocabulary = {chr(byte if byte in printable else next(others)): byte ^ 1 for byte in range(256)}
    vocabulary = {symbol: token for symbol, token in vocabulary.items() if token != 7}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary | {"<s>": 7}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 7)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_tokenizer_is_loaded_from_a_directory(directory):
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(TEXT)
    assert list(ids) == by_hand(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.decode(tuple(ids[:3])) == "H\ufffd"


def test_prompts_are_neither_cut_nor_filled_up_as_in_training(directory, tmp_path):
    """A tokenizer.json may hold both. transformers leaves them out unless it is asked for them."""
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(load_tokenizer(tmp_path).encode(TEXT)) == by_hand(TEXT)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ("ab", [by_hand("ab")]),
        (["ab", "c"], [by_hand("ab"), by_hand("c")]),
        (["ab", [1, 2]], [by_hand("ab"), [1, 2]]),
        ([[1, 2], "ab"], [[1, 2], by_hand("ab")]),
        ([1, 2], [[1, 2]]),
        ([[1], [2]], [[1], [2]]),
        (range(2), [[0, 1]]),
    ],
)
def test_prompts_may_be_text_or_token_ids(directory, prompts, ids):
    assert [list(prompt) for prompt in token_ids(load_tokenizer(directory), prompts)] == ids
    if "ab" in prompts:
        with pytest.raises(ValueError, match=r"must be token ids without a tokenizer .*, got 'ab'"):
            token_ids(None, prompts)
    else:
        assert [list(prompt) for prompt in token_ids(None, prompts)] == ids


def test_without_a_tokenizer_outputs_have_no_text(directory, monkeypatch):
    assert load_tokenizer(CHECKPOINT) is None
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # not installed
    assert load_tokenizer(directory) is None


@pytest.mark.parametrize("content", ["", "{", json.dumps({"model": {"type": "Nothing"}})])
def test_wrong_tokenizer_file_raises(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(
        ValueError, match=re.escape(f"tokenizer.json must be a file of Hugging Face tokenizers, got {tmp_path}")
    ):
        load_tokenizer(tmp_path)


@pytest.fixture(scope="module")
def engine(directory, fewest_programs):
    return Engine.from_pretrained(directory, EngineConfig(**SIZES))


def test_engine_takes_and_returns_text(directory, engine, monkeypatch):
    by_text, by_ids = engine.generate([TEXT, by_hand(TEXT)], PARAMS)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == tuple(by_hand(TEXT))
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.text == by_ids.text == load_tokenizer(directory).decode(by_text.token_ids)
    for owner in (engine, engine.core):
        monkeypatch.setattr(owner, "tokenizer", None)
    (output,) = engine.generate(by_hand(TEXT), PARAMS)
    assert (output.token_ids, output.text) == (by_ids.token_ids, None)
    with pytest.raises(ValueError, match="must be token ids"):
        engine.generate([[1, 2], "ab"], PARAMS)
    assert not engine.has_unfinished


def test_text_is_what_the_tokens_add_to_the_prompt():
    """Tokenizers as those of Llama and Mistral take the space from the first word of a text. vLLM decodes as here."""
    words = {"▁a": 0, "▁b": 1, "c": 2, "<s>": 3, **{f"<0x{byte:02X}>": 4 + byte for byte in range(256)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
    tokenizer.add_special_tokens(["<s>"])
    parts = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    tokenizer.decoder = tokenizers.decoders.Sequence([*parts, tokenizers.decoders.Strip(" ", 1, 0)])
    broken = [4 + byte for byte in "中".encode()]
    for prompt in ([3, 0], [3, 0, 1, 2, 3], [3], [0, *broken], [0, *broken * 3], [0, 3, 3, 3, 3, 3]):
        for tokens in ([1], [1, 0, 2], [2, 1], [*broken, 0], [3, 1]):
            stream = tokenizers.decoders.DecodeStream(ids=prompt, skip_special_tokens=True)
            wanted = "".join(stream.step(tokenizer, token) or "" for token in tokens)
            start = GeneratedText.after(tuple(prompt), tokenizer)
            assert start.read(tokens).ended().text == start.of_all(tuple(tokens)).text == wanted, (prompt, tokens)


def test_command_line_uses_the_tokenizer(engine, monkeypatch, capsys):
    (output,) = engine.generate(TEXT, SamplingParams(max_tokens=3))
    monkeypatch.setattr(Engine, "from_pretrained", lambda *arguments, **options: engine)
    assert main(["generate", "--prompt", TEXT, "--max-tokens", "3"]) == 0
    assert capsys.readouterr().out == f"{TEXT}{output.text}\n"
    for owner in (engine, engine.core):
        monkeypatch.setattr(owner, "tokenizer", None)
        monkeypatch.setattr(owner, "model_config", dataclasses.replace(engine.model_config, vocab_size=300))
    assert main(["generate", "--prompt", TEXT]) == 2
    assert "must be token ids without a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["encode", "decode"])
def test_other_threads_go_on_while_a_long_text_is_encoded_or_decoded(method):
    """A server answers all others meanwhile."""
    own, text = load_tokenizer(BYTE_MODEL), "def read(self): " * 40_000
    alone = tokenizers.Tokenizer.from_file(str(BYTE_MODEL / "tokenizer.json"))
    given, wanted = text, alone.encode(text).ids
    if method == "decode":
        given, wanted = wanted, list(alone.decode(wanted))

    def ticks():
        """The number of times that another thread runs during a call."""
        ended, moments = threading.Event(), []

        def tick():
            while not ended.wait(0.001):
                moments.append(time.perf_counter())

        ticking = threading.Thread(target=tick)
        ticking.start()
        begin = time.perf_counter()
        found = getattr(own, method)(given)
        end = time.perf_counter()
        ended.set()
        ticking.join()
        assert list(found) == wanted
        return sum(begin < moment < end for moment in moments)

    # Two could come while a call begins and ends. There are hundreds if no thread waits, unless the machine is busy.
    assert any(ticks() > 10 for _ in range(20))
