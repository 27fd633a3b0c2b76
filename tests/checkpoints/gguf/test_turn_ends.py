"""Tokens with a wrong type in GGUF files: ends of turns, and marks of the chat template."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.config import special_tokens  # noqa: E402
from pace.checkpoints.gguf.file import GgufFile  # noqa: E402
from pace.tokenizer.loading import load_tokenizer  # noqa: E402
from tests.checkpoints.gguf.files import add_tokenizer  # noqa: E402
from tests.checkpoints.gguf.test_tokenizer import file_with  # noqa: E402
from tests.llm.text.tokenizer_zoo import ZOO  # noqa: E402

KINDS = gguf.TokenType
LOOP = "{% for m in messages %}BODY{% endfor %}"
TEMPLATES = {
    "chatml": ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", ["<|im_start|>", "<|im_end|>"]),
    "gemma": ("<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n", ["<start_of_turn>", "<end_of_turn>"]),
    "llama": (
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}",
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "phi": ("{{ '<|' + m['role'] + '|>' + m.content + '<|end|>' }}", ["<|user|>", "<|assistant|>", "<|end|>"]),
    "phi in another way": ("<|{{ m.role }}|>{{ m.content }}<|end|>", ["<|user|>", "<|assistant|>", "<|end|>"]),
    "zephyr": ('{{ "<|" ~ m.role ~ "|>\n" + m.content + eos_token }}', ["<|user|>", "<|assistant|>"]),
    "deepseek": (
        "{{ '<｜User｜>' if m.role == 'user' else '<｜Assistant｜>' }}{{ m.content }}{{ '<｜end▁of▁sentence｜>' }}",
        ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"],
    ),
}


def write(path: Path, kind: str, names: list[str], type: int, template: str = "", **ends: str) -> Path:
    """A file with tokens of this type at the end of its vocabulary. `ends` maps keys to names of tokens."""

    def add(writer):
        add_tokenizer(writer, ZOO[kind](), "qwen2" if kind == "byte_level" else None)
        keys = writer.kv_data[0]
        texts = keys["tokenizer.ggml.tokens"].value
        texts += [name for name in names if name not in texts]
        keys["tokenizer.ggml.token_type"].value += [type] * (len(texts) - len(keys["tokenizer.ggml.token_type"].value))
        for name in names:
            keys["tokenizer.ggml.token_type"].value[texts.index(name)] = type
        if "tokenizer.ggml.scores" in keys:
            scores = keys["tokenizer.ggml.scores"].value
            scores += [-1000.0] * (len(texts) - len(scores))
        for key, name in ends.items():
            keys.pop(f"tokenizer.ggml.{key}_token_id", None)
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", texts.index(name))
        if template:
            writer.add_chat_template(template)

    return file_with(path, add)


def ends_of(path: Path, tokenizer) -> list[str]:
    return tokenizer.convert_ids_to_tokens(special_tokens(GgufFile(path).metadata)["eos_token_id"])


@pytest.mark.parametrize("type", [KINDS.CONTROL, KINDS.USER_DEFINED, KINDS.NORMAL, KINDS.UNUSED])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("kind", ZOO)
def test_marks_of_the_template_are_tokens_and_its_end_ends_a_turn(tmp_path, kind, name, type):
    body, names = TEMPLATES[name]
    path = write(tmp_path / "t.gguf", kind, names, type, LOOP.replace("BODY", body))
    tokenizer = load_tokenizer(path)
    talk = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "who"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    for mark in names:
        assert tokens.count(mark) == text.count(mark) > 0
    ends = ends_of(path, tokenizer)
    assert name == "zephyr" or names[-1] in ends
    ids = tokenizer.convert_tokens_to_ids(ends)
    assert tokenizer.decode(ids, skip_special_tokens=True) == ""
    assert set(ids) <= set(tokenizer.all_special_ids)


@pytest.mark.parametrize("type", [KINDS.USER_DEFINED, KINDS.NORMAL])
@pytest.mark.parametrize("key", ["eos", "eot", "eom"])
@pytest.mark.parametrize("kind", ZOO)
def test_an_end_that_a_key_names_is_no_text(tmp_path, kind, key, type):
    path = write(tmp_path / "t.gguf", kind, ["</turn>"], type, **{key: "</turn>"})
    tokenizer = load_tokenizer(path)
    assert "</turn>" in ends_of(path, tokenizer)
    ids = tokenizer("a</turn>", add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids)[-1] == "</turn>"
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "a"


def test_llamas_own_end_as_ordinary_text(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "t.gguf", "sentencepiece", ["<s>", "</s>"], KINDS.NORMAL))
    ids = tokenizer("<s>a</s>", add_special_tokens=False)["input_ids"]
    assert [ids[0], ids[-1]] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True).strip() == "a"


def test_an_end_that_is_text_stays_text(tmp_path):
    path = write(tmp_path / "t.gguf", "byte_level", ["Ċ"], KINDS.NORMAL, eos="Ċ")
    tokenizer = load_tokenizer(path)
    ids = tokenizer("a\nb", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a\nb" and ends_of(path, tokenizer) == ["Ċ"]


@pytest.mark.parametrize("type", [KINDS.CONTROL, KINDS.NORMAL])
def test_ends_are_those_of_llama_cpp(tmp_path, type):
    names = ["<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>", "<|object_ref_start|>"]
    path = write(tmp_path / "t.gguf", "byte_level", names, type)
    assert ends_of(path, load_tokenizer(path)) == ["<end>", *names[:4]]
    names = ["<PAD>", "[PAD]", "<fim-repo>", "<REPO>", "<reponame>", "<|prefix|>", "<|suffix|>", "<|middle|>"]
    path = write(tmp_path / "t.gguf", "byte_level", names, type)
    tokenizer = load_tokenizer(path)
    assert ends_of(path, tokenizer) == ["<end>", *names[:5]]
    assert tokenizer.convert_ids_to_tokens(tokenizer("".join(names), add_special_tokens=False)["input_ids"]) == names
    names = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "</s>"]
    path = write(tmp_path / "t.gguf", "byte_level", names, type)
    control = ["</s>"] if type == KINDS.CONTROL else []
    assert ends_of(path, load_tokenizer(path)) == ["<end>", "<|return|>", "<|call|>", *control]


def test_what_is_corrected_is_told(tmp_path, caplog):
    body, names = TEMPLATES["chatml"]
    with caplog.at_level(logging.WARNING, "pace"):
        load_tokenizer(write(tmp_path / "right.gguf", "byte_level", names, KINDS.CONTROL, LOOP.replace("BODY", body)))
        assert not caplog.records
        load_tokenizer(write(tmp_path / "wrong.gguf", "byte_level", names, KINDS.NORMAL, LOOP.replace("BODY", body)))
    (record,) = caplog.records
    assert "wrong.gguf: tokenizer.ggml.token_type marks '<|im_start|>', '<|im_end|>' as ordinary text" in record.message
