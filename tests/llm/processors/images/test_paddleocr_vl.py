"""Images of PaddleOCR-VL, bit for bit as `PaddleOCRVLImageProcessorPil` of transformers prepares them."""

from __future__ import annotations

import pytest
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

from pace.llm.processors.paddleocr_vl import PaddleOCRVLImageProcessor
from pace.media.media import MediaError
from tests.llm.processors.images.comparing import (
    SIZES,
    Shape,
    arrays,
    assert_equal,
    check_modes_and_files,
    random_sizes,
)
from tests.media.samples import draw

PUBLISHED = {
    "auto_map": {"AutoImageProcessor": "image_processing_paddleocr_vl.PaddleOCRVLImageProcessor"},
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "PaddleOCRVLImageProcessor", "image_std": [0.5, 0.5, 0.5], "max_pixels": 2822400,
    "merge_size": 2, "min_pixels": 147384, "patch_size": 14, "processor_class": "PaddleOCRVLProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "temporal_patch_size": 1,
}  # fmt: skip
SETTINGS = {
    "published": PUBLISHED,
    "defaults": {},
    "small": PUBLISHED | {"patch_size": 6, "merge_size": 3, "min_pixels": 324, "max_pixels": 9000, "resample": 2},
}
TOWER = {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}}


def reference(name: str) -> PaddleOCRVLImageProcessorPil:
    beside = ("image_processor_type", "processor_class", "auto_map")
    return PaddleOCRVLImageProcessorPil(**{key: value for key, value in SETTINGS[name].items() if key not in beside})


@pytest.mark.parametrize("name", SETTINGS)
def test_images_of_all_sizes_have_the_bits_of_transformers(name) -> None:
    ours, theirs = PaddleOCRVLImageProcessor.from_dict(SETTINGS[name]).for_model({}), reference(name)
    sizes = [(1, 1), (5, 3), (200, 1), (33, 600), (57, 13)] if name != "small" else SIZES
    for size in sizes:
        assert_equal(arrays(ours, draw(*size)), theirs(draw(*size), return_tensors="np"))
    assert_equal(arrays(ours, draw(40, 70), draw(90, 9)), theirs([draw(40, 70), draw(90, 9)], return_tensors="np"))


def test_images_of_all_modes_and_files_have_the_bits_of_transformers() -> None:
    ours, theirs = PaddleOCRVLImageProcessor.from_dict(SETTINGS["small"]), reference("small")
    check_modes_and_files(ours, theirs)


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_counted_from_the_size(name) -> None:
    ours, theirs = PaddleOCRVLImageProcessor.from_dict(SETTINGS[name]), reference(name)
    counted = 0
    for height, width in [*random_sizes(1000), (3, 601), (601, 3), (1, 7), (27, 29)]:
        try:
            patches = theirs.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(MediaError, match="too long and thin"):
                ours.layout(Shape(height, width))
            continue
        layout = ours.layout(Shape(height, width))
        assert layout.num_tokens == patches // ours.merge_size**2, (height, width)
        assert layout.text == "<|IMAGE_PLACEHOLDER|>" * layout.num_tokens
        assert ours.layout(Shape(height, width), 10**6) == layout
        counted += 1
    assert counted > 700


def test_settings_that_are_refused() -> None:
    read = PaddleOCRVLImageProcessor.from_dict
    assert read(PUBLISHED).for_model(TOWER) == read(PUBLISHED)
    with pytest.raises(ValueError, match="temporal_patch_size must be an integer in 1..1"):
        read(PUBLISHED | {"temporal_patch_size": 2})
    with pytest.raises(NotImplementedError, match="image_processor_type = 'Qwen2VLImageProcessor' is not implemented"):
        read(PUBLISHED | {"image_processor_type": "Qwen2VLImageProcessor"})
    with pytest.raises(ValueError, match="vision_config.patch_size = 14 contradicts the processor's settings"):
        read(PUBLISHED | {"patch_size": 16}).for_model(TOWER)
