"""Tokens of texts and pairs, against transformers' tokenizers."""

from __future__ import annotations

import pytest

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.instructions import AFTER, BEFORE, INSTRUCTION, PairPrompt
from pace.llm.encoding.texts import TextEncoder, fit_lengths
from pace.tokenizer.tokenizer import Tokenizer
from tests.llm.encoding.checkpoints import END, byte_level, word_pieces

TEXTS = ["", "a", "the second text", "One, two? 3.", "x" * 40]


def oracle(backend, **names):
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    return made


def own(backend, **settings):
    settings = {"model_input_names": ["input_ids", "token_type_ids"], **settings}
    return Tokenizer(backend, settings)


def test_texts_and_pairs_are_cut_as_transformers_cuts_them():
    pytest.importorskip("transformers")
    pairs = [(first, second) for first in TEXTS for second in reversed(TEXTS)]
    for make in (word_pieces, lambda: byte_level(ends=True)):
        theirs = oracle(make())
        for length in (5, 6, 8, 13, 64):
            encoder = TextEncoder(own(make()), length, has_types=True)
            for texts, found in [
                (TEXTS, encoder.texts(TEXTS, truncate=True)),
                (pairs, encoder.pairs(pairs, truncate=True)),
            ]:
                for text, tokens in zip(texts, found, strict=True):
                    # As a list, in which a second text that is empty counts as a text.
                    wanted = theirs([text], truncation="longest_first", max_length=length)
                    assert list(tokens.tokens) == wanted["input_ids"][0], (text, length)
                    types = list(tokens.types or [0] * len(tokens))
                    assert types == wanted["token_type_ids"][0], (text, length)


def test_too_long_is_an_error_that_says_which():
    encoder = TextEncoder(own(word_pieces()), 8)
    with pytest.raises(
        ValueError, match="text 4 has 42 tokens, more than the 8 of this model; shorten it, or pass trunc"
    ):
        encoder.texts(["a", "b", "c", "d", "x" * 40], truncate=False)
    with pytest.raises(ValueError, match="text 1 has 9 tokens"):
        encoder.pairs([("a", "b"), ("abc", "def")], truncate=False)
    with pytest.raises(ValueError, match="text 0 is not valid text"):
        encoder.texts(["\ud800"], truncate=True)
    with pytest.raises(ValueError, match="has no room"):
        TextEncoder(own(word_pieces()), 2).texts(["abc"], truncate=True)


def test_sides_types_and_lower_case():
    left = own(word_pieces())
    left.truncation_side = "left"
    assert TextEncoder(left, 4).texts(["abcd"], True) == [TextTokens((2, *tokens_of("##c", "##d"), 3))]
    without = Tokenizer(word_pieces(), {"model_input_names": ["input_ids"]})
    assert TextEncoder(without, 9, has_types=True).pairs([("a", "b")], False)[0].types is None
    assert TextEncoder(own(word_pieces()), 9).pairs([("a", "b")], False)[0].types is None
    lower = TextEncoder(own(byte_level()), 9, lower_case=True)
    plain = TextEncoder(own(byte_level()), 9)
    assert lower.texts(["YES"], False) == plain.texts(["yes"], False) != plain.texts(["YES"], False)
    assert lower.pairs([("YES", "NO")], False) == plain.pairs([("yes", "no")], False)
    assert lower.texts([END], False) == plain.texts([END], False)
    pieces = own(word_pieces())
    found = TextEncoder(pieces, 9, lower_case=True).texts(["A[SEP]B"], False)
    assert found == [TextTokens((2, *tokens_of("a", "[SEP]", "b"), 3))], "special tokens stay"
    assert pieces.backend_tokenizer.normalizer.__class__.__name__ == "BertNormalizer", "the model's own is as it was"


def test_special_tokens_in_texts_are_words_if_the_checkpoint_says_so():
    pytest.importorskip("transformers")
    for make in (oracle, own):
        splits = make(word_pieces(), split_special_tokens=True)
        assert TextEncoder(splits, 9).texts(["[SEP]"], False)[0].tokens != (2, 3, 3)
        assert TextEncoder(make(word_pieces()), 9).texts(["[SEP]"], False)[0].tokens == (2, 3, 3)


def test_a_file_that_pads_and_truncates_does_not_do_so_here():
    pytest.importorskip("transformers")
    backend = word_pieces()
    backend.enable_padding(length=16)
    backend.enable_truncation(5)
    encoder = TextEncoder(oracle(backend), 32)
    assert [len(text) for text in encoder.texts(["a", "abcdefgh"], False)] == [3, 10]


def test_lengths_are_cut_longest_first():
    assert fit_lengths([9], 4) == [4] and fit_lengths([3], 4) == [3]
    for lengths, room, expected in [
        ([2, 9], 8, [2, 6]),
        ([9, 2], 8, [6, 2]),
        ([9, 9], 7, [3, 4]),
        ([5, 9], 7, [3, 4]),
        ([9, 5], 7, [4, 3]),
        ([20, 30], 7, [3, 4]),
    ]:
        assert fit_lengths(lengths, room) == expected


def test_prompts_of_pairs():
    tokenizer = own(byte_level())
    ids = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    prompt = PairPrompt(tokenizer, 600)
    (found,) = prompt.pairs([("why?", "so")], None, False)
    body = f"<Instruct>: {INSTRUCTION}\n<Query>: why?\n<Document>: so"
    assert list(found.tokens) == ids(BEFORE) + ids(body) + ids(AFTER)
    assert tokenizer.decode(found.tokens) == BEFORE + body + AFTER
    (other,) = prompt.pairs([("why?", "so")], "Find jokes", False)
    assert "<Instruct>: Find jokes\n" in tokenizer.decode(other.tokens)


def test_the_longer_text_of_a_prompt_is_cut_first():
    tokenizer = own(byte_level())
    whole = len(PairPrompt(tokenizer, 600).pairs([("", "")], None, False)[0])
    prompt = PairPrompt(tokenizer, whole + 10)
    with pytest.raises(ValueError, match="text 0 has .* tokens"):
        prompt.pairs([("abc", "d" * 50)], None, False)
    for query, document, cut in [
        ("abc", "d" * 50, ("abc", "d" * 7)),
        ("a" * 50, "def", ("a" * 7, "def")),
        ("a" * 50, "d" * 50, ("a" * 5, "d" * 5)),
    ]:
        (found,) = prompt.pairs([(query, document)], None, True)
        assert f"<Query>: {cut[0]}\n<Document>: {cut[1]}<|im_end|>" in tokenizer.decode(found.tokens)
        assert len(found) == whole + 10
    with pytest.raises(ValueError, match="no room for a pair"):
        PairPrompt(tokenizer, whole).pairs([("abc", "def")], None, True)


def tokens_of(*names: str) -> list[int]:
    return [word_pieces().token_to_id(name) for name in names]
