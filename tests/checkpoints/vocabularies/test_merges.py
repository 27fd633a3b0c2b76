"""Merges that the C++ code derives from vocabularies, against a definition in Python."""

from __future__ import annotations

import random
import struct
import time

import numpy as np
import pytest

from pace import _C
from pace.checkpoints.vocabulary import CONTROL, MAX_PIECE, NORMAL, UNUSED, USER_DEFINED, merges_by_score


def definition(tokens, scores, types):
    """Every pair of pieces that forms a piece, sorted by the piece's score, best first, then by vocabulary order."""
    pieces = {
        token: score
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind in (NORMAL, USER_DEFINED) and len(token) <= MAX_PIECE
    }
    pairs = []
    for piece, score in pieces.items():
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs += [
            (-score, tokens.index(piece), left, right) for left, right in halves if {left, right} <= pieces.keys()
        ]
    return [(left, right) for *_, left, right in sorted(pairs)]


@pytest.mark.parametrize("letters", ["ab", "aé▁", "日🙂x", "\0\x01a"])
def test_merges_are_those_of_the_definition(letters):
    rng = random.Random(letters)
    for count in (0, 1, 7, 300):
        tokens = list({"".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(count)})
        scores = np.array([rng.choice([-1.0, -2.5, 0.0, rng.random()]) for _ in tokens], np.float32)
        types = np.array([rng.choice([NORMAL] * 5 + [USER_DEFINED, CONTROL, UNUSED]) for _ in tokens], np.int64)
        assert merges_by_score(tokens, scores, types) == definition(tokens, scores.tolist(), types.tolist())


def test_long_pieces_take_part_up_to_a_length():
    tokens = ["a", "a" * (MAX_PIECE - 1), "a" * MAX_PIECE, "a" * (MAX_PIECE + 1)]
    merges = merges_by_score(tokens, np.zeros(4, np.float32), np.full(4, NORMAL))
    assert merges == [("a", "a" * (MAX_PIECE - 1)), ("a" * (MAX_PIECE - 1), "a")]


@pytest.mark.alone("the time of two vocabularies is compared")
def test_merges_take_linear_time():
    """Four times the pieces take at most eight times as long; a quadratic search would take sixteen times."""

    def seconds(count):
        tokens = [f"{number:x}" for number in range(count)]
        began = time.process_time()
        merges_by_score(tokens, -np.arange(count, dtype=np.float32), np.full(count, NORMAL))
        return time.process_time() - began

    small, large = (min(seconds(count) for _ in range(3)) for count in (20_000, 80_000))
    assert large < 8 * max(small, 0.005), f"{small:.3f} s and {large:.3f} s"


def test_merges_of_what_is_no_vocabulary():
    with pytest.raises(ValueError, match="beyond the pieces"):
        _C.find_merges(["a"], np.array([1], np.uint32))
    with pytest.raises(ValueError, match="vector of uint32"):
        _C.find_merges(["a"], np.array([0], np.int64))
    with pytest.raises(TypeError):
        _C.find_merges([b"a"], np.array([0], np.uint32))
    with pytest.raises(UnicodeEncodeError):
        _C.find_merges(["\ud800"], np.array([0], np.uint32))


def packed(*texts):
    return b"".join(struct.pack("<Q", len(text.encode())) + text.encode() for text in texts)


def test_strings_of_a_header():
    texts = ["", "a", "日本\0🙂", "x" * 1000]
    data = b"??" + packed(*texts) + b"rest"
    assert _C.read_strings(data, 2, len(data), 4) == (texts, len(data) - 4)
    assert _C.read_strings(data, 2, len(data), 0) == ([], 2)
    for end in (2, 9, len(data) - 5):
        with pytest.raises(EOFError):
            _C.read_strings(data, 2, end, 4)
    for length in (2**63, 2**64 - 1, 5):
        with pytest.raises(EOFError):
            _C.read_strings(struct.pack("<Q", length) + b"abcd", 0, 12, 1)
    for position, end in ((-1, 4), (0, 13)):
        with pytest.raises(ValueError, match="no such bytes"):
            _C.read_strings(bytes(12), position, end, 1)
    with pytest.raises(UnicodeDecodeError):
        _C.read_strings(struct.pack("<Q", 1) + b"\xff", 0, 9, 1)
