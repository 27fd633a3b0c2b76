"""Compares the index of n-grams with a simple reference."""

from __future__ import annotations

import random

import pytest

from pace.llm.sequence import Sequence
from pace.llm.speculation.prompt_lookup import NgramIndex, PromptLookup


def by_definition(tokens: list[int], min_ngram: int, max_ngram: int, num_tokens: int) -> tuple[int | None, list[int]]:
    """Returns the length of the longest match of the last tokens, and the tokens that follow its last occurrence. The
    continuation repeats when it reaches the end of the text."""
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                while len(text) < end + num_tokens:
                    text.append(text[len(text) - (len(tokens) - end)])
                return size, text[end : end + num_tokens]
    return None, []


@pytest.mark.parametrize("min_ngram, max_ngram", [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("vocab_size", [2, 5, 30])
def test_the_index_finds_what_the_definition_finds(min_ngram: int, max_ngram: int, vocab_size: int) -> None:
    chance = random.Random(vocab_size)
    for _ in range(20):
        tokens = [chance.randrange(vocab_size) for _ in range(chance.randint(1, 30))]
        index = NgramIndex(tokens, min_ngram, max_ngram)
        for _ in range(40):
            size = index.find()
            expected = by_definition(tokens, min_ngram, max_ngram, 9)
            assert (size, [] if size is None else index.following(9)) == expected
            tokens += [chance.randrange(vocab_size) for _ in range(chance.choice([0, 1, 1, 1, 4]))]


def test_a_text_that_repeats_itself_goes_on() -> None:
    index = NgramIndex([7, 1, 2, 3, 1, 2, 3, 1, 2], 1, 4)
    assert index.find() == 4 and index.following(8) == [3, 1, 2, 3, 1, 2, 3, 1]


def test_each_sequence_has_its_own() -> None:
    source = PromptLookup(1, 3)
    first, second = (
        Sequence(tokens, strategy=None, stopping=None, max_length=99) for tokens in ([1, 2, 3, 1], [1, 9, 1])
    )
    assert (source.kind(first, 4), source.kind(second, 4)) == (1, 1)
    assert source.propose([first, second], [2, 3]) == [[2, 3], [9, 1, 9]]
    third = Sequence([1, 2, 3], strategy=None, stopping=None, max_length=99)
    assert source.kind(third, 4) is None
