"""Finding local checkpoints, their configs and tokenizers. tests/llm/loading/hub tests those of the Hub."""

from __future__ import annotations

import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from pace.assets import TINY
from pace.llm.loading import find
from pace.llm.loading.checkpoint import read_config_json, read_generation_config
from pace.llm.loading.find import find_checkpoint
from pace.tokenizer.loading import load_tokenizer
from pace.tokenizer.tokenizer import Tokenizer
from tests.fuzz import checkpoints
from tests.llm.text.tokenizer_zoo import ZOO
from tests.plugins.tiers import sample

TOKENIZER = checkpoints.tokenizer_files()


# -- local -------------------------------------------------------------------------------------------------------------


def test_a_directory_is_itself(tmp_path, monkeypatch):
    assert find_checkpoint(tmp_path) == tmp_path
    assert find_checkpoint(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="revision='v2'.*local directory"):
        find_checkpoint(tmp_path, revision="v2")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert find_checkpoint(f"~/{tmp_path.name}") == tmp_path
    (tmp_path / "org/model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_checkpoint("org/model") == Path("org/model"), "a directory here comes before the Hub"


def test_what_is_not_a_directory(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file, but not a GGUF file; give the directory"):
        find_checkpoint(tmp_path / "model.safetensors")
    for wrong in (None, 3, ["a"], b"x"):
        with pytest.raises(TypeError, match="path or a Hub id"):
            find_checkpoint(wrong)
    for wrong in ("", "a\0b"):
        with pytest.raises(ValueError, match="directory or a Hub id"):
            find_checkpoint(wrong)


def test_a_directory_that_may_not_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(find.os, "access", lambda path, mode: path != tmp_path)  # root may read it despite chmod
    with pytest.raises(PermissionError, match="this user may not read"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{}/qwen-2.5", "{}/qwen-2.5/weights/deep", "{}/Qwen2.5/"])
def test_a_misspelt_path_names_its_neighbours(text, tmp_path):
    (tmp_path / "qwen2.5").mkdir()
    with pytest.raises(FileNotFoundError, match="'qwen2.5'"):
        find_checkpoint(text.format(tmp_path))


@pytest.mark.parametrize(
    "text",
    ["./absent", "/absent", "~/absent", "a/b/c", "has space", "-x", "a//b", "x" * 5000, "é/é", Path("org/absent")],
)
def test_what_cannot_be_a_hub_id_is_not_asked_for(text, hub):
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        find_checkpoint(text)
    assert hub.requests == 0


@pytest.mark.parametrize("text", ["qwen-q4.gguf", "models/qwen-q4.gguf", "Qwen-Q4.GGUF"])
def test_a_gguf_file_that_is_not_there_is_not_asked_for(text, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        find_checkpoint(text)
    (tmp_path / "qwen-q5.gguf").touch()
    with pytest.raises(FileNotFoundError, match="no file 'qwen-q4.gguf'; .* has 'qwen-q5.gguf'"):
        find_checkpoint("qwen-q4.gguf")
    assert hub.requests == 0


# -- files of a checkpoint ---------------------------------------------------------------------------------------------


def test_a_directory_without_config(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        read_config_json(tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no config.json.*; it has a LoRA adapter: load the model that"):
        read_config_json(tmp_path / "adapter")
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner/config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="'inner'"):
        read_config_json(tmp_path)


@pytest.mark.parametrize("read", [read_config_json, read_generation_config])
@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty"), (b"  \n", "is empty"), (b"{", "not valid JSON"), (b"[1]", "holds a list"),
     (b"null", "holds null"), (b'{"a": NaN}', "NaN"), (b'{"a": -Infinity}', "Infinity"), (b'{"a": 1e999}', "1e999"),
     (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"), (b'{"a": 1, "a": 2}', "'a' is given twice"),
     (b"\xff\xfe{}", "not valid JSON"), (b'{"a":' * 100_000, "nested too deeply"),
     (b" " * (5 << 20) + b"{}", "larger than"),
     (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")],
)  # fmt: skip
def test_damaged_configs(read, content, message, tmp_path):
    name = "config.json" if read is read_config_json else "generation_config.json"
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path)
    assert name in str(caught.value)


def test_generation_config_is_optional(tmp_path):
    assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 5, "top_k": 5}')
    assert read_generation_config(tmp_path) == {"top_k": 5}


# -- tokenizer ---------------------------------------------------------------------------------------------------------


def with_tokenizer(folder, **changes):
    for name, content in (TOKENIZER | changes).items():
        (folder / name).write_bytes(content)
    return folder


def test_tokenizer(tmp_path, caplog):
    assert load_tokenizer(tmp_path, required=False) is None
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_tokenizer(tmp_path)
    tokenizer = load_tokenizer(with_tokenizer(tmp_path), vocab_size=30)
    assert tokenizer.decode(tokenizer.encode("hello")).replace(" ", "") == "hello"
    assert not caplog.records


def test_a_tokenizer_class_that_is_a_model_is_refused(tmp_path):
    settings = json.dumps({"tokenizer_class": "LlamaForCausalLM"}).encode()
    with pytest.raises(ValueError, match="tokenizer_config.json: tokenizer_class must name a tokenizer; got .Llama"):
        load_tokenizer(with_tokenizer(tmp_path, **{"tokenizer_config.json": settings}))


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "phi", "gptj", "opt", "gpt_neox", "stablelm", "unheard-of")
CLASSES = ("PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast",
           "GPT2TokenizerFast", "CodeGenTokenizer", "Unheard", None)  # fmt: skip
NAMED = list(itertools.product(ZOO, MODEL_TYPES, CLASSES))


@pytest.mark.parametrize("named", sample(NAMED, lambda named: named in NAMED[::7]), ids=str)
def test_the_tokenizer_is_the_one_that_transformers_finds_by_itself(tmp_path, tokenizers, named):
    """The tokenizer has the same class, ids, texts and special tokens as that of transformers, for each class that a
    checkpoint may name. Each commit tests every kind, model_type and class."""
    from transformers import AutoTokenizer

    kind, model_type, name = named
    for path in tokenizers[kind].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del settings["tokenizer_class"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": name} if name else {})))
    expected, found = AutoTokenizer.from_pretrained(str(tmp_path)), load_tokenizer(tmp_path)
    assert isinstance(found, Tokenizer) or type(found) is type(expected)
    text = "<s>Once  upon a café, 日本🦊</s><end>\n"
    ids = expected(text)["input_ids"]
    assert found(text)["input_ids"] == ids
    for options in ({}, {"skip_special_tokens": True}):
        assert found.decode(ids, **options) == expected.decode(ids, **options)
    for attribute in ("special_tokens_map", "all_special_ids", "chat_template", "padding_side"):
        assert getattr(found, attribute) == getattr(expected, attribute)
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Returns a folder with a tokenizer for each kind in the zoo."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ZOO}
    for kind, folder in folders.items():
        ZOO[kind]().save_pretrained(folder)
    return folders


def test_loading_a_tokenizer_imports_no_compiler():
    """Importing torch._dynamo and torch.distributed takes a second. transformers imports them with a model's config
    class."""
    program = (
        "import sys; from pace.tokenizer.loading import load_tokenizer; load_tokenizer(sys.argv[1]); "
        "print('torch._dynamo' in sys.modules)"
    )
    command = [sys.executable, "-c", program, TINY]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_a_tokenizer_with_far_fewer_ids_than_the_model(tmp_path, caplog):
    load_tokenizer(with_tokenizer(tmp_path), vocab_size=33)  # padded
    assert not caplog.records
    load_tokenizer(tmp_path, vocab_size=34)
    assert "only 30 ids, the model 34" in caplog.text and "another model's" in caplog.text


def test_a_tokenizer_with_more_ids_than_the_model(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        load_tokenizer(with_tokenizer(tmp_path), vocab_size=10)
    assert "has 30 ids, the model only 10" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [{"tokenizer.json": b""}, {"tokenizer.json": b"{}"}, {"tokenizer.json": b'{"model": ' * 5000},
     {"tokenizer.json": TOKENIZER["tokenizer.json"][:-20]},
     {"tokenizer.json": TOKENIZER["tokenizer.json"].replace(b'["h", "e"]', b'["h", "zz"]')},
     {"tokenizer_config.json": b"[]"}, {"tokenizer_config.json": b"{"},
     {"tokenizer_config.json": b'{"tokenizer_class": 7}'}],
)  # fmt: skip
def test_damaged_tokenizers(changes, tmp_path):
    with pytest.raises(ValueError, match="tokenizer"):
        load_tokenizer(with_tokenizer(tmp_path, **changes))


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_name('hacked').touch()\nclass Evil: pass\n"
    )
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    try:
        load_tokenizer(with_tokenizer(tmp_path, **{"tokenizer_config.json": json.dumps(settings).encode()}))
    except ValueError as error:
        assert str(tmp_path) in str(error)
    assert not (tmp_path / "hacked").exists()


def test_a_panic_of_the_tokenizers_library_is_a_value_error(tmp_path, monkeypatch):
    import transformers

    class PanicException(BaseException):
        pass

    def panic(*args, **kwargs):
        raise PanicException("index out of range")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", panic)
    with pytest.raises(ValueError, match="index out of range"):
        load_tokenizer(with_tokenizer(tmp_path))

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load_tokenizer(tmp_path)
