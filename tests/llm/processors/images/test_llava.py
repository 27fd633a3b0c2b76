"""Images of LLaVA, bit for bit as the PIL image processors of transformers prepare them."""

from __future__ import annotations

import json

import numpy as np
import PIL.Image
import pytest
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pace.llm.processors.llava import LlavaImageProcessor
from pace.llm.processors.pixtral import PixtralImageProcessor
from pace.llm.processors.processor import Processors
from pace.llm.processors.prompts import MediaPart, PromptEncoder
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from pace.tokenizer.loading import load_tokenizer
from tests.llm.models.towers.llava.making import CASES, LLAVA_SETTINGS, PATCH, PIXTRAL_SETTINGS, save_processor
from tests.llm.processors.images.comparing import Shape, arrays, assert_equal, check_modes_and_files, check_read_back
from tests.media.samples import draw, encode

LLAVA_15 = {
    "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "CLIPImageProcessor", "image_std": [0.26862954, 0.26130258, 0.27577711],
    "processor_class": "LlavaProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}  # fmt: skip
VARIANTS = {
    "clip": (CLIPImageProcessorPil, LLAVA_SETTINGS),
    "clip stretched": (CLIPImageProcessorPil, {"size": {"height": 20, "width": 30}, "do_center_crop": False}),
    "clip with edges": (CLIPImageProcessorPil, {"size": 11, "crop_size": 20, "resample": 2}),
    "clip with edges of an odd number": (
        CLIPImageProcessorPil, {"size": {"height": 11, "width": 25}, "crop_size": {"height": 20, "width": 18}}
    ),
    "square": (
        LlavaImageProcessorPil, LLAVA_SETTINGS | {"image_processor_type": "LlavaImageProcessor", "do_pad": True}
    ),
    "siglip": (
        SiglipImageProcessorPil, {"image_processor_type": "SiglipImageProcessor", "size": {"height": 14, "width": 14}}
    ),
    "other levels": (
        CLIPImageProcessorPil,
        LLAVA_SETTINGS | {"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.003},
    ),
}  # fmt: skip
SIZES = [(1, 1), (1, 2), (2, 1), (14, 14), (15, 14), (39, 26), (2, 90), (257, 255), (33, 200)]


def reference(name: str):
    kind, settings = VARIANTS[name]
    return kind(**{key: value for key, value in settings.items() if key != "image_processor_type"})


@pytest.mark.parametrize("name", VARIANTS)
def test_images_of_all_sizes_have_the_bits_of_transformers(name):
    ours, theirs = LlavaImageProcessor.from_dict(VARIANTS[name][1]), reference(name)
    images = [draw(*size) for size in SIZES]
    assert_equal(arrays(ours, *images), theirs(images, return_tensors="np"))


@pytest.mark.thorough
def test_images_of_all_modes_and_files_have_the_bits_of_transformers():
    ours, theirs = LlavaImageProcessor.from_dict(LLAVA_SETTINGS), reference("clip")
    check_modes_and_files(ours, theirs)


@pytest.mark.parametrize("name", ["llava", "llava full", "siglip", "siglip qwen3"])
def test_the_text_of_an_image_is_that_of_transformers(name, tmp_path):
    case = CASES[name]
    save_processor(tmp_path, case)
    strategy = case.fields.get("vision_feature_select_strategy", "default")
    whole = {"vision_config": case.vision, "vision_feature_select_strategy": strategy}
    tokenizer, ours = load_tokenizer(tmp_path), LlavaImageProcessor.from_dict(LLAVA_SETTINGS).for_model(whole)
    theirs = LlavaProcessor(
        reference("clip"), load_tokenizer(tmp_path), patch_size=PATCH, vision_feature_select_strategy=strategy,
        num_additional_image_tokens=int("clip" in case.vision["model_type"]),
    )  # fmt: skip
    images, text = [draw(30, 20), draw(8, 80)], "w9<image> w7<image>"
    prompt = PromptEncoder(Processors(ours), tokenizer).encode(
        text, [MediaPart("image", one) for one in images], tokenizer
    )
    assert prompt.tokens == theirs(text=text, images=images)["input_ids"][0]
    assert [run.length for run in prompt.runs] == [ours.num_tokens] * 2 == [case.num_tokens] * 2


def test_a_published_checkpoint(tmp_path):
    vision = {
        "model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "num_attention_heads": 16,
        "hidden_size": 1024, "vocab_size": 32000,
    }  # fmt: skip
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": vision}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(LLAVA_15))
    ours = load_processors(tmp_path, config).image
    media = ours.prepare(draw(640, 480))
    assert media.num_tokens == ours.layout(draw(9, 7)).num_tokens == 576 and media.grid == (1, 24, 24)
    with pytest.raises(ValueError, match=r"vision_config.image_size = 384 contradicts .* have the size \(336, 336\)"):
        ours.for_model({"vision_config": vision | {"image_size": 384}})
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXTRAL_SETTINGS))
    pixtral = {"model_type": "pixtral", "patch_size": 6}
    found = load_processors(tmp_path, config | {"vision_config": pixtral}).image
    assert isinstance(found, PixtralImageProcessor) and (found.patch, found.merge) == (6, 1)


def test_images_that_are_refused():
    ours = LlavaImageProcessor.from_dict(LLAVA_15).for_model(
        {"vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}}
    )
    with pytest.raises(MediaError, match="576 tokens in this model, whatever its size, but may only have 256"):
        ours.layout(draw(9, 9), 256)
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(draw(9, 9), 0)
    padded = LlavaImageProcessor.from_dict(VARIANTS["square"][1])
    for processor, shape in ((ours, Shape(1, 400)), (padded, Shape(10, 6400))):
        with pytest.raises(MediaError, match="too large or too long and thin"):
            processor.layout(shape)


def test_digests_name_pixels_size_and_settings():
    image = draw(39, 26)
    made = [LlavaImageProcessor.from_dict(settings) for _, settings in VARIANTS.values()]
    digest = made[0].prepare(image).digest
    assert digest == made[0].prepare(np.asarray(image)).digest == made[0].prepare(encode(image, "PNG")).digest
    other = PIL.Image.frombytes("RGB", (26, 39), image.tobytes())
    digests = [made[0].prepare(other).digest, *(processor.prepare(image).digest for processor in made)]
    assert len(set(digests)) == len(VARIANTS) + 1


def test_settings_written_by_transformers_are_read_back(tmp_path):
    for name, (_, settings) in VARIANTS.items():
        ours, whole = LlavaImageProcessor.from_dict(settings), {"num_additional_image_tokens": 1}
        check_read_back(tmp_path, "LlavaForConditionalGeneration", reference(name), ours, **whole)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"size": {"shortest_edge": 4, "longest_edge": 9}}, ValueError, "x.json: size must be an object with shortest"),
        ({"size": {"height": 9}}, ValueError, "size must be an object"),
        ({"crop_size": {"height": 9}}, ValueError, "crop_size must be an object with height and width"),
        ({"do_resize": False}, NotImplementedError, "do_resize = False is not implemented"),
        ({"do_pad": True}, NotImplementedError, "do_pad = True is not implemented for CLIPImageProcessor"),
        ({"image_processor_type": "ViTImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"min_pixels": 4}, NotImplementedError, "the field 'min_pixels' is not implemented"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        LlavaImageProcessor.from_dict({"image_processor_type": "CLIPImageProcessor"} | settings, "x.json")
