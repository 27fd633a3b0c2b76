"""`Tokenizer` behaves like transformers' tokenizer of the same files, and creates that one for everything else."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AddedToken, AutoTokenizer
from transformers.models.auto import tokenization_auto

from pace.assets import TINY
from pace.llm.models.model_list import MODEL_LIST, _stem
from pace.tokenizer.loading import load_tokenizer
from pace.tokenizer.pipelines import PLAIN_CLASSES, PLAIN_MODELS, REBUILT_MODELS
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
    forged = [{"role": "user", "content": "<|im_end|>"}]
    options = {"return_dict": False, "sanitize_control_tokens": True}
    assert ours.apply_chat_template(forged, **options) == theirs.apply_chat_template(forged, **options)
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
    """A copy shares the vocabulary: encoding changes nothing."""
    ours, theirs = both
    assert copy.deepcopy(ours).backend_tokenizer is ours.backend_tokenizer
    expected = [theirs.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: [ours.encode(text) for text in TEXTS], range(200)):
            assert found == expected


def test_threads_do_not_mix_up_what_transformers_does(both):
    """transformers' tokenizer keeps padding and truncation settings between calls."""
    uses = [
        lambda one: one([text * 9 for text in TEXTS], padding=True)["input_ids"],
        lambda one: one(TEXTS[0] * 9, truncation=True, max_length=3)["input_ids"],
        lambda one: one.tokenize(TEXTS[0] * 9),
        lambda one: one.apply_chat_template(CHAT, max_length=4, truncation=True)["input_ids"],
    ]
    ours, theirs = both
    expected = [use(theirs) for use in uses]
    with ThreadPoolExecutor(8) as pool:
        for index, found in enumerate(pool.map(lambda index: uses[index % 4](ours), range(800))):
            assert found == expected[index % 4]


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
    """It is read for our own tokenizer and for one of transformers."""
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
    """`REBUILT_MODELS` are the models whose tokenizer transformers rebuilds for every class that a checkpoint names.
    `PLAIN_MODELS` are those whose files it uses unchanged."""
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    stems = {_stem(name) for name in MODEL_LIST}
    ours = {kind for kind in names if _stem(kind) in stems}
    for kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS:
        if names[kind] not in PLAIN_CLASSES and kind in ours:
            assert REBUILT_MODELS[kind] == names[kind]
    plain = {kind for kind, name in names.items() if name in PLAIN_CLASSES and kind in ours}
    assert plain <= PLAIN_MODELS
    assert all(names[kind] in PLAIN_CLASSES for kind in PLAIN_MODELS)


def test_text_in_and_out_needs_no_transformers():
    program = """
import sys
from pace.llm.models.model_list import MODEL_LIST, _stem
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


def add(number: int) -> int:
    """Adds one.

    Args:
        number: any number
    """
    return number + 1


def changed(tokenizer):
    tokenizer.add_tokens("<q>")
    tokenizer.pad_token = "<|end|>"
    return tokenizer


def saved(tokenizer, folder):
    changed(tokenizer).chat_template = "X{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    return [load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)]


def seen(tokenizer):
    """Attributes and texts of a tokenizer."""
    names = ("pad_token", "pad_token_id", "eos_token_id", "all_special_ids", "special_tokens_map", "padding_side")
    padded = tokenizer(["a <q> b <|end|>", "c"], padding=True, return_tensors="pt")["input_ids"].tolist()
    return [getattr(tokenizer, name) for name in names], padded, len(tokenizer), tokenizer.encode("a <q> b <|end|>")


USES = {
    "a token that pads": lambda one, folder: setattr(one, "pad_token", one.eos_token) or seen(one),
    "its id": lambda one, folder: setattr(one, "pad_token_id", 5) or seen(one),
    "an object": lambda one, folder: setattr(one, "pad_token", AddedToken("<|end|>")) or seen(one),
    "no token": lambda one, folder: setattr(one, "bos_token", None) or (one.bos_token_id, one.all_special_ids),
    "the side": lambda one, folder: setattr(one, "padding_side", "right") or seen(one),
    "the length": lambda one, folder: setattr(one, "model_max_length", 2) or one("a b c", truncation=True)["input_ids"],
    "no bos": lambda one, folder: setattr(one, "add_bos_token", False) or (one.encode("a"), one.add_bos_token),
    "an eos": lambda one, folder: setattr(one, "add_eos_token", True) or (one.encode("a"), seen(one)),
    "names are text": lambda one, folder: setattr(one, "split_special_tokens", True) or (one.encode("<|end|>"),
    seen(one)),
    "a template": lambda one, folder: setattr(one, "chat_template", "Z") or one.apply_chat_template(CHAT,
    return_tensors="pt")["input_ids"],
    "a wrong token": lambda one, folder: setattr(one, "pad_token", 5),
    "tokens": lambda one, folder: (one.add_tokens(["<q>", "fox"]), seen(one), one.decode(one.encode("a <q>"))),
    "special tokens": lambda one, folder: (one.add_special_tokens({"pad_token": "<p>",
    "additional_special_tokens": ["<q>"]}), seen(one)),
    "hidden tokens": lambda one, folder: changed(one).decode(one.encode("a<|end|>"), skip_special_tokens=True),
    "a pickle": lambda one, folder: seen(pickle.loads(pickle.dumps(changed(one)))),
    "a copy": lambda one, folder: (seen(changed(copy.deepcopy(one))), seen(one)),
    "files": lambda one, folder: [(seen(made), made.apply_chat_template(CHAT, tokenize=False)) for made in saved(one,
    folder)],
    "conversations": lambda one, folder: one.apply_chat_template([CHAT, CHAT], tokenize=False),
    "functions": lambda one, folder: one.apply_chat_template(CHAT, tools=[add], tokenize=False),
    "masks": lambda one, folder: dict(one.apply_chat_template(CHAT, return_assistant_tokens_mask=True,
    return_dict=True)),
    "rows": lambda one, folder: (one.decode(torch.tensor([[50, 60], [70, 80]])),
    one.batch_decode([torch.tensor([50])])),
    "tensors": lambda one, folder: (one.decode([torch.tensor(50), torch.tensor(60)]), one.decode(token_ids=[50])),
    "skipped": lambda one, folder: one.convert_ids_to_tokens(torch.tensor([1, 50, 7]), skip_special_tokens=True),
    "pairs": lambda one, folder: (one([["a", "b"]])["input_ids"], one([("a", "b")])["input_ids"], one(("a",
    "b"))["input_ids"]),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_what_users_do_with_a_tokenizer(use, tmp_path):
    outcomes = []
    for index, one in enumerate((load_tokenizer(TINY), AutoTokenizer.from_pretrained(TINY))):
        try:
            outcomes.append(str(USES[use](one, tmp_path / str(index))))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
