"""`Tokenizer` does what transformers' tokenizer of the same files does, and makes that one for the rest."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from pace.assets import TINY
from pace.tokenizer.loading import load_tokenizer
from pace.tokenizer.pipelines import PLAIN_CLASSES, REBUILT_MODELS
from pace.tokenizer.tokenizer import Tokenizer

TEXTS = ["Hello there", " <|im_start|>user\nWhy?<|im_end|>", "", "naïve 日本 🙂", "a" * 300]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def both():
    found = load_tokenizer(TINY)
    assert type(found) is Tokenizer
    return found, AutoTokenizer.from_pretrained(TINY)


def test_texts_and_tokens(both):
    ours, theirs = both
    for text in TEXTS:
        for special in (True, False):
            ids = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours(text, add_special_tokens=special) == dict(theirs(text, add_special_tokens=special))
            assert ours(text, add_special_tokens=special).input_ids == ids
            assert ours.encode(text, add_special_tokens=special) == ids
            for given in (ids, torch.tensor(ids, dtype=torch.int64)):
                assert ours.decode(given, skip_special_tokens=special) == theirs.decode(
                    given, skip_special_tokens=special
                )
            assert ours.convert_ids_to_tokens(ids) == theirs.convert_ids_to_tokens(ids)
            assert ours.convert_ids_to_tokens(ids, special) == theirs.convert_ids_to_tokens(ids, special)
        assert ours.encode(text, split_special_tokens=True) == theirs.encode(text, split_special_tokens=True)
    assert ours(TEXTS) == dict(theirs(TEXTS))
    assert ours.batch_decode(ours(TEXTS).input_ids) == theirs.batch_decode(theirs(TEXTS).input_ids)
    assert ours.decode(5) == theirs.decode(5)
    assert ours.convert_tokens_to_ids(["<|im_end|>", "nothing"]) == theirs.convert_tokens_to_ids(
        ["<|im_end|>", "nothing"]
    )
    with pytest.raises(AttributeError):
        assert ours("a").nothing


@pytest.mark.parametrize(
    "name",
    ["bos_token", "eos_token", "pad_token", "unk_token", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"]
    + ["all_special_tokens", "all_special_ids", "special_tokens_map", "vocab_size", "chat_template", "padding_side"]
    + ["added_tokens_decoder", "name_or_path", "is_fast"],
)
def test_attributes(both, name):
    ours, theirs = both
    found, expected = getattr(ours, name), getattr(theirs, name)
    assert str(found) == str(expected) if name in ("added_tokens_decoder", "name_or_path") else found == expected
    assert len(ours) == len(theirs) and ours.get_vocab() == theirs.get_vocab()


def test_conversations(both):
    ours, theirs = both
    for options in (
        {"tokenize": False},
        {"tokenize": False, "add_generation_prompt": True},
        {"tokenize": False, "chat_template": "{{ messages[0].content }}{{ eos_token }}{{ extra }}", "extra": 3},
        {"tokenize": False, "continue_final_message": True},
        {"return_dict": False},
        {"add_generation_prompt": True},
    ):
        found, expected = ours.apply_chat_template(CHAT, **options), theirs.apply_chat_template(CHAT, **options)
        assert found == (expected if isinstance(expected, (str, list)) else dict(expected))
    tensor = ours.apply_chat_template(CHAT, return_tensors="pt")["input_ids"]
    assert torch.equal(tensor, theirs.apply_chat_template(CHAT, return_tensors="pt")["input_ids"])


def test_everything_else_is_what_transformers_does(both):
    ours, theirs = both
    found, expected = (tokenizer(TEXTS, padding=True, return_tensors="pt") for tokenizer in both)
    assert torch.equal(found["input_ids"], expected["input_ids"])
    assert ours.tokenize("Hello there") == theirs.tokenize("Hello there")
    assert ours("a", "b")["input_ids"] == theirs("a", "b")["input_ids"]
    assert ours.model_input_names == theirs.model_input_names
    with pytest.raises(AttributeError):
        assert ours.no_such_thing


def test_threads_share_it(both):
    """A copy is the tokenizer itself: encoding changes nothing."""
    ours, theirs = both
    assert copy.deepcopy(ours) is ours
    expected = [theirs.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [ours.encode(text) for text in TEXTS], range(200)):
            assert found == expected


def test_without_a_template(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY / name, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**json.loads((TINY / "tokenizer_config.json").read_text()), "chat_template": None})
    )
    tokenizer = load_tokenizer(tmp_path)
    assert type(tokenizer) is Tokenizer and tokenizer.chat_template is None
    with pytest.raises(ValueError, match="this tokenizer has no chat template: it has none"):
        tokenizer.apply_chat_template(CHAT)
    tokenizer.chat_template = {"a": "x", "tool_use": "y{{ tools | length }}"}
    with pytest.raises(ValueError, match=r"none of its templates \(a, tool_use\) is the default"):
        tokenizer.apply_chat_template(CHAT)
    assert tokenizer.apply_chat_template(CHAT, tools=[{}], tokenize=False) == "y1"
    assert tokenizer.apply_chat_template(CHAT, chat_template="a", tokenize=False) == "x"


def test_chat_template_json_is_read(tmp_path):
    """Of a tokenizer that we make and of one that transformers makes."""
    for settings in ({}, {"tokenizer_class": "Unheard"}):
        for name in ("tokenizer.json", "config.json"):
            shutil.copy(TINY / name, tmp_path)
        given = json.loads((TINY / "tokenizer_config.json").read_text()) | {"chat_template": None} | settings
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
        tokenizer = load_tokenizer(tmp_path)
        assert (type(tokenizer) is Tokenizer) == (not settings)
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "Be brief.!"


@pytest.mark.parametrize(("content", "library"), [(b"\n\x05\n\x03abc", "sentencepiece"), (b"YQ== 0\n", "tiktoken")])
def test_a_library_that_is_missing_is_named(tmp_path, monkeypatch, content, library):
    (tmp_path / "tokenizer.model").write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *others: None)
    with pytest.raises(
        ImportError, match=f"is a vocabulary of {library}.*pip install {library}; or give tokenizer_name"
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(ImportError, match=library):
        load_tokenizer(tmp_path, required=False)


def test_models_whose_class_transformers_chooses():
    """`REBUILT_MODELS` has those that it rebuilds whatever class a checkpoint names."""
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    wrong = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    rebuilt = {kind: names[kind] for kind in wrong if names[kind] and names[kind] not in PLAIN_CLASSES}
    ours = {
        kind: name for kind, name in rebuilt.items() if kind in ("qwen2", "phi3", "phimoe", "internlm2", "internlm3")
    }
    assert ours == REBUILT_MODELS


def test_text_in_and_out_needs_no_transformers():
    program = """
import sys
from pace.tokenizer.loading import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
ids = tokenizer("Hello")["input_ids"]
tokenizer.decode(ids)
assert "jinja2" not in sys.modules
tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
tokenizer.convert_ids_to_tokens(ids), tokenizer.all_special_ids, len(tokenizer), getattr(tokenizer, "turn_ends")
print(sorted({"transformers", "torch._dynamo", "huggingface_hub"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", program, str(TINY)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"
