"""Directories of many kinds: `load_tokenizer` gives the same tokenizer as transformers.

Each draw is a tokenizer.json (bytes, pieces, words), settings of several classes, and files of older checkpoints.
"""

from __future__ import annotations

import copy
import json
import random

import pytest

pytest.importorskip("transformers")

import transformers
from transformers import AutoTokenizer

from pace.assets import TINY
from pace.tokenizer.loading import _whole, load_tokenizer
from pace.tokenizer.pipelines import REBUILT

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "Hello there", "  two  spaces ", "don't stop , 12!", "naïve 日本 🙂", "नमस्ते", "<s>hi</s> <user>the<end>",
    "<new>a <tool> b",
]  # fmt: skip
CONVERSATION = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ unk_token }}|{{ bos_token }}|{{ tools }}"
)
NAMES = ["bos_token", "eos_token", "pad_token", "unk_token", "mask_token"]
ATTRIBUTES = [*NAMES, *(f"{name}_id" for name in NAMES), "all_special_tokens", "all_special_ids", "special_tokens_map"]
ATTRIBUTES += ["vocab_size", "chat_template", "padding_side", "truncation_side", "model_max_length"]
ATTRIBUTES += ["model_input_names", "add_bos_token"]
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<user>", "<end>", "<tool>"]
CLASSES = {
    "Qwen2Tokenizer": "qwen3", "Qwen3_5Tokenizer": "qwen3_5", "GPT2Tokenizer": "gpt2", "GemmaTokenizer": "gemma2",
    "LlamaTokenizer": "llama",
}  # fmt: skip
OTHER_MODELS = ["llama", "qwen2", "mistral", "phi3", "granite", "olmo2", "stablelm", "glm4", "cohere", "unheard"]
OPTIONS = {
    "add_bos_token": (True, False), "add_prefix_space": (False, True), "clean_up_tokenization_spaces": (True, False),
    "legacy": (True, False), "max_len": (7,),
    "model_input_names": (["input_ids"], ["input_ids", "token_type_ids", "attention_mask"]),
    "model_max_length": (8, 10**30), "padding_side": ("left", "right"), "truncation_side": ("left", "right"),
    "split_special_tokens": (True,),
    "extra_special_tokens": (["<user>"], {"image_token": "<user>"}),
    "additional_special_tokens": (["<end>", "<tool>"],), "image_token": ("<user>",), "bos_token": ("<tool>", None),
}  # fmt: skip


def added(index, content, **flags):
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content} | plain | flags


def pieces():
    words = "the a Hello there do don't stop hi 12 ! , two spaces".split()
    letters = sorted({letter for word in words for letter in word} | {"▁"})
    longer = [start + word[:end] for word in words for start in ("", "▁") for end in range(1, len(word) + 1)]
    return list(dict.fromkeys([*SPECIALS, *BYTE_PIECES, *letters, *longer]))


def model_of(kind, rng):
    tokens = pieces()
    vocab = {token: index for index, token in enumerate(tokens)}
    if kind == "bytes":
        model = json.loads((TINY / "tokenizer.json").read_text())["model"]
        names = {index: name for index, name in enumerate(SPECIALS)}
        vocab = {names.get(index, token): index for token, index in model["vocab"].items()}
        return model | {"vocab": vocab, "ignore_merges": rng.random() < 0.1}
    if kind == "pieces":
        merges = [[token[:-1], token[-1]] for token in tokens if token[0] != "<" and token[:-1] in vocab]
        model = {"type": "BPE", "unk_token": "<unk>", "fuse_unk": rng.random() < 0.9, "byte_fallback": True}
        return model | {"dropout": None, "ignore_merges": False, "vocab": vocab, "merges": merges}
    if kind == "unigram":
        return {"type": "Unigram", "unk_id": 3, "vocab": [[token, -index / 9] for token, index in vocab.items()]}
    words = {"type": "WordPiece", "unk_token": "<unk>", "continuing_subword_prefix": "##"}
    return words | {
        "max_input_chars_per_word": 100,
        "vocab": vocab | {"##" + c: len(vocab) + i for i, c in enumerate("elortd")},
    }


def draw(rng):
    """Random tokenizer.json, tokenizer_config.json, other files, and config.json."""
    name = rng.choice([*REBUILT, None, None])
    kind = rng.choice(["unigram", "words", "bytes", "pieces"])
    if name and rng.random() < 0.9:
        kind = "bytes" if name in ("Qwen2Tokenizer", "Qwen3_5Tokenizer", "GPT2Tokenizer") else "pieces"
    parts = REBUILT[name] if name else (None, rng.choice([{"type": "Whitespace"}, REBUILT["LlamaTokenizer"][1]]), None)
    normalizer, pre_tokenizer, decoder = copy.deepcopy(parts)
    if rng.random() < 0.1:
        normalizer = {"type": "Lowercase"}
    model = model_of(kind, rng)
    tokens = [added(index, token, special=token != "<tool>") for index, token in enumerate(SPECIALS)]
    tokens += [added(len(model["vocab"]), "<new>", special=False)] * (rng.random() < 0.3)
    if rng.random() < 0.2:
        rng.choice(tokens)[rng.choice(["normalized", "rstrip", "lstrip"])] = True
    begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] * (rng.random() < 0.5)
    ends = {"type": "TemplateProcessing", "single": [*begin, {"Sequence": {"id": "A", "type_id": 0}}]}
    ends |= {"pair": [*ends["single"], {"Sequence": {"id": "B", "type_id": 0}}]}
    ends |= {"special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    padding = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "<pad>"}
    cut = {"direction": rng.choice(["Left", "Right"]), "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    state = {"version": "1.0", "truncation": cut if rng.random() < 0.2 else None, "added_tokens": tokens}
    state |= {"padding": padding if rng.random() < 0.2 else None, "normalizer": normalizer, "decoder": decoder}
    state |= {"pre_tokenizer": pre_tokenizer, "post_processor": ends, "model": model}

    settings = {
        "tokenizer_class": name if name and rng.random() < 0.8 else rng.choice(["PreTrainedTokenizerFast", *REBUILT])
    }
    settings["tokenizer_class"] += "Fast" * (rng.random() < 0.3 and not settings["tokenizer_class"].endswith("Fast"))
    settings |= {
        key: token
        for key, token in zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIALS)
        if rng.random() < 0.7
    }
    settings |= {key: rng.choice(values) for key, values in OPTIONS.items() if rng.random() < 0.12}
    if rng.random() < 0.5:
        listed = [token for token in tokens if rng.random() < 0.97]
        settings["added_tokens_decoder"] = {
            str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in listed
        }
    files = {"chat_template.jinja": TEMPLATE}
    if rng.random() < 0.2:
        settings["chat_template"] = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "T"}]
        files = {"additional_chat_templates/rag.jinja": "R"} if rng.random() < 0.3 else {}
    if rng.random() < 0.3:
        files["special_tokens_map.json"] = json.dumps({"eos_token": "<end>", "unk_token": {"content": "<unk>"}})
    if rng.random() < 0.1:
        files["added_tokens.json"] = json.dumps(rng.choice([{"<tool>": 6}, {"<other>": 5000}]))
    model_type = CLASSES.get(name, "llama") if rng.random() < 0.5 else rng.choice(OTHER_MODELS)
    return state, settings, files, {"model_type": model_type} if rng.random() < 0.9 else {}


def write(directory, state, settings, files, config):
    named = {"tokenizer.json": state, "tokenizer_config.json": settings} | ({"config.json": config} if config else {})
    for name, content in ({name: json.dumps(content) for name, content in named.items()} | files).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)


def attempt(call):
    try:
        return call()
    except Exception as error:
        return type(error)


def differences(ours, theirs):
    for text in TEXTS:
        for special in (True, False):
            expected = dict(theirs(text, add_special_tokens=special))
            yield text, ours(text, add_special_tokens=special), expected
            ids = expected["input_ids"]
            yield text, ours.decode(ids, special), theirs.decode(ids, skip_special_tokens=special)
            yield text, ours.convert_ids_to_tokens(ids, special), theirs.convert_ids_to_tokens(ids, special)
    for name in ATTRIBUTES:
        yield name, getattr(ours, name), getattr(theirs, name)
    yield "len", len(ours), len(theirs)
    yield "added", str(ours.added_tokens_decoder), str(theirs.added_tokens_decoder)
    for options in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        chats = [
            attempt(lambda: one.apply_chat_template(CONVERSATION, tokenize=False, **options)) for one in (ours, theirs)
        ]
        yield options, *chats


def test_the_tokenizer_is_that_of_transformers(tmp_path):
    ours_alone, classes = 0, set()
    for seed in range(80):
        directory = tmp_path / str(seed)
        state, settings, files, config = draw(random.Random(seed))
        write(directory, state, settings, files, config)
        ours = _whole(directory, settings)
        if ours is None:  # left to transformers
            continue
        ours_alone += 1
        classes.add(settings["tokenizer_class"].removesuffix("Fast"))
        theirs = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        wrong = [one for one in differences(ours, theirs) if one[1] != one[2]]
        assert not wrong, (seed, settings, config, wrong[:3])
    assert ours_alone > 20 and len(classes) > 3


@pytest.mark.parametrize("name", REBUILT)
def test_the_parts_of_a_rebuilt_class(name):
    """A decoder of bytes is not compared: its flags have no meaning."""
    backend = getattr(transformers, name)().backend_tokenizer
    found = [backend.normalizer, backend.pre_tokenizer]
    assert [part and json.loads(part.__getstate__()) for part in found] == list(REBUILT[name][:2])


JUNK = [None, 5, -1, 1.5, "x", "", [], {}, [5], {"a": 1}, {"content": 5}, 10**40]


@pytest.mark.parametrize(
    "where", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json"]
)
def test_damaged_files_are_refused_or_read(tmp_path, where):
    """Any content of a file is read, or gives an error that names the problem."""
    refused = 0
    for seed in range(8):
        rng = random.Random(seed)
        state, settings, files, config = draw(rng)
        content = {"tokenizer.json": state, "tokenizer_config.json": settings}.get(where, {"eos_token": 1, "a": 1})
        content[rng.choice(list(content))] = rng.choice(JUNK)
        write(tmp_path / str(seed), state, settings, files | {where: json.dumps(content)}, config)
        try:
            tokenizer = load_tokenizer(tmp_path / str(seed))
            tokenizer.encode("Hello")
        except ValueError as error:
            refused += 1
            assert str(tmp_path) in str(error)
    assert refused or where.endswith("map.json") or where.startswith("added")
