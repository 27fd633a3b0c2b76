"""Images of LLaVA-NeXT and LLaVA-OneVision, bit for bit as the PIL image processors of transformers prepare them."""

from __future__ import annotations

from types import SimpleNamespace

import PIL.Image
import pytest
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from pace.llm.processors.llava_next import LlavaNextImageProcessor, LlavaOnevisionImageProcessor
from pace.media.media import MediaError
from tests.llm.processors.images.comparing import (
    SIZES,
    Shape,
    arrays,
    assert_equal,
    check_modes_and_files,
    check_read_back,
    random_sizes,
)
from tests.media.samples import draw, encode

LLAVA_16 = {
    "aspect_ratio_setting": "anyres", "crop_size": {"height": 336, "width": 336}, "do_center_crop": True,
    "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_processor_type": "LlavaNextImageProcessor",
    "image_std": [0.26862954, 0.26130258, 0.27577711], "processor_class": "LlavaNextProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336},
}  # fmt: skip
"""preprocessor_config.json of llava-v1.6-mistral-7b-hf."""
PINPOINTS = [[14, 28], [28, 14], [28, 28], [42, 14], [14, 42]]
SMALL = LLAVA_16 | {
    "crop_size": {"height": 14, "width": 14}, "size": {"shortest_edge": 14}, "image_grid_pinpoints": PINPOINTS,
}  # fmt: skip
VARIANTS = {
    "small": SMALL,
    "stretched": SMALL | {"size": {"height": 14, "width": 14}, "image_grid_pinpoints": [[14, 14], [42, 56]]},
    "not cropped": SMALL | {"size": {"height": 14, "width": 14}, "do_center_crop": False, "do_pad": False},
    "resized twice": SMALL | {"size": {"shortest_edge": 20}, "resample": 2},
    "other levels": SMALL | {"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.003},
}
TOWER = {
    "model_type": "clip_vision_model", "image_size": 14, "patch_size": 4, "hidden_size": 24, "num_attention_heads": 2,
}  # fmt: skip
MODEL = {"vision_config": TOWER, "image_grid_pinpoints": PINPOINTS}


def reference(settings: dict) -> LlavaNextImageProcessorPil:
    """The processor as `LlavaNextProcessor` calls it."""
    names = ("image_processor_type", "processor_class", "aspect_ratio_setting")
    fields = {name: value for name, value in settings.items() if name not in names}
    return LlavaNextImageProcessorPil(**fields | {"do_pad": True})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "not cropped")) for name in VARIANTS]
)
def test_images_of_all_sizes_have_the_bits_of_transformers(name) -> None:
    ours, theirs = LlavaNextImageProcessor.from_dict(VARIANTS[name]), reference(VARIANTS[name])
    images = [draw(*size) for size in SIZES]
    assert_equal(arrays(ours, *images), theirs(images, return_tensors="np"))
    assert_equal(arrays(ours, images[0]), theirs(images[0], return_tensors="np"))


@pytest.mark.thorough
def test_images_of_onevision_have_the_bits_of_transformers() -> None:
    given = {"size": {"height": 14, "width": 14}, "image_grid_pinpoints": PINPOINTS}
    for settings in (given, given | {"crop_size": {"height": 14, "width": 14}, "do_center_crop": True, "resample": 2}):
        ours, theirs = LlavaOnevisionImageProcessor.from_dict(settings), LlavaOnevisionImageProcessorPil(**settings)
        images = [draw(*size) for size in SIZES]
        assert_equal(arrays(ours, *images), theirs(images, return_tensors="np"))
    published = LlavaOnevisionImageProcessor.from_dict({"image_processor_type": "LlavaOnevisionImageProcessor"})
    theirs = LlavaOnevisionImageProcessorPil()
    assert [list(size) for size in published.image_grid_pinpoints] == theirs.image_grid_pinpoints
    tower = TOWER | {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
    ours = published.for_model({"vision_config": tower, "vision_aspect_ratio": "anyres_max_9"})
    whole = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    whole.image_processor, whole.num_image_tokens, whole.vision_aspect_ratio = theirs, 729, "anyres_max_9"
    for height, width in [*random_sizes(700), *SIZES]:
        assert ours.layout(Shape(height, width)).num_tokens == whole._get_number_of_features(height, width, 384, 384)


@pytest.mark.thorough
def test_images_of_all_modes_and_files_have_the_bits_of_transformers() -> None:
    ours, theirs = LlavaNextImageProcessor.from_dict(SMALL), reference(SMALL)
    check_modes_and_files(ours, theirs)


@pytest.mark.parametrize("settings, side, patch", [(LLAVA_16, 336, 14), (SMALL, 14, 4)])
def test_tokens_are_counted_from_the_size(settings, side, patch) -> None:
    tower = TOWER | {"image_size": side, "patch_size": patch}
    model = {"vision_config": tower, "image_grid_pinpoints": settings["image_grid_pinpoints"]}
    ours = LlavaNextImageProcessor.from_dict(settings).for_model(model)
    tokenizer = SimpleNamespace(image_token="<image>", image_token_id=5)
    theirs = LlavaNextProcessor.__new__(LlavaNextProcessor)
    theirs.image_processor, theirs.tokenizer, theirs.patch_size = reference(settings), tokenizer, patch
    theirs.num_additional_image_tokens = 1
    for height, width in [*random_sizes(700), *SIZES, (1, 16384), (16384, 1)]:
        count = theirs._get_number_of_features(height, width, side, side) - 1
        layout = ours.layout(Shape(height, width))
        assert layout.num_tokens == count and layout.text == "<image>" * count, (height, width)


def test_a_limit_of_tokens_leaves_smaller_sizes() -> None:
    tower = TOWER | {"image_size": 336, "patch_size": 14}
    ours = LlavaNextImageProcessor.from_dict(LLAVA_16).for_model({"vision_config": tower})
    counts = [ours.layout(Shape(900, 1000), limit).num_tokens for limit in (None, 10**6, 2879, 2800, 1800)]
    assert counts == [2732, 2732, 2732, 2732, 1224]
    assert ours.least_tokens == 576 + 24 * 49
    for height, width in random_sizes(300):
        assert ours.layout(Shape(height, width), ours.least_tokens).num_tokens <= ours.least_tokens
    small = LlavaNextImageProcessor.from_dict(SMALL).for_model(MODEL)
    for limit in (21, 30, 40):
        media = small.prepare(draw(60, 50), limit)
        assert media.num_tokens == small.layout(draw(60, 50), limit).num_tokens <= limit
        assert len(media.features) == media.grid[0] == 1 + media.canvas[0] * media.canvas[1]
    with pytest.raises(MediaError, match="of 1000 x 900 pixels needs at least 1126 tokens .* may only have 900 tokens"):
        ours.layout(Shape(900, 1000), 900)
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(draw(9, 9), 0)


def test_digests_name_pixels_size_settings_and_tiles() -> None:
    image, made = draw(39, 26), [LlavaNextImageProcessor.from_dict(settings) for settings in VARIANTS.values()]
    assert made[0].prepare(image).digest == made[0].prepare(encode(image, "PNG")).digest
    digests = {processor.prepare(image).digest for processor in made}
    digests |= {
        made[0].prepare(image.transpose(PIL.Image.Transpose.ROTATE_90)).digest,
        made[0].prepare(image, 5).digest,
    }
    assert len(digests) == len(VARIANTS) + 2


def test_settings_written_by_transformers_are_read_back(tmp_path) -> None:
    for settings in (VARIANTS["small"], VARIANTS["stretched"], VARIANTS["other levels"]):
        ours, whole = LlavaNextImageProcessor.from_dict(settings), {"image_token": "<image>", "patch_size": 4}
        check_read_back(tmp_path, "LlavaNextForConditionalGeneration", reference(settings), ours, **whole)


@pytest.mark.parametrize(
    ("settings", "model", "error", "message"),
    [
        ({"image_grid_pinpoints": [[14]]}, {}, ValueError, r"x.json: image_grid_pinpoints must be a list of 1\.\.256"),
        ({"image_grid_pinpoints": []}, {}, ValueError, "image_grid_pinpoints must be a list"),
        ({"image_grid_pinpoints": [[14, 10**6]]}, {}, ValueError, "integers in 1..16384"),
        ({"do_resize": False}, {}, NotImplementedError, "do_resize = False is not implemented"),
        ({"image_processor_type": "CLIPImageProcessor"}, {}, NotImplementedError, "image_processor_type"),
        ({"min_pixels": 4}, {}, NotImplementedError, "the field 'min_pixels' is not implemented"),
        ({}, {"image_grid_pinpoints": [[14, 14]]}, ValueError, "image_grid_pinpoints = .* contradicts the processor's"),
        ({}, {"vision_config": TOWER | {"image_size": 28}}, ValueError, "image_size = 28 contradicts"),
        (
            {"do_center_crop": False, "size": {"shortest_edge": 28}},
            {"vision_config": TOWER | {"image_size": 28}},
            ValueError,
            r"cut tiles of \(14, 14\) pixels, and resize them to \(28, 28\)",
        ),
    ],
)
def test_settings_that_are_refused(settings, model, error, message) -> None:
    with pytest.raises(error, match=message):
        LlavaNextImageProcessor.from_dict(SMALL | settings, "x.json").for_model(MODEL | model)
