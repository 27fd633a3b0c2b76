"""LLaVA-NeXT and LLaVA-OneVision: rows and greedy text about pictures of all shapes are those of transformers. Bits
are the same however they are computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from pace.llm.models.model_list import read_config
from pace.llm.runners import EagerRunner
from tests.llm.models.towers.checks import check_copies_and_codes, check_refused_config, check_rows, load_layers
from tests.llm.models.towers.llava.making import (
    CLIP,
    FULL,
    PATCH,
    SIGLIP,
    rename,
    save_llava,
    save_processor,
)
from tests.llm.models.towers.llava.making import Case as Model
from tests.llm.models.towers.seeing import load, oracle_tokens, results, run, run_to_end
from tests.llm.processors.chatting import picture
from tests.plugins.tiers import sample
from tests.server.schemas.test_media import said, text
from tests.support import backends

SIDE = CLIP["image_size"]
GRANITE = {
    "model_type": "granite", "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
}  # fmt: skip
TWO, FIVE = [[14, 42], [28, 28]], [[14, 28], [28, 14], [28, 28], [42, 14], [14, 42]]
CASES = {
    "mistral": Model("llava_next", {"model_type": "mistral"}, CLIP, {"image_grid_pinpoints": FIVE}),
    "llama": Model(
        "llava_next", {"model_type": "llama"}, CLIP, {"image_grid_pinpoints": TWO, "vision_feature_layer": [1, -1]}
    ),
    "qwen2": Model("llava_next", {"model_type": "qwen2"}, SIGLIP, FULL | {"image_grid_pinpoints": FIVE}),
    "granite": Model(
        "llava_next", GRANITE, SIGLIP,
        FULL | {"image_grid_pinpoints": [[14, 56], [42, 14]], "vision_feature_layer": [-3, -2, -1]},
    ),
    "onevision": Model(
        "llava_onevision", {"model_type": "qwen2"}, SIGLIP,
        {"image_grid_pinpoints": FIVE, "vision_aspect_ratio": "anyres_max_1"},
    ),
    "onevision wide": Model("llava_onevision", {"model_type": "qwen2"}, SIGLIP, {"image_grid_pinpoints": TWO}),
}  # fmt: skip
PICTURES = [picture(20, 33, 1), picture(60, 9, 2), picture(40, 40, 3), picture(1, 90, 4)]
PROMPTS = [("w3 w4 <image> w5", PICTURES[:1]), ("w6 w7", []), ("<image> w8 w9 <image><image>", PICTURES[1:])]
NEW = 24


def save_next(folder: Path, name: str) -> Any:
    """Saves a tiny random model with its processor, in float32, and returns the model."""
    model = save_llava(folder, CASES[name])
    save_processor(folder, CASES[name])
    kind = "LlavaOnevision" if "onevision" in name else "LlavaNext"
    settings = {"image_processor_type": f"{kind}ImageProcessor", **of_images(name)}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def of_images(name: str) -> dict[str, Any]:
    pinpoints, size = CASES[name].fields["image_grid_pinpoints"], {"height": SIDE, "width": SIDE}
    if "onevision" in name:
        return {"size": size, "image_grid_pinpoints": pinpoints}
    return {"size": {"shortest_edge": SIDE}, "crop_size": size, "image_grid_pinpoints": pinpoints}


def their_processor(name: str, tokenizer: Any) -> Any:
    if "onevision" in name:
        images, most = LlavaOnevisionImageProcessorPil(**of_images(name)), CASES[name].fields.get("vision_aspect_ratio")
        with mock.patch.object(LlavaOnevisionProcessor, "check_argument_for_proper_class"):  # it needs torchvision
            made = LlavaOnevisionProcessor(images, tokenizer, None, (SIDE // PATCH) ** 2, "full")
        made.vision_aspect_ratio, made.video_token_id = most or made.vision_aspect_ratio, 97
        return made
    strategy, first = CASES[name].fields.get("vision_feature_select_strategy", "default"), "clip" in str(CASES[name])
    images = LlavaNextImageProcessorPil(**of_images(name))
    return LlavaNextProcessor(images, tokenizer, PATCH, strategy, None, "<image>", int(first))


def inputs_of(processor: Any, prompt: str, images: list) -> dict[str, torch.Tensor]:
    """One prompt with its images, as `apply_chat_template` gives them to the processor."""
    of_prompts = [images] if images else None
    inputs = processor(text=[prompt], images=of_prompts, return_tensors="pt", add_special_tokens=True)
    return {key: value for key, value in inputs.items() if key != "mm_token_type_ids"}


@pytest.mark.parametrize("name", sample(list(CASES), lambda name: name in ("mistral", "onevision")))
def test_answers_about_pictures(name, tmp_path) -> None:
    """Alone, in a batch, in chunks, in chats, and with the tensors of the processor in transformers."""
    oracle, expected = save_next(tmp_path, name), []
    with load(tmp_path) as model:
        theirs = their_processor(name, model.tokenizer)
        for prompt, images in PROMPTS:
            inputs = inputs_of(theirs, prompt, images)
            arrays = theirs.image_processor(images, return_tensors="pt") if images else {}
            for key, array in (model.processor(images=images) if images else {}).items():
                assert torch.equal(torch.from_numpy(array), torch.as_tensor(arrays[key])), key
            expected += run(model, inputs, NEW, ignore_eos=True)
            assert expected[-1][0] == oracle_tokens(oracle, inputs, NEW), prompt
        asked = [{"prompt": prompt, "images": images} for prompt, images in PROMPTS]
        options = {"max_new_tokens": NEW, "ignore_eos": True, "logprobs": 0}
        assert results(model.generate(asked, **options)) == expected
        parts = [text("w3 w4 "), {"type": "image", "image": PICTURES[0]}, text(" w5")]
        assert model.chat(said(parts), max_new_tokens=3, do_sample=False).text
        with pytest.raises(ValueError, match="2 placeholders .* for 1 image"):
            model.generate({"prompt": "<image> typed <image>", "images": PICTURES[:1]}, max_new_tokens=1)
    with load(tmp_path, prefix_cache_bytes=0) as other:
        other._engine.scheduler.max_tokens_per_step = 7
        assert results(other.generate(asked, **options)) == expected


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_rows_are_those_of_transformers(name, tmp_path) -> None:
    """With the names of all versions of transformers, for tiles that are encoded alone and together."""
    oracle = save_next(tmp_path, name)
    with load(tmp_path) as model:
        theirs = their_processor(name, model.tokenizer)
    inputs = theirs(text="<image>" * len(PICTURES), images=PICTURES, return_tensors="pt")
    given = {key: value for key, value in inputs.items() if key not in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = oracle.model.get_image_features(**given, return_dict=True).pooler_output
    check_rows(tmp_path, given, expected)
    for published in (True, False):
        rename(tmp_path, published)
        check_rows(tmp_path, given, expected)


@pytest.mark.thorough
def test_several_images_of_a_conversation_with_onevision_have_a_tile_each(tmp_path) -> None:
    """Also in different turns, and in arrays with `batch_num_images`."""
    oracle = save_next(tmp_path, "onevision")
    with load(tmp_path) as model:
        talk = [
            {"role": "user", "content": [text("w3"), {"type": "image", "image": PICTURES[0]}]},
            {"role": "assistant", "content": "w4"},
            {"role": "user", "content": [{"type": "image", "image": PICTURES[1]}, text("w5")]},
        ]
        theirs = their_processor("onevision", model.tokenizer)
        for turns in (talk[:1], talk):
            inputs = theirs.apply_chat_template(
                turns, model.tokenizer.chat_template, tokenize=True, return_dict=True, return_tensors="pt"
            )
            inputs.pop("mm_token_type_ids", None)
            answer = model.chat(turns, max_new_tokens=NEW, ignore_eos=True, do_sample=False, logprobs=0)
            assert [entry.token for entry in answer.logprobs] == oracle_tokens(oracle, dict(inputs), NEW)
        theirs = their_processor("onevision", model.tokenizer)
        inputs = dict(theirs(text=[PROMPTS[2][0], PROMPTS[0][0]], images=[PICTURES[1:], PICTURES[:1]], padding=True,
                             padding_side="left", return_tensors="pt"))  # fmt: skip
        inputs.pop("mm_token_type_ids", None)
        assert inputs["batch_num_images"].tolist() == [3, 1]
        with torch.no_grad():
            expected = oracle.generate(**inputs, max_new_tokens=NEW, do_sample=False)
        found = model.generate(**inputs, max_new_tokens=NEW, ignore_eos=True).generated_token_ids
        assert found == expected[:, inputs["input_ids"].shape[1] :].tolist()
        with pytest.raises(ValueError, match=r"batch_num_images must be counts with the sum 4; got \[3\]"):
            model.generate(**inputs | {"batch_num_images": torch.tensor([3])})


@pytest.mark.thorough
def test_copies_codes_the_text_alone_and_sessions(tmp_path) -> None:
    save_next(tmp_path / "model", "mistral")
    with load(tmp_path / "model") as model:
        prompt, images = PROMPTS[2]
        asked = {"prompt": prompt, "images": images}
        turn = {"prompt": "<image>w7", "images": images[2:]}
        with model.session() as session:
            session.append(asked)
            session.save(tmp_path / "saved")
            rows = session.append(turn, "all")
        with model.load_session(tmp_path / "saved") as session:
            assert torch.equal(session.append(turn, "all"), rows)
    if "native" in backends():
        check_copies_and_codes(tmp_path / "model", {"inputs": asked}, tmp_path / "copies")
    with load(tmp_path / "model", media=False) as plain, pytest.raises(ValueError, match="takes no images"):
        plain.generate(asked)


def test_blank_images_and_arrays_that_are_refused(tmp_path) -> None:
    save_next(tmp_path, "mistral")
    runner = EagerRunner(load_layers(tmp_path, backends()[-1]))
    tower = runner.towers[0]
    for asked, num_tokens in ((1, 9 + 3 * 7), (32, 9 + 3 * 7), (50, 9 + 9 * 4), (51, 9 + 6 * 7), (999, 9 + 6 * 7)):
        media = tower.blank(asked)
        assert media.num_tokens == len(run_to_end(runner.encode(media))) == num_tokens, asked
    pixels, sizes = torch.zeros(2, 5, 3, SIDE, SIDE), torch.tensor([[20, 20], [9, 20]])
    assert [media.grid[0] for media in tower.read_inputs({"pixel_values": pixels, "image_sizes": sizes})] == [5, 3]
    for wrong, message in (
        ({"image_sizes": None}, "pixel_values and image_sizes; image_sizes is missing"),
        ({"pixel_values": pixels[0]}, r"pixel_values must be floats \[images, tiles, 3, 14, 14\]"),
        ({"pixel_values": pixels.int()}, "pixel_values must be floats"),
        ({"pixel_values": pixels[:, :4]}, "an image of 20 x 20 pixels has 5 tiles; pixel_values has 4"),
        ({"image_sizes": sizes[:1]}, r"image_sizes must be integers \[2, 2\]"),
        ({"image_sizes": sizes.float()}, "image_sizes must be integers"),
        ({"image_sizes": sizes * 0}, "image_sizes must be integers .* from 1 on"),
    ):
        with pytest.raises(ValueError, match=message):
            tower.read_inputs({"pixel_values": pixels, "image_sizes": sizes} | wrong)


# -- config.json

LLAVA_16 = {
    "architectures": ["LlavaNextForConditionalGeneration"], "ignore_index": -100,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]], "image_token_index": 32000,
    "model_type": "llava_next", "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2", "architectures": ["MistralForCausalLM"],
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "torch_dtype": "bfloat16", "vocab_size": 32064,
    },
    "tie_word_embeddings": False, "use_image_newline_parameter": True,
    "vision_config": {
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
}  # fmt: skip
"""config.json of llava-v1.6-mistral-7b-hf."""
GRANITE_VISION = {
    "architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": [[384, 768], [3840, 384]],
    "image_seq_length": 576, "image_token_index": 49155, "model_type": "llava_next", "multimodal_projector_bias": True,
    "projector_hidden_act": "gelu",
    "text_config": {
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_size": 2048, "logits_scaling": 8.0,
        "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "residual_multiplier": 0.22, "rope_theta": 300000, "tie_word_embeddings": True, "vocab_size": 49156,
    },
    "tie_word_embeddings": True, "use_image_newline_parameter": True,
    "vision_config": {
        "hidden_size": 1152, "image_size": 384, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14,
    },
    "vision_feature_layer": [-24, -20, -12, -1], "vision_feature_select_strategy": "full",
}  # fmt: skip
"""The same of granite-vision-3.3-2b, with fewer sizes."""


def test_published_configs(caplog) -> None:
    for fields, expected in (
        (LLAVA_16, ("LlavaNextOfMistral", 23, 64, "quick_gelu", 32000, 4096, False, (23,))),
        (GRANITE_VISION, ("LlavaNextOfGranite", 27, 72, "gelu_tanh", 49155, 2048, True, (4, 8, 16, 27))),
    ):
        model, config = read_config(fields, media=True)
        vision, projector = config.vision, config.projector
        layers = projector.layers(vision.num_hidden_layers)
        found = (model.__name__, max(layers), vision.head_dim, vision.hidden_act, config.image_token_id)
        assert (*found, projector.out_hidden_size, config.tie_word_embeddings, layers) == expected
        assert projector.image_grid_pinpoints == tuple(map(tuple, fields["image_grid_pinpoints"]))
        assert read_config(fields)[1].vision is None
    assert not caplog.records


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    from transformers import AutoConfig

    least = {
        "text_config": {"model_type": "mistral"},
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336},
    }
    whole = AutoConfig.for_model("llava_next", **least).to_dict()
    ours, theirs = (read_config({"model_type": "llava_next"} | fields, media=True)[1] for fields in (least, whole))
    assert (ours.vision, ours.projector, ours.image_token_id) == (
        theirs.vision,
        theirs.projector,
        theirs.image_token_id,
    )


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"image_grid_pinpoints": [[336, 600]]}, NotImplementedError, r"\[336, 600\] is not implemented; .* = 336"),
        ({"image_grid_pinpoints": 5}, ValueError, "image_grid_pinpoints must be a list of 1..256 sizes"),
        ({"vision_feature_select_strategy": "full"}, NotImplementedError, "'full' is not .*; implemented: default"),
        ({"vision_feature_layer": 25}, ValueError, r"vision_feature_layer must be in -25\.\.24; got 25"),
        (
            {"vision_config": {"model_type": "pixtral"}},
            NotImplementedError,
            "'pixtral' is not implemented for LlavaNext",
        ),
        ({"image_token_index": -1}, ValueError, "image_token_index must be a token's id; got -1"),
    ],
)
def test_fields_that_are_refused(fields, error, message) -> None:
    check_refused_config(LLAVA_16 | fields, error, message)


def test_a_tower_without_a_first_row_and_a_text_that_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="'default' is not .* tiles of this tower; implemented: full"):
        read_config(GRANITE_VISION | {"vision_feature_select_strategy": "default"}, media=True)
    with pytest.raises(NotImplementedError, match="'t5' is not .* LlavaNext; implemented: llama, granite, mistral"):
        read_config(LLAVA_16 | {"text_config": {"model_type": "t5"}})
