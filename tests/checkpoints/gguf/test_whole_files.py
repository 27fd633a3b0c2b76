"""The bundled model as GGUF files: their locations, shards, and the texts that they give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.assets import TINY
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.checkpoint import Checkpoint, read_config_json, read_generation_config
from pace.llm.loading.find import find_checkpoint
from pace.tokenizer.loading import load_tokenizer
from tests.checkpoints.gguf.files import add_tokenizer, write_gguf
from tests.llm.models.variants import save_tiny


def tiny(path, types="F16", add=lambda writer: None, **options):
    """Writes the bundled model as a file, including its tokenizer."""

    def everything(writer):
        add_tokenizer(writer, load_tokenizer(TINY), "gpt-2")
        add(writer)

    write_gguf(TINY, path, types, everything, **options)
    return path


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    tiny(folder / "tiny.gguf", tensors_a_shard=20)
    return folder


def test_shards_are_one_model(shards, tiny_file):
    names = sorted(path.name for path in shards.iterdir())
    assert names == [f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    with GgufCheckpoint(tiny_file) as one:
        for name in names:
            with GgufCheckpoint(shards / name) as reader:
                assert reader.config == one.config and reader.tensors.keys() == one.tensors.keys()
                assert all(torch.equal(reader.read(tensor), one.read(tensor)) for tensor in one.tensors)
            assert find_checkpoint(shards / name) == shards / names[0]
    assert find_checkpoint(shards) == shards / names[0]


def test_shards_have_the_digest_of_the_whole_file(shards, tiny_file):
    found = set()
    for path in (tiny_file, find_checkpoint(shards)):
        checkpoint = Checkpoint(path)
        checkpoint.open_weights(None)
        found.add(checkpoint.digest(path, 1))
    assert len(found) == 1


def copied(shards, folder, rename=lambda name: name):
    folder.mkdir()
    for path in shards.iterdir():
        (folder / rename(path.name)).write_bytes(path.read_bytes())
    return folder


def test_shards_that_do_not_belong_together(shards, tmp_path):
    less = copied(shards, tmp_path / "less")
    (less / "tiny-00002-of-00003.gguf").unlink()
    for where in (less, less / "tiny-00003-of-00003.gguf"):
        with pytest.raises(FileNotFoundError, match="one of 3 shards; missing in .*: tiny-00002-of-00003.gguf"):
            find_checkpoint(where)
    swapped = copied(
        shards,
        tmp_path / "swapped",
        lambda name: name.replace("00001-", "00009-").replace("00002-", "00001-").replace("00009-", "00002-"),
    )
    with pytest.raises(
        ValueError, match="tiny-00001-of-00003.gguf is shard 2 of 3 by its metadata .*shard 1 of 3 by its name"
    ):
        LLMModel(swapped)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes((shards / "tiny-00001-of-00003.gguf").read_bytes())
    with pytest.raises(ValueError, match="alone.gguf is shard 1 of 3 by its metadata"):
        LLMModel(alone)
    twice = copied(shards, tmp_path / "twice")
    first, second, third = (twice / f"tiny-{number:05}-of-00003.gguf" for number in (1, 2, 3))
    content = first.read_bytes()
    place = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    first.write_bytes(content[:place] + b"\x07" + content[place + 1 :])
    with pytest.raises(ValueError, match="announces 7 tensors .*, but its 3 shards have 47"):
        LLMModel(twice)
    first.write_bytes(content[:place] + b"\x3c" + content[place + 1 :])  # 20 + 20 + 20
    third.write_bytes(second.read_bytes().replace(b"split.no\x02\0\0\0\1\0", b"split.no\x02\0\0\0\2\0"))
    with pytest.raises(ValueError, match="tensor .* is in both .*00002-of.* and .*00003-of"):
        LLMModel(twice)
    wrong = tmp_path / "x-00004-of-00003.gguf"
    wrong.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="has the name of shard 4 of 3"):
        find_checkpoint(wrong)


def test_where_a_file_may_be(tiny_file, tmp_path):
    assert find_checkpoint(tiny_file) == tiny_file and find_checkpoint(str(tiny_file)) == tiny_file
    assert find_checkpoint(tiny_file.parent) == tiny_file
    blob = tmp_path / "sha256-abc"
    blob.symlink_to(tiny_file)
    assert find_checkpoint(blob) == blob and read_config_json(blob)["vocab_size"] == 2048
    with pytest.raises(ValueError, match="revision='x' was given, but .* is a local file"):
        find_checkpoint(tiny_file, revision="x")
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf", "b-00001-of-00002.gguf", "b-00002-of-00002.gguf"):
        (several / name).write_bytes(b"GGUF")
    with pytest.raises(
        ValueError,
        match="has several GGUF files .a-Q4_0.gguf, a-Q8_0.gguf, b-00001-of-00002.gguf.; give the path of one",
    ):
        find_checkpoint(several)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (several / name).write_bytes((TINY / name).read_bytes())
    assert find_checkpoint(several) == several, "a checkpoint of the Hub beside them is what the directory is"
    (several / "model.safetensors").unlink()
    assert find_checkpoint(several, weights=False) == several, "its tokenizer"
    with pytest.raises(ValueError, match="has several GGUF files"):
        find_checkpoint(several)


def test_generation_defaults(tiny_file):
    assert read_generation_config(tiny_file) == {}
    config = read_config_json(tiny_file)
    # The file names one end of texts, <|end|>; <|eos|> is not among the ends that are known by their names.
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [7], 0)


def test_ends_of_texts_by_their_names(tmp_path, caplog):
    """Ends of texts are known by name for every type. The types are corrected, with a warning. </s> is also HTML, so it
    is an end only as a control token."""
    tokens = ["<unk>", "a", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "b", "</s>"]

    def add(writer):
        writer.add_token_list(tokens)
        writer.add_token_types([2, 1, 3, 3, 1, 1, 4])
        writer.add_eos_token_id(2)
        writer.add_eom_token_id(5)

    save_tiny(tmp_path / "hub", "llama", {})
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf", add=add)
    assert read_config_json(tmp_path / "model.gguf")["eos_token_id"] == [2, 5, 3, 4]
    assert "marks '<|eot_id|>' as ordinary text; treating them as separate tokens (1 in all)" in caplog.text


CHAT = [{"role": "user", "content": "Tell me a story about a little fox."}]
GREEDY, SHORT = (SamplingConfig(max_new_tokens=count, do_sample=False) for count in (60, 20))


def answers(path, dtype="float32", config=GREEDY, **options):
    with LLMModel(path, dtype=dtype, num_threads=1, progress=False, **options) as model:
        prompts = [
            model.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False),
            model.tokenizer("Once upon a time")["input_ids"],
        ]
        return model.generate(prompts, config).generated_token_ids


def test_greedy_texts_are_those_of_the_checkpoint(tiny_file, tmp_path):
    """F16 holds the bundled model's bfloat16 weights, which are neither large nor very small; so does F32."""
    expected = answers(TINY)
    assert len(expected[0]) > 20
    assert answers(tiny_file) == expected
    assert answers(tiny(tmp_path / "f32.gguf", "F32")) == expected
    assert answers(tiny(tmp_path / "bf16.gguf", "BF16"), "bfloat16") == answers(TINY, "bfloat16")


@pytest.fixture(scope="module", params=["Q8_0", "Q4_0"])
def tiny_quantised(request, tmp_path_factory):
    """The bundled model quantised, and a checkpoint in the Hub's format with the file's weights."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp(request.param)
    held = write_gguf(
        TINY, folder / "tiny.gguf", request.param, lambda writer: add_tokenizer(writer, load_tokenizer(TINY), "gpt-2")
    )
    hub = folder / "hub"
    hub.mkdir()
    for file in TINY.glob("*.json*"):
        (hub / file.name).write_bytes(file.read_bytes())
    (hub / "chat_template.jinja").write_bytes((TINY / "chat_template.jinja").read_bytes())
    save_file(held, hub / "model.safetensors")
    return folder / "tiny.gguf", hub


def test_quantised_texts_are_those_of_the_weights(tiny_quantised):
    path, hub = tiny_quantised
    assert answers(path, config=SHORT, backend="torch") == answers(hub, config=SHORT, backend="torch")


def test_quantised_texts_on_the_kernels(tiny_quantised):
    """The kernels' rounding of activations changes a greedy text only if two tokens are about equally likely."""
    path, hub = tiny_quantised
    with (
        LLMModel(path, num_threads=1, progress=False) as ours,
        LLMModel(hub, dtype="float32", num_threads=1, progress=False) as exact,
    ):
        ids = exact.generate("Once upon a time", GREEDY).output_token_ids[0].tolist()
        [found], [expected] = (model.score([ids]) for model in (ours, exact))
        assert (found - expected).abs().mean() < 0.02 and found.mean() > -0.5
        report = ours.memory_report()
        assert report.weights.keys() == exact.memory_report().weights.keys()
        assert sum(report.weights.values()) < sum(exact.memory_report().weights.values()) / (
            3.4 if "Q8" in str(path) else 5.5
        )
        assert (
            "Tokyo"
            in ours.generate(
                ours.tokenizer.apply_chat_template(
                    [{"role": "user", "content": "What is the capital of Japan?"}],
                    tokenize=False,
                    add_generation_prompt=True,
                ).removeprefix("<|bos|>"),
                GREEDY,
            ).texts[0]
        )


def test_the_torch_backend_too(tiny_file):
    assert answers(tiny_file, config=SHORT, backend="torch") == answers(TINY, config=SHORT, backend="torch")


def test_the_command_line_takes_files(tiny_file, capsys):
    from pace.cli import main

    for arguments in (["generate", "--chat", "What is the capital of Japan?", "--dtype", "float32"], ["plan"]):
        model = ["--model", str(tiny_file)] if arguments[0] == "generate" else [str(tiny_file)]
        assert main([arguments[0], *model, *arguments[1:]]) == 0
        assert ("Tokyo" if arguments[0] == "generate" else "float32") in capsys.readouterr().out


def test_a_vocabulary_is_forgotten_once_it_is_read(tiny_file):
    """The tokenizer and the weights are unchanged afterwards."""
    checkpoint = Checkpoint(tiny_file)
    tokenizer = checkpoint.load_tokenizer()
    expected = tokenizer("Once upon a time")["input_ids"]
    checkpoint.forget_vocabulary()
    metadata = checkpoint.gguf.metadata
    assert not any(isinstance(value, (list, np.ndarray)) for value in metadata.values())
    assert metadata["general.architecture"] == "llama" and checkpoint.config["vocab_size"] == 2048
    assert tokenizer("Once upon a time")["input_ids"] == expected
    assert checkpoint.open_weights(None).read("model.norm.weight").isfinite().all()
