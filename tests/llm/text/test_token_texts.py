"""The part of a text that each token adds, on random texts and cuts."""

from __future__ import annotations

import random

import pytest

from pace.assets import TINY
from pace.llm.text.reader import TextReader
from pace.llm.text.token_bytes import TokenBytes
from pace.llm.text.token_texts import TokenTexts
from pace.tokenizer.loading import load_tokenizer

TEXTS = ["Hello, world!", "naïve café – 東京 👩‍👩‍👧 end", "a\n\n  b\tc", "x" * 40, "👍👍👍", "É"]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TINY)


def follow(tokenizer, tokens, stop_strings, generator):
    """Returns the text and the tokens that a reader gets who reads after random numbers of tokens."""
    pieces, texts = TextReader(tokenizer, stop_strings), TokenTexts(tokenizer)
    shown, given, unread = "", [], 0
    for token in tokens:
        released = pieces.push(token)
        texts.push(token, None, pieces.piece)
        shown, unread = shown + released, unread + len(released)
        if generator.random() < 0.4:
            given += texts.take(unread, False)
            assert "".join(piece.text for piece in given) == shown[: sum(len(piece.text) for piece in given)]
            unread = 0
    released = pieces.flush()
    texts.close(pieces.piece)
    given += texts.take(unread + len(released), True)
    return shown + released, given


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_joined_are_the_text_and_their_bytes(tokenizer, text):
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for seed in range(20):
        shown, given = follow(tokenizer, tokens, None, random.Random(seed))
        assert shown == text == "".join(piece.text for piece in given)
        assert b"".join(piece.data for piece in given) == text.encode()
        assert [piece.token for piece in given] == list(tokens)


@pytest.mark.parametrize("stop", ["world", "lo, w", "!", "nothing"])
def test_tokens_of_a_stop_string_are_cut_with_it(tokenizer, stop):
    text = TEXTS[0]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    for seed in range(20):
        shown, given = follow(tokenizer, tokens, [stop], random.Random(seed))
        assert shown == text.partition(stop)[0] == "".join(piece.text for piece in given)


def test_half_a_character_at_the_end(tokenizer):
    tokens = tokenizer("👍", add_special_tokens=False)["input_ids"][:-1]
    if not tokens:
        pytest.skip("this tokenizer has the character as one token")
    shown, given = follow(tokenizer, tokens, None, random.Random(0))
    assert set(shown) <= {"\ufffd"} and "".join(piece.text for piece in given) == shown
    assert b"".join(piece.data for piece in given) == "👍".encode()[: sum(len(piece.data) for piece in given)]


def test_bytes_of_all_tokens(tokenizer):
    table = TokenBytes.of(tokenizer)
    assert table is TokenBytes.of(tokenizer)
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" not in text:
            assert table[token] == text.encode(), token
    assert table[10**6] == b""


def test_sentencepiece_names(monkeypatch):
    class Names:
        eos_token_id = 2

        def convert_ids_to_tokens(self, token):
            return ["▁Hello", "<0xE2>", "</s>"][token]

    table = TokenBytes(Names())
    assert [table[0], table[1], table[2]] == [b" Hello", b"\xe2", b"</s>"]


def test_without_a_tokenizer_there_is_no_text():
    pieces, texts = TextReader(None, ["5"]), TokenTexts(None)
    assert pieces.push(5) == pieces.text_of([5, 6]) == ""
    texts.push(5, None, pieces.piece)
    assert pieces.flush() == pieces.shown == ""
    texts.close(pieces.piece)
    assert [piece.token for piece in texts.take(0, True)] == [5]
