"""Images of Mistral 3 and Pixtral, bit for bit as `PixtralImageProcessorPil` of transformers prepares them, and their
text in a prompt."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import PIL.Image
import pytest
from transformers.models.pixtral import image_processing_pil_pixtral as pil

from pace.llm.processors.pixtral import PixtralImageProcessor
from pace.llm.processors.processor import Processors
from pace.llm.processors.prompts import MediaPart, PromptEncoder
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from pace.tokenizer.loading import load_tokenizer
from tests.llm.models.towers.llava.making import (
    CASES,
    IMAGE,
    LLAVA_SETTINGS,
    PIXTRAL_SETTINGS,
    save_processor,
    whole_pixtral,
)
from tests.llm.processors.images.comparing import (
    Shape,
    arrays,
    assert_equal,
    check_modes_and_files,
    check_read_back,
    random_sizes,
)
from tests.media.samples import draw, encode

MISTRAL_SMALL = {
    "crop_size": None, "data_format": "channels_first", "default_to_square": True, "device": None,
    "disable_grouping": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "PixtralImageProcessorFast", "image_std": [0.26862954, 0.26130258, 0.27577711],
    "input_data_format": None, "patch_size": {"height": 14, "width": 14}, "processor_class": "PixtralProcessor",
    "resample": 3, "rescale_factor": 0.00392156862745098, "return_tensors": None, "size": {"longest_edge": 1540},
}  # fmt: skip
VARIANTS = {
    "small": (PIXTRAL_SETTINGS, 4, 2),
    "pixtral": ({"size": {"longest_edge": 64}}, 16, 1),
    "both sides": ({"size": {"height": 50, "width": 33}, "resample": 2}, 5, 1),
    "other levels": ({"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.003, "size": 90}, 3, 3),
}
"""Settings, patches and merges."""
SIZES = [(1, 1), (1, 2), (2, 1), (32, 32), (33, 32), (40, 41), (64, 65), (39, 2), (3, 90), (33, 700), (257, 255)]


def make(name: str) -> PixtralImageProcessor:
    settings, patch, merge = VARIANTS[name]
    config = {"spatial_merge_size": merge, "vision_config": {"patch_size": patch, "model_type": "pixtral"}}
    return PixtralImageProcessor.from_dict(settings).for_model(
        {"architectures": ["Mistral3ForConditionalGeneration"]} | config
    )


def reference(name: str, **changes) -> pil.PixtralImageProcessorPil:
    """The image processor as the whole processor calls it: with patches of tokens."""
    settings, patch, merge = VARIANTS[name]
    given = {key: value for key, value in settings.items() if value is not None}
    return pil.PixtralImageProcessorPil(
        **given | {"patch_size": {"height": patch * merge, "width": patch * merge}} | changes
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_images_of_all_sizes_have_the_bits_of_transformers(name):
    ours, theirs = make(name), reference(name)
    for size in SIZES:
        assert_equal(arrays(ours, draw(*size)), theirs(draw(*size), return_tensors="np"))
    images = [draw(*size) for size in SIZES]
    assert_equal(arrays(ours, *images), theirs(images, return_tensors="np"))


@pytest.mark.thorough
def test_images_of_all_modes_and_files_have_the_bits_of_transformers():
    ours, theirs = make("small"), reference("small")
    check_modes_and_files(ours, theirs)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_text_of_an_image_is_that_of_transformers(name, tmp_path):
    save_processor(tmp_path, CASES["mistral3"])
    ours, tokenizer = make(name), load_tokenizer(tmp_path)
    _, patch, merge = VARIANTS[name]
    whole = SimpleNamespace(
        patch_size=patch, spatial_merge_size=merge, image_token="[IMG]", image_break_token="[IMG_BREAK]",
        image_end_token="[IMG_END]",
    )  # fmt: skip
    theirs, encoder = reference(name), PromptEncoder(Processors(ours), tokenizer)
    replace_image_token = whole_pixtral().replace_image_token
    for size in SIZES:
        images = [draw(*size), draw(30, 20)]
        sizes = theirs(images)
        first, second = (replace_image_token(whole, sizes, index) for index in (0, 1))
        prompt = encoder.encode("w9[IMG] w7[IMG]", [MediaPart("image", image) for image in images], tokenizer)
        assert prompt.tokens == tokenizer(f"w9{first} w7{second}")["input_ids"], size
        media = ours.prepare(images[0])
        assert prompt.counted[0].runs == media.runs and sum(media.runs) == media.num_tokens
        assert prompt.counted[0].num_tokens == prompt.tokens.count(IMAGE) - prompt.counted[1].num_tokens
        for run in prompt.runs:
            assert prompt.tokens[run.start : run.start + run.length] == [IMAGE] * run.length


def test_sizes_of_a_published_checkpoint():
    ours = PixtralImageProcessor.from_dict(MISTRAL_SMALL).for_model(
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "vision_config": {"patch_size": 14, "model_type": "pixtral"},
        }
    )
    assert (ours.patch, ours.merge, ours.size) == (14, 2, (1540, 1540))
    for height, width in random_sizes(500):
        shape = np.broadcast_to(np.zeros(3, np.uint8), (height, width, 3))
        expected = pil.get_resize_output_image_size(shape, 1540, 28, "channels_last")
        if not min(expected):  # transformers fails
            with pytest.raises(MediaError, match="too long and thin"):
                ours.layout(shape)
            continue
        assert ours.target_size(height, width) == expected, (height, width)
        assert ours.layout(shape).runs == (expected[1] // 28,) * (expected[0] // 28)
    assert ours.layout(Shape(1024, 1024)).num_tokens == 37 * 37 and ours.layout(Shape(3000, 4000)).num_tokens == 55 * 42


def test_a_limit_of_tokens_lowers_the_longest_edge():
    ours = make("pixtral")
    for limit in (1, 2, 5, 12, 10**6):
        for height, width in [(64, 64), (300, 200), (17, 90), (600, 599), (5, 5)]:
            size = ours.target_size(height, width, limit)
            edge = next(
                edge
                for edge in range(64, 0, -1)
                if np.prod(pil.get_resize_output_image_size(np.zeros((height, width, 3)), edge, 16, "channels_last"))
                <= limit * 256
            )
            expected = pil.get_resize_output_image_size(np.zeros((height, width, 3)), edge, 16, "channels_last")
            assert size == expected and size[0] * size[1] <= limit * 256
    media = ours.prepare(draw(300, 200), 6)
    assert media.runs == (3, 3)
    assert_equal(
        ours.arrays([media]), reference("pixtral", size={"longest_edge": 48})(draw(300, 200), return_tensors="np")
    )
    with pytest.raises(MediaError, match="an image of 600 x 20 pixels needs more tokens, but may only have 1 token"):
        ours.prepare(draw(600, 20), 1)
    with pytest.raises(MediaError, match="too long and thin: 6400 x 9 pixels"):
        ours.layout(Shape(9, 6400))
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(draw(9, 9), 0)


def test_digests_name_pixels_size_and_settings():
    ours, image = make("small"), draw(39, 26)
    digest = ours.prepare(image).digest
    for same in (np.asarray(image), encode(image, "PNG"), image.copy()):
        assert ours.prepare(same).digest == digest
    different = [
        ours.prepare(PIL.Image.frombytes("RGB", (26, 39), image.tobytes())),
        ours.prepare(image, 4),
        *(make(name).prepare(image) for name in ("pixtral", "both sides")),
    ]
    assert len({digest, *(media.digest for media in different)}) == 5


def test_settings_written_by_transformers_are_read_back(tmp_path):
    for name, (settings, _, _) in VARIANTS.items():
        ours, whole = PixtralImageProcessor.from_dict(settings), {"spatial_merge_size": 2}
        check_read_back(tmp_path, "Mistral3ForConditionalGeneration", reference(name), ours, **whole)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"size": {"shortest_edge": 4}}, ValueError, "x.json: size must be an object with longest_edge"),
        ({"size": {"longest_edge": 0}}, ValueError, "size must be an object"),
        ({"size": {"height": 9}}, ValueError, "size must be an object"),
        ({"size": {"longest_edge": 5, "height": 9}}, ValueError, "size must be an object"),
        ({"do_resize": False}, NotImplementedError, "do_resize = False is not implemented"),
        ({"do_pad": False}, NotImplementedError, "do_pad"),
        ({"do_center_crop": True}, NotImplementedError, "do_center_crop"),
        ({"image_processor_type": "CLIPImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"min_pixels": 4}, NotImplementedError, "the field 'min_pixels' is not implemented"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        PixtralImageProcessor.from_dict(settings, "x.json")


def test_names_of_tokens_are_those_of_the_whole_processor(tmp_path):
    vision = {"model_type": "pixtral", "patch_size": 4}
    config = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": vision}
    names = {"image_token": "<i>", "image_break_token": "<b>", "image_end_token": None}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXTRAL_SETTINGS))
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "PixtralProcessor", **names}))
    found = load_processors(tmp_path, config).image
    assert (found.token, found.marker, found.placeholder) == ("<i>",) * 3
    assert found.layout(draw(12, 8)).text == "<i><i><i><b><i><i><i>[IMG_END]"
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(LLAVA_SETTINGS))
    square = config | {"vision_config": {"image_size": 14, "patch_size": 7}}
    found = load_processors(tmp_path, square).image
    assert found.layout(draw(12, 8)).text == "<i>" * 4 and found.placeholder == found.marker == "<i>"
    for wrong in ("", 3, {"content": "<i>"}):
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_token": wrong}))
        with pytest.raises(ValueError, match="processor_config.json: image_token must be the text of a token; got"):
            load_processors(tmp_path, square)


@pytest.mark.parametrize(
    "names",
    [
        {"model_type": "mistral3"},
        {"architectures": None, "model_type": "mistral3"},
        {"architectures": ["Mistral3Model"]},
        {"architectures": ["OtherModel", "Mistral3ForConditionalGeneration"]},
    ],
)
def test_the_processor_is_that_of_the_model_however_it_is_named(names, tmp_path):
    config = {**names, "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral", "patch_size": 4}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PIXTRAL_SETTINGS))
    assert load_processors(tmp_path, config).image.unit == 8
