"""Tokenizers of Kimi: a tiktoken vocabulary and a list of tokens, without the checkpoint's code."""

from __future__ import annotations

import base64
import json

import pytest

from pace.tokenizer.loading import load_tokenizer

WORDS = [b"he", b"hell", b"hello", b" h", "漢".encode()[:2], "漢".encode(), "漢字".encode()]
LISTED = {260 + len(WORDS): "<|im_end|>", 256 + len(WORDS): "[BOS]", 257 + len(WORDS): "[EOS]"}


@pytest.fixture
def directory(tmp_path):
    ranks = [bytes([byte]) for byte in range(256)] + WORDS
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    (tmp_path / "tiktoken.model").write_bytes(b"".join(lines))
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": {str(index): {"content": name, "special": True} for index, name in LISTED.items()},
        "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "in the settings",
    }  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_ids_and_texts(directory):
    tokenizer = load_tokenizer(directory)
    first = 256 + len(WORDS)
    assert len(tokenizer) == first + 5
    for text, ids in {
        "hello": [258], "漢字he": [262, 256], "漢": [261], "hello<|im_end|>": [258, first + 4],
        "<|reserved_token_266|>": [266], "1234": [49, 50, 51, 52],
    }.items():  # fmt: skip
        assert tokenizer.encode(text) == ids, "nothing comes before a text"
        assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == first + 1 and tokenizer.chat_template == "in the settings"
    (directory / "chat_template.jinja").write_text("in a file")
    assert load_tokenizer(directory).chat_template == "in a file"


def test_tokens_within_the_vocabulary_are_refused(directory):
    config = directory / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    settings["added_tokens_decoder"]["3"] = {"content": "<|im_user|>"}
    config.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"added_tokens_decoder must have ids from 263 to 4358.*got 3 to 267"):
        load_tokenizer(directory)
