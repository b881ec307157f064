"""Text of tokens as they come: no broken character is shown, nothing of a stop string, and the sum is the whole text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tokenizers")

import depth
from hypothesis import settings

from mamba_align_jax.data import BYTE_MODEL, decode, encode
from mamba_align_jax.engine.text.generated_text import GeneratedText
from mamba_align_jax.engine.text.tokenizer import load_tokenizer

BYTES = load_tokenizer(BYTE_MODEL)
# Bytes of characters of one to four bytes, whole and broken.
PIECES = st.sampled_from([*"ab ", "ö", "中", "😀", b"\xe4", b"\xb8", b"\xf0\x9f", b"\xff", b"\x98"])
TOKENS = st.lists(PIECES, max_size=40).map(
    lambda pieces: [byte for piece in pieces for byte in (piece.encode() if isinstance(piece, str) else piece)]
)


class Words:
    """Decodes as SentencePiece does: a word has the space before it, which the first word of a text loses."""

    WORDS = ("▁a", "▁b", "c", "")

    def decode(self, token_ids, **options):
        return "".join(self.WORDS[token] for token in token_ids).replace("▁", " ").removeprefix(" ")


def test_bundled_tokenizer_maps_each_byte_to_itself():
    text = "".join(map(chr, range(1, 0x3000))) + "😀  \r\n\t x"
    assert list(BYTES.encode(text)) == list(BYTES.encode(text, add_special_tokens=False)) == encode(text)
    assert BYTES.decode(encode(text)) == text
    assert all(BYTES.decode([byte]) == decode((byte,)) for byte in range(1, 256))
    # Byte 0 ends a text, and is not shown.
    assert (list(BYTES.encode("a\0")), BYTES.decode([97, 0])) == ([97, 0], "a")


def pieces_of(text, tokens):
    """The text that each token adds to what is shown, and the text at the end."""
    shown, pieces = "", []
    for token in tokens:
        text = text.read([token])
        assert text.shown.startswith(shown)
        pieces.append(text.shown[len(shown) :])
        shown = text.shown
    return pieces, text.ended()


@given(st.text("ab", max_size=20), st.lists(st.text("abc", min_size=1, max_size=8), min_size=1, max_size=3))
def test_what_may_become_a_stop_string_is_not_shown(text, stops):
    """It is the longest end of the text that one of them begins with, but none of them is whole yet."""
    ends = [n for stop in stops for n in range(1, min(len(stop) - 1, len(text)) + 1) if text.endswith(stop[:n])]
    found = GeneratedText(BYTES, stop=tuple(stops), text=text)
    assert found.shown == text[: len(text) - max(ends, default=0)]


@settings(max_examples=depth.examples(100, 3000), deadline=None)
@given(tokens=TOKENS)
def test_pieces_put_together_are_the_whole_text(tokens):
    pieces, end = pieces_of(GeneratedText(BYTES), tokens)
    assert end.text == BYTES.decode(tokens)
    assert end.text.startswith("".join(pieces))
    assert end.num_tokens == len(tokens)
    # The tokens alone decide, not the steps that they come in.
    half = len(tokens) // 2
    assert GeneratedText(BYTES).read(tokens[:half]).read(tokens[half:]).ended() == end
    assert end.fresh() == GeneratedText(BYTES)
    whole = end.of_all(tuple(tokens))
    assert (whole.num_tokens, whole.text) == (end.num_tokens, end.text)


@pytest.mark.parametrize("text", ["a中😀b", "öö", "ab"])
def test_character_is_shown_when_it_is_whole(text):
    pieces, _ = pieces_of(GeneratedText(BYTES), encode(text))
    assert [piece for piece in pieces if piece] == list(text)
    assert not any("\ufffd" in piece for piece in pieces)


def test_character_after_broken_bytes_is_whole():
    for number in range(60):
        for broken in ([0xFF], [0xE4, 0xB8, 0xFF]):
            pieces, end = pieces_of(GeneratedText(BYTES), broken * number + encode("中"))
            assert pieces[-1].endswith("中")
            assert end.text == BYTES.decode(broken * number) + "中"
    # What is not shown yet stays short, so that each token costs the same.
    assert len(GeneratedText(BYTES).read([0xFF] * 1000).unsettled) < 20


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 3), max_size=20), silent=st.sampled_from([0, 0, 15, 16, 40]))
def test_spaces_between_words_are_kept(tokens, silent):
    tokens = [*tokens, *[3] * silent, *tokens]
    _, end = pieces_of(GeneratedText(Words()), tokens)
    assert end.text == Words().decode(tokens)
    assert len(end.unsettled) < 20


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 3), min_size=1, max_size=40), tokens=st.lists(st.integers(0, 3), max_size=15))
def test_text_follows_that_of_the_prompt(prompt, tokens):
    """The space before the first generated word is part of the text, as in vLLM, unless nothing is before it."""
    start = GeneratedText.after(tuple(prompt), Words())
    pieces, end = pieces_of(start, tokens)
    before, whole = Words().decode(prompt), Words().decode([*prompt, *tokens])
    if before and set(prompt[-24:]) != {3}:
        assert end.text == "".join(pieces) == whole.removeprefix(before)
    assert end.fresh() == start
    assert end.of_all(tuple(tokens)).text == end.text


@pytest.mark.parametrize(
    ("prompt", "text"), [("a中", "中"), ("中" * 30, "中"), (b"a\xe4", "\ufffd"), (b"\xff" * 30, "中")]
)
def test_character_in_which_a_prompt_ends_is_no_part_of_the_text(prompt, text):
    prompt = prompt.encode() if isinstance(prompt, str) else prompt
    tokens = "中".encode()[prompt.endswith(b"\xe4") :]
    _, end = pieces_of(GeneratedText.after(tuple(prompt), BYTES), tokens)
    assert end.text.rstrip("\ufffd") == text.rstrip("\ufffd")
    assert end.of_all(tuple(tokens)).text == end.text


def test_prompt_that_can_not_be_decoded_leaves_the_text_as_it_is():
    class Some(Words):
        def decode(self, token_ids, **options):
            if 3 in token_ids:
                raise LookupError("no such word")
            return super().decode(token_ids)

    assert GeneratedText.after((0, 3), Some()).read([1, 0]).text == "b a"


def test_stop_token_has_no_text():
    text = GeneratedText(BYTES, ("ab",)).read(encode("xa")).read_stop_token().ended()
    assert (text.num_tokens, text.text, text.found) == (3, "xa", None)


@settings(max_examples=depth.examples(100, 3000), deadline=None)
@given(tokens=TOKENS, stop=st.lists(st.sampled_from(["ab", "aab", "b", "a b", "ö中", "😀a", "\ufffda"]), max_size=3))
def test_text_ends_before_the_first_stop_string(tokens, stop):
    stop = tuple(stop)
    text, found = GeneratedText(BYTES, stop), None
    for token in tokens:
        text = text.read([token])
        whole = BYTES.decode(tokens[: text.num_tokens]).rstrip("\ufffd")
        matches = [(whole.find(one) + len(one), place, one) for place, one in enumerate(stop) if one in whole]
        if matches:
            end, _, found = min(matches)
            begin = end - len(found)
            assert (text.text, text.shown, text.found) == (whole[:begin], whole[:begin], found)
            assert text.read([97, 98]).text == text.ended().text == whole[:begin], "nothing comes after it"
            break
        assert text.found is None
        # Exactly what may become part of a stop string is held back.
        held = [n for one in stop for n in range(1, len(one)) if text.text.endswith(one[:n])]
        assert len(text.text) - len(text.shown) == max(held, default=0)
    if found is None:
        assert text.ended().text.rstrip("\ufffd") == BYTES.decode(tokens).rstrip("\ufffd")


@pytest.mark.parametrize(
    ("stop", "text"),
    [(("abc", "b"), "xa"), (("b", "abc"), "xa"), (("abc", "bc"), "x"), (("bc", "abc"), "xa"), (("d", "c"), "xab")],
)
@pytest.mark.parametrize("words", [["xabcd"], ["x", "a", "b", "c", "d"], ["xa", "bcd"]], ids=len)
def test_stop_string_does_not_depend_on_which_characters_come_with_one_token(words, stop, text):
    """As in vLLM, the one that is complete first counts, and of several the first in the list."""

    class Some(Words):
        WORDS = words

    end = GeneratedText(Some(), stop).read(range(len(words))).ended()
    assert (end.text, end.found in stop) == (text, True)


def test_text_that_might_have_become_a_stop_string_comes_at_the_end():
    text = GeneratedText(BYTES, ("STOP",)).read(encode("aST"))
    assert (text.shown, text.ended().text) == ("a", "aST")
    text = text.read(encode("x"))
    assert text.shown == "aSTx"


def test_stop_string_within_the_first_tokens_ends_nothing():
    text = GeneratedText(BYTES, ("ab",), min_tokens=4)
    assert text.read(encode("xxab")).found is None
    assert text.read(encode("xxabx")).ended().text == "xxabx"
    # The first that is complete after them does, though it begins within them.
    assert text.read(encode("abxabx"))[3:5] == (6, "abx")


@pytest.mark.parametrize("stop", [(), ("\0b",)])
def test_special_tokens_have_a_text_if_they_are_not_skipped(stop):
    """Byte 0 is the special token of the bundled tokenizer."""
    tokens, prompt = [97, 0, *"é".encode(), 0, 98], (97, 0)
    pieces, end = pieces_of(GeneratedText.after(prompt, BYTES, stop, skip_special_tokens=False), tokens)
    assert end.text == ("a\0é" if stop else "a\0é\0b")
    assert "".join(pieces) == end.text
    assert end.fresh() == GeneratedText.after(prompt, BYTES, stop, skip_special_tokens=False)
    _, end = pieces_of(GeneratedText.after(prompt, BYTES, stop), tokens)
    assert end.text == "aéb"
