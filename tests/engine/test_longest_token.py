"""No text of more characters than a limit of tokens can hold becomes so few tokens."""

import unicodedata

import depth
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mamba_align_jax.data import BYTE_MODEL
from mamba_align_jax.engine.text.tokenizer import load_tokenizer

tokenizers = pytest.importorskip("tokenizers")
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
BLANK = "\u2581"


def letters(**model):
    """Pairs of bytes, whose longest name has four letters."""
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)} | {"aa": 256, "aaaa": 257}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "a"), ("aa", "aa")], **model))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return made


def fallback(**options):
    """Characters, with bytes for those that are unknown."""
    vocabulary = BYTES | {BLANK: 256, "a": 257, "<unk>": 258}
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True, **options)
    )
    normalizers = tokenizers.normalizers
    made.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    return made


def changed(made, **parts):
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def known(made, tmp_path):
    """What is known of a tokenizer, and its way to encode."""
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    return loaded.longest_token, loaded.encode


TEXTS = st.one_of(st.text(max_size=60), st.integers(0, 60).map("a".__mul__), st.sampled_from([" " * 50, "\0" * 9]))
WHOLE = {
    "letters": (letters(), 4),
    "composed": (changed(letters(), normalizer=tokenizers.normalizers.NFC()), 16),
    "fallback": (fallback(), 6),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_texts_become_as_many_tokens_as_their_length_says(kind, tmp_path):
    made, longest = WHOLE[kind]
    found, encode = known(made, tmp_path)
    assert found == longest

    @settings(max_examples=depth.examples(100, 500), deadline=None)
    @given(st.one_of(TEXTS, TEXTS.map(lambda text: unicodedata.normalize("NFD", text))))
    def check(text):
        assert len(encode(text)) * longest >= len(text)

    check()


def test_the_bundled_tokenizer_has_one_token_for_each_byte():
    """Its special token stands for the byte 0."""
    assert load_tokenizer(BYTE_MODEL).longest_token == 1


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (changed(letters(), normalizer=tokenizers.normalizers.Strip()), " " * 99),
        (changed(letters(), normalizer=tokenizers.normalizers.Replace("a", "")), "a" * 99),
        (changed(letters(), pre_tokenizer=tokenizers.pre_tokenizers.WhitespaceSplit()), " " * 99),
        (tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "?": 1}, [], unk_token="?", fuse_unk=True)), "b" * 99),
        (tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")), "b" * 99),
    ],
    ids=["strip", "remove", "split", "unknown", "words"],
)
def test_where_a_token_may_stand_for_any_text_no_limit_is_known(made, text, tmp_path):
    longest, encode = known(made, tmp_path)
    assert longest is None
    assert len(encode(text)) <= 1


def test_a_special_token_that_takes_blanks_sets_no_limit(tmp_path):
    made = letters()
    made.add_special_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    longest, encode = known(made, tmp_path)
    assert longest is None
    assert len(encode(" " * 99 + "<mask>")) == 1
