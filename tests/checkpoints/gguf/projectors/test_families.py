"""mmproj files of families other than Qwen's. A pair with the GGUF file of a model gives the rows and texts of the
checkpoint that both come from."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.processors.prompts import MediaPart
from pace.llm.processors.registry import make_processors
from pace.ops.weight_layout import WeightLayout
from tests.checkpoints.gguf.projectors.checkpoints import SOUND, SOUNDS
from tests.checkpoints.gguf.projectors.files import FAMILIES, STATISTICS, check_damaged_bytes, save_pair
from tests.checkpoints.gguf.projectors.test_qwen import load
from tests.checkpoints.gguf.test_refusals import drop, put
from tests.llm.models.towers.seeing import results, run_to_end
from tests.llm.processors.chatting import picture
from tests.plugins.tiers import sample

ALL = sorted(FAMILIES)


IMAGE = picture(40, 24)


def rows_of(model, media) -> torch.Tensor:
    return run_to_end(model._engine.model.encode(media))


def tokens_of(model, text: str) -> list[int]:
    """Ids of a prompt with one image."""
    return model._generator.encoder.encode(text, [MediaPart("image", IMAGE)], model.tokenizer).tokens


def check_pair(folder, family: str, **fields) -> None:
    """Checks rows and texts of a pair. `fields` are merged into those of config.json."""
    hub, path, mmproj = save_pair(folder, family, **fields)
    with load(hub) as expected, load(path, mmproj=mmproj) as model:
        assert type(model._model) is type(expected._model)
        assert model._model.whole_media == expected._model.whole_media
        processor = model._generator.encoder.all.image
        media = processor.prepare(IMAGE)
        rows = rows_of(model, media)
        assert len(rows) == media.num_tokens and torch.equal(rows, rows_of(expected, media))
        text = f"ab{processor.placeholder}xyz"
        found = model.generate({"prompt": text, "images": [IMAGE]}, max_new_tokens=12, logprobs=0)
        inputs = {"input_ids": torch.tensor([tokens_of(model, text)]), **model.processor(images=[IMAGE])}
        assert results(found) == results(expected.generate(inputs, max_new_tokens=12, logprobs=0))


@pytest.mark.parametrize("family", sample(ALL, always=lambda family: family in ("gemma4_unified", "mistral3")))
def test_rows_and_texts_are_those_of_the_checkpoint(family, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        check_pair(tmp_path, family)
    assert "ignored" not in caplog.text and "mmproj" not in caplog.text


OTHER_FIELDS = [
    ("gemma4", {"text_config": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99,
                                "use_bidirectional_attention": None}}),
    ("gemma4", {"vision_config": {"use_clipped_linears": False, "standardize": False}}),
    ("internvl", {"vision_config": {"norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False}}),
    ("internvl", {"text_config": {"model_type": "qwen3", "head_dim": 8}}),
    ("lfm2_vl", {"projector_use_layernorm": False, "projector_bias": False}),
    ("llava", {"text_config": {"model_type": "qwen2"}}),
    ("mistral3", {"multimodal_projector_bias": True}),
    ("paddleocr_vl", {"vision_config": {"image_size": 32}}),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "fields"), OTHER_FIELDS)
def test_other_configs(family, fields, tmp_path):
    """What a file says by having a tensor or not, or by the shape of one."""
    check_pair(tmp_path, family, **fields)


@pytest.mark.parametrize("types", ["F16", pytest.param("BF16", marks=pytest.mark.rotates), "Q8_0"])
def test_other_types_of_weights(types, tmp_path):
    """The tiny weights are numbers of bfloat16, which F16 and BF16 hold. Q8_0 stays as it is stored, with the rows of
    queries and keys in the Hub's order."""
    wide = {"vision_config": {"hidden_size": 64, "intermediate_size": 96}}
    hub, path, mmproj = save_pair(tmp_path, "mistral3", types, **wide)
    with GgufCheckpoint(path) as reader:
        reader.add_towers(mmproj)
        stored = {"F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": WeightLayout("int8", 32)}[types]
        assert reader.tensors["vision_tower.transformer.layers.0.attention.q_proj.weight"].dtype == stored
    with load(hub) as exact, load(path) as model:
        media = model._generator.encoder.all.image.prepare(IMAGE)
        found, expected = rows_of(model, media), rows_of(exact, media)
    error = (found - expected).abs().max() / expected.abs().max()
    # Steps of 1/127 in each of 3 blocks and 3 matrices after them. Rows in another order give more than 0.5.
    assert 0 < error < 6 * 2 / 127 if types == "Q8_0" else error < 1e-6, error


SETTINGS = {
    "gemma3": {"size": 32, "mm_tokens_per_image": 4},
    "idefics3": {"size": 96, "max_image_size": 32},
    "internvl": {"size": 32, "max_patches": 6},
    "lfm2_vl": {"encoder_patch_size": 4, "min_image_tokens": 64, "max_image_tokens": 256},
    "llava": {"size": 32, "crop_size": (32, 32)},
    "mistral3": {"size": (32, 32), "patch": 4, "merge": 2},
    "paddleocr_vl": {"min_pixels": 64, "max_pixels": 4096, "merge_size": 2},
}


@pytest.mark.parametrize("family", sample(list(SETTINGS), always=lambda family: family == "idefics3"))
def test_settings_of_processors(family, tmp_path):
    """They come from the file, and from the family's published checkpoints."""
    _, path, mmproj = save_pair(tmp_path, family)
    with GgufCheckpoint(path) as reader:
        reader.add_towers(mmproj)
        towers = reader.towers
    read = lambda section: (towers.settings[section], "file")
    processor = make_processors(towers.config["architectures"][0], towers.config, read).image
    assert {name: getattr(processor, name) for name in SETTINGS[family]} == SETTINGS[family]
    assert [list(processor.image_mean), list(processor.image_std)] == list(STATISTICS)


def test_a_vocabulary_without_the_placeholder(tmp_path):
    """The converter leaves out Gemma 3's. It takes the place of an unused token there; other families need theirs."""
    _, path, _ = save_pair(tmp_path / "gemma3", "gemma3", placeholder="<unused7>")
    with load(path) as model, load(path, media=False) as text:
        assert model._model.towers[0].placeholder == 90
        assert model.tokenizer("<image_soft_token>!")["input_ids"] == [90, 0]
        assert model.tokenizer("<start_of_image>")["input_ids"] == text.tokenizer("<start_of_image>")["input_ids"]
        assert text.tokenizer("<unused7>")["input_ids"] == [90]
        tokens = tokens_of(model, "ab<start_of_image>")
        assert tokens.count(90) == 4
    _, path, mmproj = save_pair(tmp_path / "llava", "llava", placeholder="<unused7>")
    with pytest.raises(ValueError, match="has no token <image> in its vocabulary"):
        load(path, mmproj=mmproj)


def test_epsilon_that_the_converter_makes_up(tmp_path):
    """It writes 1e-5 where config.json of SmolVLM states nothing, whose default is 1e-6."""
    epsilons = []
    for value in (1e-5, 2e-5):
        add = put("clip.vision.attention.layer_norm_epsilon", value, "float32")
        _, path, mmproj = save_pair(tmp_path / str(value), "idefics3", add=add)
        with GgufCheckpoint(path) as reader:
            reader.add_towers(mmproj)
            epsilons.append(reader.config["vision_config"]["layer_norm_eps"])
    assert epsilons == [1e-6, 2e-5]


def sound_of(family: str, **fields) -> dict:
    """Fields of config.json for a tower for sound; none for families that may not have one."""
    return {"audio_config": SOUNDS[family] | fields, "audio_token_id": SOUND} if family in SOUNDS else {}


CLIP = np.random.default_rng(3).uniform(-0.5, 0.5, 9000).astype(np.float32)


PLAIN = {"use_clipped_linears": False}


@pytest.mark.parametrize(
    ("family", "audio"),
    [("gemma4", {}), pytest.param("gemma4", PLAIN, marks=pytest.mark.thorough), ("gemma4_unified", {})],
)
def test_sound_of_gemma_4(family, audio, tmp_path, caplog):
    """Rows are those of the checkpoint, bit for bit, and so are texts."""
    hub, path, mmproj = save_pair(tmp_path, family, **sound_of(family, **audio))
    with caplog.at_level(logging.WARNING, "pace"), load(hub) as expected, load(path, mmproj=mmproj) as model:
        assert [tower.kind for tower in model._model.towers] == ["image", "audio"]
        media = model._generator.encoder.all.audio.prepare(CLIP)
        rows = rows_of(model, media)
        assert len(rows) == media.num_tokens > 12 and torch.equal(rows, rows_of(expected, media))
        text = "ab<|audio|>xyz"
        found = model.generate({"prompt": text, "audio": [CLIP]}, max_new_tokens=12, logprobs=0)
        tokens = model._generator.encoder.encode(text, [MediaPart("audio", CLIP)], model.tokenizer).tokens
        inputs = {"input_ids": torch.tensor([tokens]), **model.processor(audio=[CLIP])}
        assert results(found) == results(expected.generate(inputs, max_new_tokens=12, logprobs=0))
    assert "ignored" not in caplog.text and "mmproj" not in caplog.text


WRONG = [
    ("gemma3", drop("clip.vision.image_size"), ValueError, "has no clip.vision.image_size"),
    ("gemma3", put("clip.vision.projection_dim", 64, "uint32"), ValueError, "its rows have 64 numbers"),
    ("gemma3", put("clip.projector_type", "idefics3", "string"), ValueError,
     "has idefics3, and does not belong to .*'gemma3'"),
    ("llava", put("clip.vision.feature_layer", [1, 2], "array"), NotImplementedError, r"feature_layer = \[1, 2\]"),
    ("llava", put("clip.vision.image_grid_pinpoints", [1, 2], "array"), NotImplementedError, "LLaVA-NeXT has it"),
    ("llava", lambda writer: writer.tensors[0].pop("mm.2.weight"), ValueError, "no tensor mm.2.weight"),
    ("llava", lambda writer: writer.tensors[0].pop("v.class_embd"), ValueError, "no tensor v.class_embd"),
    ("mistral3", put("clip.vision.attention.head_count", 5, "uint32"), ValueError, "head"),
    ("paddleocr_vl", drop("clip.vision.image_max_pixels"), ValueError, "has no clip.vision.image_max_pixels"),
    ("gemma4", lambda writer: writer.tensors[0].pop("v.blk.0.attn_q.weight"), ValueError, "no tensor v.blk.0.attn_q"),
]  # fmt: skip


WRONG_SOUND = [
    (drop("clip.audio.num_mel_bins"), "has no clip.audio.num_mel_bins"),
    (put("clip.audio.projection_dim", 64, "uint32"), "its rows have 64 numbers"),
    (lambda writer: writer.tensors[0].pop("a.conv1d.1.weight"), "no tensor a.conv1d.1.weight"),
    (lambda writer: writer.tensors[0].pop("a.blk.1.per_dim_scale.weight"), r"missing \(1\): .*per_dim_scale"),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("change", "message"), WRONG_SOUND)
def test_what_a_file_with_sound_must_have(change, message, tmp_path):
    _, path, mmproj = save_pair(tmp_path, "gemma4", add=change, **sound_of("gemma4"))
    with pytest.raises(ValueError, match=message):
        load(path, mmproj=mmproj)


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "change", "error", "message"), WRONG)
def test_what_a_file_must_not_say(family, change, error, message, tmp_path):
    _, path, mmproj = save_pair(tmp_path, family, add=change)
    with pytest.raises(error, match=message) as raised:
        load(path, mmproj=mmproj)
    assert str(mmproj) in str(raised.value)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ALL)
def test_damaged_bytes_give_one_clear_error_or_run(family, tmp_path):
    _, path, mmproj = save_pair(tmp_path, family, **sound_of(family))
    check_damaged_bytes(path, mmproj)
