"""WordPiece and unigram vocabularies of GGUF files: the tokens of the tokenizers that they were made from."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from gguf import TokenType
from tokenizers import Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerFast, RobertaTokenizer, XLMRobertaTokenizer

from pace.tokenizer.loading import load_tokenizer
from tests.checkpoints.gguf.encoders.encoder_files import add_vocabulary, charsmap
from tests.checkpoints.gguf.test_tokenizer import STRANGE, file_with, put, random_texts
from tests.llm.text.tokenizer_zoo import byte_level

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [
    "the",
    "fox",
    "naive",
    "caf",
    "##e",
    "##s",
    "##x",
    "a",
    "b",
    "##c",
    ",",
    "!",
    "don",
    "'",
    "t",
    "日",
    "12",
    "##3",
]
CAPITALS = ["The", "Fox", "A", "##X", "é", "##é"]
PIECES = ["▁", "▁the", "▁fox", "the", "f", "o", "x", "a", "▁a", "b", "c", ",", "!", "日本", "é", "s", "1", "2", "▁12"]
TEXTS = [*STRANGE, *random_texts(40), "The foxes, a café!", "Fox  FOXES\tthe naïve [MASK]!", "the <mask> fox", "①②Ａ"]


def word_pieces(lowercase: bool) -> BertTokenizer:
    words = [*SPECIAL, "[unused0]", *WORDS, *([] if lowercase else CAPITALS)]
    return BertTokenizer(vocab=dict(zip(words, range(len(words)))), do_lower_case=lowercase)


def unigram(table: bytes | None = None) -> XLMRobertaTokenizer:
    names = ["<s>", "<pad>", "</s>", "<unk>", *PIECES, "<mask>"]
    scores = [0.0] * 4 + [-1.0 - 0.5 * len(PIECES) / (1 + index) for index in range(len(PIECES))] + [0.0]
    return XLMRobertaTokenizer(vocab=list(zip(names, scores)), _spm_precompiled_charsmap=table)


def loaded(path, tokenizer, *more, **options):
    return load_tokenizer(file_with(path, lambda writer: add_vocabulary(writer, tokenizer), *more, **options))


def pairs(tokenizer):
    """Tokens and types of a text and of a pair."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return [(found.ids, found.type_ids) for found in (backend.encode("the fox"), backend.encode("the fox", "a fox, a"))]


def assert_same(found, expected):
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids, text
        for skips in (True, False):
            assert found.decode(ids, skip_special_tokens=skips) == expected.decode(ids, skip_special_tokens=skips)
    assert pairs(found) == pairs(expected)
    for name in ("cls_token_id", "sep_token_id", "pad_token_id", "unk_token_id", "mask_token_id", "bos_token_id"):
        assert getattr(found, name) == getattr(expected, name), name
    assert len(found) == len(expected) and set(found.all_special_ids) == set(expected.all_special_ids)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces(tmp_path, lowercase):
    expected = word_pieces(lowercase)
    assert_same(loaded(tmp_path / "t.gguf", expected, architecture="bert"), expected)


@pytest.mark.parametrize("lowercase", [True, False])
def test_word_pieces_of_older_converters(tmp_path, lowercase):
    """They did not write the case, left all names in brackets as they were, and named the first token by `cls`."""
    expected = word_pieces(lowercase)

    def older(writer):
        keys = writer.kv_data[0]
        keys["tokenizer.ggml.cls_token_id"] = keys.pop("tokenizer.ggml.bos_token_id")
        del keys["tokenizer.ggml.normalizer.lowercase"], keys["tokenizer.ggml.seperator_token_id"]
        names = keys["tokenizer.ggml.tokens"].value
        names[:] = [name.removeprefix("▁") if name.startswith("▁[") else name for name in names]

    assert_same(loaded(tmp_path / "t.gguf", expected, older, architecture="bert"), expected)


def test_usual_special_tokens_of_word_pieces(tmp_path):
    """A file that names none has those of bert-base."""
    words = ["[PAD]", *(f"[unused{index}]" for index in range(99)), *SPECIAL[1:], *WORDS]
    expected = BertTokenizer(vocab=dict(zip(words, range(len(words)))))

    def unnamed(writer):
        for name in ("bos", "eos", "seperator", "unknown", "padding", "mask"):
            del writer.kv_data[0][f"tokenizer.ggml.{name}_token_id"]

    assert pairs(loaded(tmp_path / "t.gguf", expected, unnamed, architecture="bert")) == pairs(expected)
    small = word_pieces(True)
    with pytest.raises(ValueError, match="has no tokenizer.ggml.(bos|unknown)_token_id in its metadata"):
        loaded(tmp_path / "t.gguf", small, unnamed, architecture="bert")


@pytest.mark.parametrize("table", [None, charsmap({"Ａ": "a", "①": "1", "②": "2", "é": "e\u0301"})])
def test_unigram_pieces(tmp_path, table):
    expected = unigram(table)
    more = [] if table is None else [lambda writer: writer.add_precompiled_charsmap(table)]
    found = loaded(tmp_path / "t.gguf", expected, *more, architecture="bert")
    assert_same(found, expected)


def test_fillers_leave_the_score_of_unknown_characters(tmp_path):
    """Converters fill a vocabulary with tokens of a very low score."""
    expected = unigram()

    def filled(writer):
        for name, value in (("tokens", "[PAD24]"), ("scores", -1e4), ("token_type", int(TokenType.UNUSED))):
            writer.kv_data[0][f"tokenizer.ggml.{name}"].value.append(value)

    found = loaded(tmp_path / "t.gguf", expected, filled, architecture="bert")
    # The unknown character costs less than spelling the rest with other pieces.
    for text in ("fo日", "日本 fox 日", "the日fox"):
        assert found(text)["input_ids"] == expected(text)["input_ids"]


def test_pairs_of_byte_level_vocabularies(tmp_path):
    """RoBERTa's have two tokens between texts. ModernBERT's have one, also if the key says two."""
    state = json.loads(byte_level().backend_tokenizer.to_str())

    def add(pre):
        def bytes_too(writer):
            from tests.checkpoints.gguf.files import add_tokenizer

            add_tokenizer(writer, byte_level(), pre)
            writer.add_causal_attention(False)
            writer.add_bos_token_id(0)
            writer.add_sep_token_id(1)
            for name in ("bos", "eos", "sep"):
                key = f"tokenizer.ggml.add_{name}_token"
                writer.kv_data[0].pop(key, None)
                writer.add_bool(key, True)

        return bytes_too

    roberta = RobertaTokenizer(
        vocab=state["model"]["vocab"], merges=[tuple(merge) for merge in state["model"]["merges"]],
        **dict.fromkeys(("bos_token", "cls_token"), "<pad>"), **dict.fromkeys(("eos_token", "sep_token"), "<end>"),
    )  # fmt: skip
    found = load_tokenizer(file_with(tmp_path / "r.gguf", add("roberta-bpe"), architecture="bert"))
    assert pairs(found) == pairs(roberta)
    found = load_tokenizer(file_with(tmp_path / "m.gguf", add("modern-bert"), architecture="modern-bert"))
    [one, _], [two, types] = pairs(found)
    assert two == [*one, *pairs(roberta)[1][0][len(one) + 1 :]] and not any(types)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("ggml.bos_token_id", 99, "uint32"), "tokenizer.ggml.bos_token_id must be one of the"),
        (put("ggml.normalizer.lowercase", 1, "uint32"), "normalizer.lowercase must be true or false"),
        (put("ggml.precompiled_charsmap", [1.5], "array"), "precompiled_charsmap must be an array of bytes"),
        (lambda writer: writer.add_precompiled_charsmap(b"abc"), "cannot make the tokenizer|precompiled_charsmap"),
        (put("ggml.scores", [0.0], "array"), "scores must have a finite score for each of"),
        (put("ggml.scores", [float("nan")] * 24, "array"), "scores must have a finite score for each of"),
    ],
)
def test_damaged_vocabularies(tmp_path, change, message):
    of_pieces = "scores" in message or "charsmap" in message
    with pytest.raises(ValueError, match=message) as raised:
        loaded(tmp_path / "t.gguf", unigram() if of_pieces else word_pieces(True), change, architecture="bert")
    assert "t.gguf" in str(raised.value)


def test_pieces_of_sentencepiece_as_word_pieces(tmp_path):
    """The converter writes CamemBERT so."""
    words = [*SPECIAL, *PIECES]
    with pytest.raises(NotImplementedError, match="has pieces of sentencepiece as a WordPiece vocabulary"):
        loaded(tmp_path / "t.gguf", BertTokenizer(vocab=dict(zip(words, range(len(words))))), architecture="bert")


def test_a_tokenizer_of_transformers_can_be_made(tmp_path):
    found = loaded(tmp_path / "t.gguf", word_pieces(True), architecture="bert")
    assert isinstance(found.transformers, PreTrainedTokenizerFast) and isinstance(found.backend_tokenizer, Tokenizer)
    padded = found(["the fox", "a"], padding=True)
    assert padded["input_ids"][1][-1] == found.pad_token_id
