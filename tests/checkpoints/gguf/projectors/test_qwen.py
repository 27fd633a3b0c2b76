"""mmproj files of Qwen's families, and which file is used. A pair with the GGUF file of a model gives the rows and
texts of the checkpoint that both come from."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.gguf.file import GgufFile
from pace.llm import LLMModel
from pace.ops.weight_layout import WeightLayout
from tests.checkpoints.gguf.files import write_gguf
from tests.checkpoints.gguf.projectors.files import check_damaged_bytes
from tests.checkpoints.gguf.projectors.qwen_files import save_pair, write_mmproj
from tests.checkpoints.gguf.test_refusals import drop, put
from tests.llm.models.towers import hearing, omni, seeing
from tests.llm.models.towers.seeing import results, run_to_end
from tests.llm.models.variants import save_tiny
from tests.llm.processors.chatting import picture
from tests.support import backends
from tests.waiting import cpu_limit

BACKEND = "native" if "native" in backends() else "torch"
SMALL = {"progress": False, "weights_cache": False, "kv_cache_bytes": "16MiB", "backend": BACKEND, "num_threads": 1}


def load(path: Path, **options) -> LLMModel:
    return LLMModel(path, **{"dtype": "float32", **SMALL, **options})


def inputs_of(model_type: str) -> dict:
    if model_type == "qwen3_asr":
        return hearing.inputs_of([150, 20])
    if model_type == "qwen3_omni_moe":
        return omni.inputs_of([(4, 6), 150])
    if model_type == "qwen2_5_vl":  # more than one window
        inputs = seeing.inputs_of([[(32, 20), (2, 4)]])
        return inputs | {"pixel_values": torch.randn(648, 3 * 2 * 14**2)}
    return seeing.inputs_of([[(4, 6), (8, 4)], [(2, 2)]])


def rows_of(model: LLMModel, inputs: dict) -> list[torch.Tensor]:
    runner = model._engine.model
    return [
        run_to_end(runner.encode(media))
        for tower in runner.towers
        for media in tower.read_inputs({name: inputs[name] for name in tower.input_names})
    ]


MODELS = [
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_asr", "qwen3_omni_moe"),
    pytest.param("qwen3_5", marks=pytest.mark.rotates),
    pytest.param("qwen3_5_moe", marks=pytest.mark.rotates),
]


@pytest.mark.parametrize("model_type", MODELS)
def test_rows_and_texts_are_those_of_the_checkpoint(model_type, tmp_path, caplog):
    hub, path, mmproj = save_pair(tmp_path, model_type)
    inputs = inputs_of(model_type)
    with caplog.at_level(logging.WARNING, "pace"), load(hub) as expected, load(path, mmproj=mmproj) as model:
        assert type(model._model) is type(expected._model)
        rows = rows_of(expected, inputs)
        assert len(rows) >= 2 and all(map(torch.equal, rows_of(model, inputs), rows))
        found, same = (results(one.generate(**inputs, max_new_tokens=24, logprobs=0)) for one in (model, expected))
        if not model_type.startswith("qwen3_5"):
            assert found == same
        for (tokens, logprobs), (others, bits) in zip(found, same, strict=True):
            assert tokens == others
            # A file of Qwen3.5 has its value heads in another order, and sums of some 100 terms in fp32 with it.
            np.testing.assert_allclose(logprobs, bits, rtol=0, atol=100 * 2**-24 * 16)
    assert "ignored" not in caplog.text and "mmproj" not in caplog.text


@pytest.mark.parametrize("types", ["F16", "BF16", "Q8_0"])
def test_other_types_of_weights(types, tmp_path):
    """The tiny weights are numbers of bfloat16, which F16 and BF16 hold. Q8_0 stays as it is stored."""
    hub, path, mmproj = save_pair(tmp_path, "qwen3_vl", types)
    with GgufCheckpoint(path) as reader:
        reader.add_towers(mmproj)
        stored = {"F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": WeightLayout("int8", 32)}[types]
        assert reader.tensors["visual.merger.linear_fc1.weight"].dtype == stored
    inputs = inputs_of("qwen3_vl")
    with load(hub) as exact, load(path) as model:
        for found, expected in zip(rows_of(model, inputs), rows_of(exact, inputs), strict=True):
            error = (found - expected).abs().max() / expected.abs().max()
            assert 0 < error < 0.03 if types == "Q8_0" else error < 1e-6, error


def test_an_image_in_a_prompt(tmp_path):
    """Settings of the processor come from the mmproj file, and the placeholder's id from the vocabulary."""
    hub, path, _ = save_pair(tmp_path, "qwen3_vl")
    image = picture(40, 24)
    with load(path) as model, load(hub) as expected:
        processor = model._generator.encoder.all.image
        assert (processor.patch_size, processor.merge_size, processor.temporal_patch_size) == (4, 2, 2)
        assert (processor.min_pixels, processor.max_pixels) == (1 << 16, 1 << 24)
        assert processor.image_mean == (0.5, 0.4578275, 0.40821073)
        assert processor.image_std == (0.5, 0.26130258, 0.27577711)
        text = "abc<|vision_start|><|image_pad|><|vision_end|>xyz"
        arrays = model.processor(images=[image])
        count = 25 * 42  # 40 x 24 pixels become 336 x 200
        tokens = model.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count))["input_ids"]
        assert tokens.count(seeing.IMAGE) == count and len(tokens) == count + 7  # ab is one
        found = model.generate({"prompt": text, "images": [image]}, max_new_tokens=16)
        same = expected.generate(input_ids=torch.tensor([tokens]), **arrays, max_new_tokens=16)
        assert found.generated_token_ids == same.generated_token_ids


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen3_omni_moe"])
def test_sizes_of_images_of_other_families(model_type, tmp_path):
    """The sizes are those of the published checkpoints, unless the file states others."""
    _, path, _ = save_pair(tmp_path, model_type)
    with load(path) as model:
        processors = model._generator.encoder.all.of_kind
        assert (processors["image"].min_pixels, processors["image"].max_pixels) == (3136, 12845056)
        assert "audio" not in processors or processors["audio"].feature_size == hearing.MELS
    write_mmproj(
        tmp_path / "hub", tmp_path / "mmproj-model.gguf", add=put("clip.vision.image_max_pixels", 4096, "uint32")
    )
    with load(path) as model:
        processor = model._generator.encoder.all.image
        assert (processor.min_pixels, processor.max_pixels) == (3136, 4096)


def exchanged(writer) -> None:
    """Exchanges the two matrices of an MLP, as the first converters did."""
    [tensors] = writer.tensors
    names = {
        name: re.sub("ffn_(up|down)", lambda part: {"up": "ffn_down", "down": "ffn_up"}[part[1]], name)
        for name in tensors
    }
    writer.tensors = [{names[name]: info for name, info in tensors.items()}]


def test_files_of_the_first_converters(tmp_path):
    hub, path, mmproj = save_pair(tmp_path, "qwen2_vl", add=exchanged)
    assert GgufFile(mmproj).tensors["v.blk.0.ffn_down.weight"].shape == (48, 16)
    inputs = inputs_of("qwen2_vl")
    with load(hub) as expected, load(path) as model:
        assert all(map(torch.equal, rows_of(model, inputs), rows_of(expected, inputs)))


# -- which file --------------------------------------------------------------------------------------------------------


def kinds(path: Path, **options) -> list[str]:
    with load(path, **options) as model:
        return [tower.kind for tower in model._model.towers]


def test_the_file_in_the_folder_is_used(tmp_path, caplog):
    _, path, mmproj = save_pair(tmp_path, "qwen3_vl")
    assert kinds(path) == ["image"] and kinds(path, media=False) == []
    other = tmp_path / "elsewhere.gguf"
    mmproj.rename(other)
    assert kinds(path) == [] and kinds(path, mmproj=other) == ["image"]
    assert not caplog.records
    missing = f"takes no images: {path.name} has no tower, and no mmproj file was found; .* such as mmproj-F16.gguf, "
    with load(path) as model:
        with pytest.raises(ValueError, match=missing):
            model.generate({"prompt": "a<|image_pad|>", "images": [picture(8, 8)]})
        with pytest.raises(
            ValueError, match="was loaded without a tower.*leave out pixel_values; .*no mmproj file was"
        ):
            model.generate({"input_ids": torch.tensor([[5]]), "pixel_values": torch.zeros(4, 4)})
    with load(path, media=False) as model, pytest.raises(ValueError, match="takes no images$"):
        model.generate({"prompt": "a<|image_pad|>", "images": [picture(8, 8)]})


def test_a_file_in_the_folder_that_does_not_belong_to_the_model(tmp_path, caplog):
    """It is left out with a warning that names it, and others are tried."""
    _, path, mmproj = save_pair(tmp_path / "vl", "qwen3_vl")
    save_pair(tmp_path / "asr", "qwen3_asr")
    beside = path.parent / "mmproj-a.gguf"
    shutil.copy(tmp_path / "asr/mmproj-model.gguf", beside)
    assert kinds(path) == ["image"] and not caplog.records  # the clip's tower is first in the alphabet
    mmproj.unlink()
    with caplog.at_level(logging.WARNING, "pace"):
        assert kinds(path) == []
    assert "this model takes no images or sound: " in caplog.text
    assert f"{beside} does not belong to {path}: it has 0 layers of deepstack, and the model 2" in caplog.text
    with (
        load(path) as model,
        pytest.raises(ValueError, match=f"no images: mmproj-a.gguf does not belong to {path.name}; "),
    ):
        model.generate({"prompt": "a<|image_pad|>", "images": [picture(8, 8)]})


def test_the_command_line(tmp_path, capsys):
    from pace.cli import main

    _, path, mmproj = save_pair(tmp_path, "qwen3_vl")
    other, image = tmp_path / "towers.gguf", tmp_path / "image.png"
    mmproj.rename(other)
    picture(40, 24).save(image)
    options = ["--dtype", "float32", "--num-threads", "1", "--max-new-tokens", "4"]
    asked = ["generate", "-m", str(path), "ab<|image_pad|>", "--image", str(image), *options]
    assert main(asked) == 1 and "takes no images" in capsys.readouterr().err
    assert main([*asked, "--mmproj", str(other)]) == 0 and capsys.readouterr().out.strip()
    plan = ["plan", str(path), "--no-sample", "--json"]
    for more, count in (([], 0), (["--mmproj", str(other)], 1)):
        assert main([*plan, *more]) == 0
        assert {len(one["towers"]) for one in json.loads(capsys.readouterr().out)["plans"]} == {count}
    assert main([*plan, "--mmproj", str(path)]) == 1 and "and no mmproj file" in capsys.readouterr().err
    assert main(["plan", "llama-3.2-1b", "--mmproj", str(other)]) == 1 and "is a shape" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", str(path), "--mmproj", str(other), "--media", "none", "--port", "0"])
    assert "must not be given with media=False" in capsys.readouterr().err


# -- refusals ----------------------------------------------------------------------------------------------------------

WRONG = [
    (drop("clip.projector_type"), ValueError, "has no clip.projector_type"),
    (put("clip.projector_type", "ldpv2", "string"), NotImplementedError, "projector type 'ldpv2' .*: qwen2vl_m"),
    (put("clip.projector_type", "qwen2vl_merger", "string"), ValueError,
     "mmproj-model.gguf has qwen2vl_merger, and does not belong to .*model.gguf, whose architecture is 'qwen3vl'"),
    (put("clip.has_vision_encoder", False, "bool"), ValueError, "has no tower, and does not belong to"),
    (put("clip.vision.projection_dim", 64, "uint32"), ValueError,
     "belongs to another model: its rows have 64 numbers .clip.vision.projection_dim., and those of .*model.gguf 32"),
    *[
        (drop(f"clip.vision.{key}"), ValueError, f"has no clip.vision.{key}")
        for key in ("embedding_length", "block_count", "attention.head_count", "patch_size", "projection_dim",
                    "image_mean", "image_std")
    ],
    (put("clip.vision.block_count", 5, "uint32"), ValueError, r"missing .*visual\.blocks\.4\."),
    (put("clip.vision.block_count", 3, "uint32"), ValueError, r"deepstack_visual_indexes must be below depth, 3"),
    (put("clip.vision.block_count", "4", "string"), ValueError, r"block_count must be an integer; got '4'"),
    (put("clip.vision.embedding_length", 32, "uint32"), ValueError, "has shape .*the config demands"),
    (put("clip.vision.image_mean", [0.5], "array"), ValueError, "mmproj-model.gguf: image_mean must be a number"),
    (put("clip.vision.patch_size", 8, "uint32"), ValueError, "has shape .*the config demands"),
    (put("general.architecture", "qwen3vl", "string"), ValueError, "is a model .* and no mmproj file"),
    (lambda writer: writer.tensors[0].pop("v.patch_embd.weight.1"), ValueError, "no tensor v.patch_embd.weight.1"),
    (lambda writer: writer.tensors[0].pop("v.blk.0.ffn_up.weight"), ValueError, "no tensor v.blk.0.ffn_up.weight"),
    (lambda writer: writer.tensors[0].pop("mm.2.bias"), ValueError, r"missing \(1\): visual.merger.linear_fc2.bias"),
    (lambda writer: writer.add_tensor("v.new", np.ones(3, np.float32)), ValueError, r"unexpected \(1\): v.new"),
]  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), "qwen3_vl")


@pytest.mark.parametrize(("change", "error", "message"), WRONG)
def test_what_a_file_must_not_say(change, error, message, pair, tmp_path):
    hub, path, _ = pair
    mmproj = tmp_path / "mmproj-model.gguf"
    write_mmproj(hub, mmproj, add=change)
    with pytest.raises(error, match=message) as raised:
        load(path, mmproj=mmproj)
    assert str(mmproj) in str(raised.value)


@pytest.mark.alone
def test_wrong_pairs(pair, tmp_path):
    """Each is refused by name, and fast."""
    hub, path, mmproj = pair
    text, cut, plain = (tmp_path / name for name in ("note.txt", "cut.gguf", "llama.gguf"))
    text.write_text("not a model")
    cut.write_bytes(mmproj.read_bytes()[:-5])
    save_tiny(tmp_path / "llama", "llama", {})
    write_gguf(tmp_path / "llama", plain)
    unnamed = tmp_path / "unnamed.gguf"
    write_gguf(hub, unnamed)
    cases = [
        (path, path, "model.gguf is a model of the architecture 'qwen3vl', and no mmproj file"),
        (mmproj, None, "is an mmproj file, which has only the towers of a model; give the GGUF file of the model"),
        (mmproj, mmproj, "is an mmproj file, which has only the towers of a model"),
        (path, text, "note.txt is not a GGUF file"),
        (path, cut, "cut.gguf is truncated or damaged"),
        (path, tmp_path / "absent.gguf", "absent.gguf"),
        (plain, mmproj, "has qwen3vl_merger, and does not belong to .*llama.gguf"),
        (hub, mmproj, "mmproj-model.gguf' has the towers of a GGUF file, and .*hub is not a GGUF file"),
        (unnamed, mmproj, "unnamed.gguf has no token <.image_pad.> in its vocabulary.*mmproj-model.gguf"),
    ]
    for model, other, message in cases:
        with cpu_limit(10, message), pytest.raises((ValueError, FileNotFoundError), match=message):
            load(model, mmproj=other)
    for options, error in (({"mmproj": 3}, TypeError), ({"mmproj": mmproj, "media": False}, ValueError)):
        with pytest.raises(error, match="mmproj must"):
            load(path, **options)


def test_damaged_bytes_give_one_clear_error_or_run(pair):
    check_damaged_bytes(*pair[1:])
