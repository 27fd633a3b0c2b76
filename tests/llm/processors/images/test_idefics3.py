"""Images of Idefics3 and SmolVLM, bit for bit as `Idefics3ImageProcessorPil` of transformers prepares them, and their
text in a prompt."""

from __future__ import annotations

import json

import numpy as np
import PIL.Image
import pytest
from transformers.image_utils import SizeDict
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from pace.llm.processors.idefics3 import Idefics3ImageProcessor
from pace.llm.processors.processor import Processors
from pace.llm.processors.prompts import MediaPart, PromptEncoder
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from pace.tokenizer.loading import load_tokenizer
from tests.llm.models.towers.tiles.making import MODELS, SETTINGS, save_processor
from tests.llm.processors.images.comparing import arrays, assert_equal, check_modes_and_files, random_sizes
from tests.media.samples import draw, encode
from tests.plugins.tiers import sample

SMOLVLM_256M = {
    "do_convert_rgb": True, "do_image_splitting": True, "do_normalize": True, "do_pad": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Idefics3ImageProcessor",
    "image_std": [0.5, 0.5, 0.5], "max_image_size": {"longest_edge": 512}, "processor_class": "Idefics3Processor",
    "resample": 1, "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 2048},
}  # fmt: skip
SMALL = SETTINGS["idefics3"]
VARIANTS = {
    "small": SMALL,
    "tiles that do not divide the longest edge": SMALL | {"size": {"longest_edge": 91}},
    "an odd longest edge, less than a tile": SMALL | {"size": {"longest_edge": 15}},
    "one tile": SMALL | {"do_image_splitting": False},
    "other levels": SMALL | {"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.003, "resample": 3},
}
SIZES = [(1, 1), (1, 2), (2, 1), (24, 24), (25, 24), (24, 49), (70, 72), (200, 1), (1, 200), (33, 2000), (257, 255)]


def reference(settings: dict) -> Idefics3ImageProcessorPil:
    return Idefics3ImageProcessorPil(**{name: value for name, value in settings.items() if name != "video_sampling"})


@pytest.mark.parametrize("name", sample(list(VARIANTS), lambda name: name == "small"))
def test_images_of_all_sizes_have_the_bits_of_transformers(name):
    ours, theirs = Idefics3ImageProcessor.from_dict(VARIANTS[name]), reference(VARIANTS[name])
    for size in SIZES:
        assert_equal(arrays(ours, draw(*size)), theirs(draw(*size), return_tensors="np"))
    images = [draw(*size) for size in SIZES[3:8]]
    assert_equal(arrays(ours, *images), theirs(images, return_tensors="np"))


def test_images_of_all_modes_and_files_have_the_bits_of_transformers():
    ours, theirs = Idefics3ImageProcessor.from_dict(SMALL), SmolVLMImageProcessorPil(**SMALL)
    check_modes_and_files(ours, theirs)


@pytest.mark.thorough
def test_a_published_checkpoint():
    image, config = draw(100, 80), {"scale_factor": 4, "vision_config": {"patch_size": 16, "image_size": 512}}
    ours = Idefics3ImageProcessor.from_dict(SMOLVLM_256M).for_model(config)
    media = ours.prepare(image)
    assert media.runs == (64,) * 17 and media.grid == (17, 32, 32), "enlarged to 2048 x 1638 pixels"
    assert_equal(ours.arrays([media]), reference(SMOLVLM_256M)(image, return_tensors="np"))


@pytest.mark.parametrize("name", sample(list(VARIANTS), lambda name: name == "small"))
def test_the_text_of_an_image_is_that_of_transformers(name, tmp_path):
    save_processor(tmp_path, "idefics3")
    tokenizer = load_tokenizer(tmp_path)
    ours, image_processor = Idefics3ImageProcessor.from_dict(VARIANTS[name]), reference(VARIANTS[name])
    theirs = Idefics3Processor(image_processor, load_tokenizer(tmp_path), image_seq_len=ours.image_seq_len)
    encoder = PromptEncoder(Processors(ours), tokenizer)
    for number, size in enumerate(SIZES):
        image, text = draw(*size), "w9<image>" + "\n" * (number % 3) + "w7 <image>"
        expected = theirs(text=text, images=[image, draw(30, 20)])["input_ids"][0]
        prompt = encoder.encode(text, [MediaPart("image", image), MediaPart("image", draw(30, 20))], tokenizer)
        assert prompt.tokens == expected, size
        assert prompt.counted[0].runs == ours.prepare(image).runs
        for run in prompt.runs:
            assert prompt.tokens[run.start : run.start + run.length] == [90] * ours.image_seq_len


class Sizes(Idefics3ImageProcessorPil):
    """Computes sizes, and no pixels."""

    def resize(self, image, size, resample=None):
        edge = size.longest_edge
        height, width = get_resize_output_image_size(image, edge) if edge else (size.height, size.width)
        return np.broadcast_to(np.zeros((3, 1, 1), np.uint8), (3, height, width))


@pytest.mark.parametrize("name", ["small", "tiles that do not divide the longest edge"])
def test_tiles_are_counted_from_the_size(name):
    settings, sizes = VARIANTS[name], Sizes()
    ours = Idefics3ImageProcessor.from_dict(settings)
    for height, width in random_sizes(1000):
        image = np.broadcast_to(np.zeros((3, 1, 1), np.uint8), (3, height, width))
        image = sizes.resize_for_vision_encoder(sizes.resize(image, SizeDict(**settings["size"])), ours.max_image_size)
        _, rows, columns = sizes.split_images(image, settings["max_image_size"])
        assert ours.tiling(height, width)[1:] == (rows, columns), (height, width)


def test_a_limit_of_tokens_lowers_the_longest_edge():
    ours, image = Idefics3ImageProcessor.from_dict(SMALL), draw(90, 60)
    count = ours.image_seq_len
    for limit, edge, tiles in ((None, 72, 7), (7 * count, 72, 7), (7 * count - 1, 48, 5), (count, 24, 1)):
        media = ours.prepare(image, limit)
        assert len(media.runs) == tiles and media.runs == ours.layout(image, limit).runs
        expected = reference(SMALL | {"size": {"longest_edge": edge}})(image, return_tensors="np")
        assert_equal(ours.arrays([media]), expected)
    with pytest.raises(MediaError, match=f"needs at least {count} tokens, those of a tile, but may only have 5 tokens"):
        ours.layout(image, 5)
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(image, 0)


def test_digests_name_pixels_size_and_settings():
    ours, image = Idefics3ImageProcessor.from_dict(SMALL), draw(96, 64)
    digest = ours.prepare(image).digest
    assert digest == ours.prepare(encode(image, "PNG")).digest == ours.prepare(image, 5000).digest
    turned = PIL.Image.frombytes("RGB", (64, 96), image.tobytes())
    changed = Idefics3ImageProcessor.from_dict(SMALL | {"image_mean": 0.4})
    others = [ours.prepare(turned), ours.prepare(image, 1000), changed.prepare(image), ours.prepare(draw(96, 64, 1))]
    assert len({digest, *(media.digest for media in others)}) == 5


def test_processors_of_an_architecture(tmp_path):
    config = {"architectures": ["SmolVLMForConditionalGeneration"]} | MODELS["smolvlm"]
    for settings in (SETTINGS["smolvlm"], SETTINGS["idefics3"]):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
        ours = load_processors(tmp_path, config).image
        assert (ours.image_seq_len, ours.tile_patches) == (9, 6)
    nested = {"image_processor": SMALL | {"max_image_size": {"longest_edge": 8}}, "image_seq_len": 1}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert load_processors(tmp_path, config).image.image_seq_len == 1


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"size": {"height": 4, "width": 4}}, ValueError, "x.json: size must be an object with longest_edge"),
        ({"size": {"longest_edge": 5000}}, ValueError, r"size must be .* in 1\.\.4096; got"),
        ({"max_image_size": 24}, ValueError, "max_image_size must be an object with longest_edge"),
        ({"do_image_splitting": 1}, ValueError, "do_image_splitting must be true or false"),
        ({"do_resize": False}, NotImplementedError, "do_resize = False is not implemented"),
        ({"do_pad": False}, NotImplementedError, "do_pad"),
        ({"image_processor_type": "SiglipImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"patch_size": 14}, NotImplementedError, "the field 'patch_size' is not implemented"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        Idefics3ImageProcessor.from_dict(settings, "x.json")


def test_tiles_that_the_tower_cannot_take():
    config = MODELS["idefics3"]
    for edge in (3, 12 * 2 + 4):
        ours = Idefics3ImageProcessor.from_dict(SMALL | {"max_image_size": {"longest_edge": edge}})
        with pytest.raises(
            ValueError, match=f"longest_edge = {edge} has {edge // 4} patches of 4 pixels; .* scale_factor, 2"
        ):
            ours.for_model(config)
