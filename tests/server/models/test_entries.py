"""The models of a command line and of a TOML file."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from pace.cli import serve
from pace.cli.arguments import load_arguments
from pace.server.models.entries import is_named
from pace.server.options import ServeOptions

FILE = """
[chat]
model = "org/chat"
aliases = ["gpt-4o", "default"]
quantization = { format = "int4", group = 32 }
kv-cache-bytes = "2GiB"
max_seq_len = 4096
idle-unload = 600

["org/embed"]
model = "./embed.gguf"
prompt-lookup = true
media = "none"
weights-cache = false
load-on-startup = false
"""


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("PACE_API_KEY", raising=False)


def parse(*words: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(list(map(str, words)))


def read(*words: object) -> ServeOptions:
    return serve.serve_options(parse(*words))


def test_models_of_the_command_line():
    options = read("--model", "chat=org/big", "-m", "org/small", "--dtype", "float32", "--idle-unload", "60")
    assert [(entry.names, entry.model) for entry in options.models] == [
        (("chat",), "org/big"), (("org/small",), "org/small")
    ]  # fmt: skip
    assert options.model == "org/big" and options.model_names == ("chat",) and options.entries == options.models
    assert {entry.idle_unload for entry in options.models} == {60.0}
    loads = [load_arguments(entry.arguments) for entry in options.models]
    assert [(load["model_name_or_path"], load["dtype"]) for load in loads] == [
        ("org/big", "float32"), ("org/small", "float32")
    ]  # fmt: skip


def test_one_model_is_as_before(tmp_path: Path):
    for words in (("org/model",), ("--model", "org/model")):
        options = read(*words, "--idle-unload", "5")
        assert options.model == "org/model" and options.models == () and options.model_names == ("org/model",)
        assert options.entries[0].idle_unload == 5.0
    one = read("--model", "chat=org/model", "--prefix-dir", tmp_path)
    assert one.model_names == ("chat",) and one.of(one.entries[0]).prefix_dir == str(tmp_path)
    named = read("org/model", "--served-model-name", "a", "--served-model-name", "b")
    assert named.of(named.entries[0]).model_names == ("a", "b")
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert not is_named(str(odd)) and read("--model", odd).model == str(odd)


def test_a_file(tmp_path: Path):
    file = tmp_path / "models.toml"
    file.write_text(FILE)
    options = read(
        "--models", file, "--model", "more=org/more", "--quantization", "int8", "--idle-unload", "60", "--mtp"
    )
    chat, embed, more = options.models
    assert (chat.names, chat.model, chat.idle_unload) == (("chat", "gpt-4o", "default"), "org/chat", 600)
    assert chat.arguments.quantization == {"format": "int4", "group": 32} and chat.arguments.max_seq_len == 4096
    assert chat.arguments.kv_cache_bytes == "2GiB" and chat.arguments.mtp
    assert (embed.names, embed.idle_unload, embed.load_on_startup) == (("org/embed",), 60.0, False)
    assert embed.arguments.quantization == "int8" and embed.arguments.weights_cache is False
    assert embed.arguments.prompt_lookup and not embed.arguments.mtp  # its own drafter replaces the command line's
    assert more.arguments.quantization == "int8" and not hasattr(more.arguments, "max_seq_len")
    own = options.of(embed)
    assert own.media == () and own.model_names == ("org/embed",) and own.models == () and options.of(chat).media is None


def test_each_model_has_its_own_folder_of_prefixes(tmp_path: Path):
    options = read("--model", "a/b=x", "--model", "..=y", "--prefix-dir", tmp_path)
    folders = [options.of(entry).prefix_dir for entry in options.models]
    assert folders == [tmp_path / "model-a%2Fb", tmp_path / "model-.."]


def test_a_file_of_one_model(tmp_path: Path):
    file = tmp_path / "models.toml"
    file.write_text('[a]\nmodel = "x"\ntask = "embed"\ndimensions = 8\nmax-image-tokens = 64\nlora = ["poet=y"]')
    options = read("--models", file)
    own = options.of(options.entries[0])
    assert (own.task, own.dimensions, own.max_image_tokens, own.lora) == ("embed", 8, 64, (("poet", "y"),))
    assert own.model == "x" and own.model_names == ("a",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("org/model", "--model", "other"), "given twice"),
        (("org/model", "--models", "file.toml"), "given twice"),
        (("--model", "a=x", "--model", "a=y"), "two of them have the name 'a'"),
        (("--model", "=x"), "NAME=MODEL"),
        (("--model", "a=", "--model", "b=x"), "NAME=MODEL"),
        (("--model", "a=x", "--model", "b=y", "--served-model-name", "c"), "served_model_names is for one model"),
        (("--model", "a=x", "--idle-unload", "0"), "idle_unload must be a number of seconds above 0"),
        (("--model", f"{'a' * 200}=x", "--model", "b=y"), "printable characters"),
        (("--models", "/nowhere/models.toml"), "cannot read"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        read(*words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no models"),
        ("[chat", "is not TOML"),
        ('model = "x"', r"\[model\]: must be a table"),
        ('[chat]\ndtype = "float32"', r"\[chat\]: needs model ="),
        ('[chat]\nmodel = "x"\nmax-sequence = 5', r"unknown key max-sequence; did you mean 'max-seq-len'"),
        ('[chat]\nmodel = "x"\nport = 5', "unknown key port"),
        ('[chat]\nmodel = "x"\nnum-threads = 5', "num-threads is for all models"),
        ('[chat]\nmodel = "x"\nmax-seq-len = "many"', "invalid int value"),
        ('[chat]\nmodel = "x"\naliases = "y"', "aliases must be a list"),
        ('[chat]\nmodel = "x"\nidle-unload = "y"', "idle_unload must be a number"),
        ('[chat]\nmodel = "x"\nload-on-startup = 1', "true or false"),
        ('[chat]\nmodel = "x"\naliases = ["y"]\n[y]\nmodel = "z"', "two of them have the name 'y'"),
        ('[llama3.1]\nmodel = "x"', r'write \["llama3.1"\]'),
        ('[chat]\nmodel = "x"\nmtp = true\ndraft = "y"', "not allowed with"),
        ('[chat]\nmodel = "x"\nlora = false', "lora = false: it takes a value"),
        ('[chat]\nmodel = "x"\nmax-seq-len = 5\nmax_seq_len = 6', "a key twice"),
    ],
)
def test_wrong_files(tmp_path: Path, text, message):
    file = tmp_path / "models.toml"
    file.write_text(text)
    with pytest.raises((TypeError, ValueError), match=message):
        read("--models", file)
