"""tokenizer.model files: sentencepiece's against the tokens of its library, and tiktoken's against its rule written
out."""

from __future__ import annotations

import base64
import json
import random
import re
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")

from pace.checkpoints.sentencepiece import read_sentencepiece  # noqa: E402
from pace.checkpoints.tiktoken import read_tiktoken  # noqa: E402
from pace.checkpoints.vocabulary import BYTE_LETTERS, MAX_VOCABULARY_BYTES, read_vocabulary  # noqa: E402

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "golden.json").read_text())


def tokenizer_of(parts):
    state = {"version": "1.0", "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    return tokenizers.Tokenizer.from_str(json.dumps(state | parts))


def golden(kind):
    path = HERE / f"{kind}.model"
    return read_sentencepiece(path, read_vocabulary(path))


# ------------------------------------------------------------------------------------------------------ sentencepiece


@pytest.mark.parametrize("kind", GOLDEN)
def test_ids_and_texts_are_those_of_sentencepiece(kind):
    tokenizer, expected = tokenizer_of(golden(kind).parts()), GOLDEN[kind]
    for text, ids, decoded in zip(expected["texts"], expected["ids"], expected["decoded"], strict=True):
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids) == decoded, text


def test_what_a_file_says():
    plain, normalised = golden("plain"), golden("normalised")
    assert (plain.unknown, plain.begin, plain.end, len(plain.pieces)) == (0, 1, 2, 480)
    assert not plain.charsmap and plain.add_prefix and not plain.one_space
    assert normalised.charsmap and normalised.one_space


def field(number, value):
    """One protobuf field, with a number or bytes."""
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value):
    low = bytes([value & 127 | (128 if value > 127 else 0)])
    return low + varint(value >> 7) if value > 127 else low


def model_of(pieces=("<unk>", "a"), trainer=b"\x18\x02", normalizer=b""):
    """A serialized model. `trainer` is the trainer's settings, by default BPE."""
    written = b"".join(field(1, field(1, piece.encode())) for piece in pieces)
    return written + field(2, trainer) + field(3, normalizer)


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (model_of(trainer=b""), NotImplementedError, r"model_type 1 is not implemented; implemented: 2 \(BPE\)"),
        (model_of(normalizer=field(5, 0)), NotImplementedError, "escape_whitespaces = false"),
        (model_of(pieces=("a", "a")), ValueError, "it has a piece twice"),
        (model_of(trainer=field(3, 2) + varint(40 << 3) + varint(7)), ValueError, "unk_id must be .*; got 7"),
        (model_of(trainer=field(3, 2) + varint(40 << 3) + varint(2**64 - 1)), ValueError, "got -1"),
        (model_of(trainer=field(3, b"x")), ValueError, "it has text in place of a number"),
        (field(1, 3), ValueError, "it has a number in place of text"),
        (field(1, field(1, b"\xff")), ValueError, "can't decode"),
        (field(1, b""), ValueError, "damaged: 1"),
        (model_of()[:-1], ValueError, "damaged"),
        (b"\n\xff\xff\xff\xff\x0f", ValueError, "reaches beyond its end"),
        (b"\n" + b"\xff" * 20, ValueError, "more than 64 bits"),
        (b"\x0b\x00", ValueError, "wire type 3"),
    ],
)  # fmt: skip
def test_a_damaged_vocabulary_is_named(data, error, message):
    with pytest.raises(error, match=message) as raised:
        read_sentencepiece(Path("tokenizer.model"), data)
    assert "tokenizer.model" in str(raised.value)


def test_any_bytes_are_a_vocabulary_or_an_error():
    whole, chance = (HERE / "plain.model").read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 2, 9])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            read_sentencepiece(HERE, bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])).parts()
        except (ValueError, NotImplementedError) as error:
            assert str(HERE) in str(error)


def test_a_file_that_is_none_is_refused(tmp_path):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="Git LFS pointer"):
        read_vocabulary(path)
    with path.open("wb") as file:
        file.truncate(MAX_VOCABULARY_BYTES + 1)
    with pytest.raises(ValueError, match="which no valid file of this kind is"):
        read_vocabulary(path)


# ----------------------------------------------------------------------------------------------------------- tiktoken


def ranks():
    """Tokens for each byte, and the tokens that merges of some words create."""
    words = ["hello", " hello", "the", " the", "你好", "café", "  ", "123", "helloed", "\n\n"]
    made = dict.fromkeys(word.encode()[:end] for word in words for end in range(2, len(word.encode()) + 1))
    extra = dict.fromkeys(word.encode()[start:] for word in words for start in range(1, len(word.encode()) - 1))
    tokens = [bytes([byte]) for byte in range(256)] + list(made) + [token for token in extra if token not in made]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def merged(piece, ranks):
    """tiktoken's rule: a piece that is a token stays whole. Otherwise the neighbours with the lowest rank are merged,
    until no neighbours form a token."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [bytes([byte]) for byte in piece]
    while True:
        found = [(ranks[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:])) if a + b in ranks]
        if not found:
            return [ranks[part] for part in parts]
        at = min(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def written(ranks):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def test_ids_are_those_of_tiktokens_rule():
    known = ranks()
    tokenizer = tokenizer_of(read_tiktoken(Path("tokenizer.model"), written(known)))
    for text in ("hello the helloed", "你好 café!", "thethe hellohello 1234\n\nthe", "", " ", "🦊"):
        # Pieces of these texts: words with the blank before them, digits in threes, signs, and runs of blanks.
        pieces = re.findall(r" ?[^\W\d_]+|\d{1,3}| ?[^\s\w]+|\s*[\r\n]+|\s+", text)
        assert "".join(pieces) == text
        assert tokenizer.encode(text).ids == [token for piece in pieces for token in merged(piece.encode(), known)]
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(BYTE_LETTERS) == len(set(BYTE_LETTERS)) == 256


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"not base64! 9\n", "line .* must be a token in base64 and its rank"),
        (lambda data: data + b"aGV5\n", "must be a token in base64 and its rank"),
        (lambda data: data + b"aGV5 99999\n", "must rank its tokens from 0"),
        (lambda data: data.partition(b"\n")[2], "must rank its tokens from 0"),
    ],
)
def test_damaged_ranks_are_named(change, message):
    with pytest.raises(ValueError, match=f"tokenizer.model.*{message}"):
        read_tiktoken(Path("tokenizer.model"), change(written(ranks())))
