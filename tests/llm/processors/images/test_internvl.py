"""Images of InternVL, bit for bit as `GotOcr2ImageProcessorPil` of transformers prepares them."""

from __future__ import annotations

import io

import numpy as np
import PIL.Image
import pytest
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from pace.llm.processors.internvl import InternVLImageProcessor
from pace.media.media import MediaError
from tests.llm.processors.images.comparing import SIZES, Shape, random_sizes
from tests.media.samples import draw, files, modes

PUBLISHED = {
    "crop_size": None, "crop_to_patches": False, "data_format": "channels_first", "default_to_square": True,
    "device": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.485, 0.456, 0.406], "image_processor_type": "GotOcr2ImageProcessorFast",
    "image_std": [0.229, 0.224, 0.225], "input_data_format": None, "max_patches": 12, "min_patches": 1,
    "processor_class": "InternVLProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "return_tensors": None, "size": {"height": 448, "width": 448},
}  # fmt: skip
"""preprocessor_config.json of InternVL3-1B-hf."""
SMALL = PUBLISHED | {"size": {"height": 28, "width": 28}}
SETTINGS = {
    "published": SMALL,
    "some tiles": SMALL | {"min_patches": 3, "max_patches": 7, "resample": 2},
    "one tile": SMALL | {"max_patches": 1},
    "none": SMALL | {"min_patches": 5, "max_patches": 4, "image_mean": 0.4, "image_std": 0.3},
}
TOWER = {"vision_config": {"image_size": 448, "patch_size": 14}, "downsample_ratio": 0.5}


def reference(settings: dict) -> GotOcr2ImageProcessorPil:
    """The processor with what `InternVLProcessor` sets."""
    fields = {
        name: value for name, value in settings.items() if name not in ("image_processor_type", "processor_class")
    }
    return GotOcr2ImageProcessorPil(**fields | {"crop_to_patches": True})


def assert_equal(ours: InternVLImageProcessor, theirs: GotOcr2ImageProcessorPil, *sources, given=None) -> None:
    media = [ours.prepare(source) for source in sources]
    expected = theirs(given or list(sources), return_tensors="np")
    assert [medium.grid[0] for medium in media] == list(expected["num_patches"])
    found, wanted = ours.arrays(media)["pixel_values"], np.asarray(expected["pixel_values"])
    assert found.dtype == wanted.dtype and np.array_equal(found, wanted)
    assert [ours.layout(source).runs for source in sources] == [medium.runs for medium in media]


@pytest.mark.parametrize("name", SETTINGS)
def test_images_of_all_sizes_have_the_bits_of_transformers(name) -> None:
    ours, theirs = InternVLImageProcessor.from_dict(SETTINGS[name]), reference(SETTINGS[name])
    assert_equal(ours, theirs, *[draw(*size) for size in SIZES])


def test_images_of_all_modes_and_files_have_the_bits_of_transformers() -> None:
    ours, theirs = InternVLImageProcessor.from_dict(SMALL), reference(SMALL)
    for name, image in modes().items():
        if name != "La":  # has no RGB form
            assert_equal(ours, theirs, image)
    for name, data in files().items():
        if "extras" not in name:  # these are turned
            assert_equal(ours, theirs, data, given=[PIL.Image.open(io.BytesIO(data))])


@pytest.mark.parametrize("name", ["published", "some tiles"])
def test_tiles_are_counted_from_the_size(name) -> None:
    ours, theirs = InternVLImageProcessor.from_dict(SETTINGS[name]), reference(SETTINGS[name])
    for height, width in [*random_sizes(700), (28, 56), (56, 28), (39, 78), (40, 79), (40, 80)]:
        tiles = theirs.get_number_of_image_patches(height, width)
        layout = ours.layout(Shape(height, width))
        assert layout.num_tokens == tiles * ours.tokens_per_tile, (height, width)
        assert layout.text == f"<img>{'<IMG_CONTEXT>' * layout.num_tokens}</img>" and len(layout.runs) == 1


def test_a_limit_of_tokens_lowers_the_tiles() -> None:
    ours = InternVLImageProcessor.from_dict(PUBLISHED).for_model(TOWER)
    assert (ours.tokens_per_tile, ours.tile_patches) == (256, 32)
    found = [ours.layout(Shape(900, 1800), limit).num_tokens for limit in (None, 10**6, 2560, 1280, 800, 767, 511, 256)]
    assert found == [9 * 256, 9 * 256, 9 * 256, 3 * 256, 3 * 256, 256, 256, 256]
    for height, width in random_sizes(300):
        assert ours.layout(Shape(height, width), 1280).num_tokens <= 1280
    with pytest.raises(MediaError, match="at least 256 tokens, those of a tile, but may only have 255 tokens"):
        ours.layout(Shape(9, 9), 255)
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(Shape(9, 9), 0)


def test_digests_tell_images_and_settings_apart() -> None:
    small = InternVLImageProcessor.from_dict(SMALL)
    others = [InternVLImageProcessor.from_dict(SMALL | {"resample": 2}), small]
    images = [draw(60, 40), draw(60, 40, seed=1), draw(40, 60)]
    digests = {processor.prepare(image).digest for processor in others for image in images}
    digests.add(small.prepare(images[0], 256 * 3).digest)
    assert len(digests) == 7 and small.prepare(images[0]).digest in digests


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"size": {"height": 448, "width": 224}}, ValueError, "size must be an object with equal height and width"),
        ({"size": {"shortest_edge": 448}}, ValueError, "size must be an object with equal height and width"),
        ({"max_patches": 0}, ValueError, r"max_patches must be an integer in 1\.\.256"),
        ({"do_resize": False}, NotImplementedError, "do_resize = False is not implemented"),
        (
            {"image_processor_type": "CLIPImageProcessor"},
            NotImplementedError,
            "image_processor_type = .*: 'GotOcr2ImageProcessor'",
        ),
        ({"use_thumbnail": False}, NotImplementedError, "the field 'use_thumbnail' is not implemented"),
    ],
)
def test_settings_that_are_refused(fields, error, message) -> None:
    with pytest.raises(error, match=f"preprocessor_config.json: {message}"):
        InternVLImageProcessor.from_dict(PUBLISHED | fields)


def test_tiles_that_the_tower_cannot_take() -> None:
    small = InternVLImageProcessor.from_dict(SMALL)
    assert small.for_model(TOWER).tokens_per_tile == 1 and small.for_model({}) == small
    for ratio, patch in ((0.25, 14), (0.5, 15), (0.5, 29)):
        with pytest.raises(ValueError, match="size has [0-9] patches of .* needs a multiple of"):
            small.for_model({"vision_config": {"patch_size": patch}, "downsample_ratio": ratio})
