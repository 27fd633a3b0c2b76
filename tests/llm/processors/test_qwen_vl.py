"""Images of the Qwen-VL families, bit for bit as `Qwen2VLImageProcessorPil` of transformers prepares them."""

from __future__ import annotations

import json

import numpy as np
import PIL.Image
import pytest
from transformers import AutoImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pace.llm.processors.qwen_vl import QwenImageProcessor
from pace.llm.processors.registry import IMAGE_PROCESSORS, load_processors
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
from tests.media.samples import ORIENTATION, draw, encode

QWEN3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16, "temporal_patch_size": 2,
    "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip
QWEN25 = {
    "min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor",
}  # fmt: skip
OMNI = QWEN25 | {
    "patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen3OmniMoeProcessor",
    **dict.fromkeys(("feature_size", "hop_length", "n_fft", "n_samples", "nb_max_frames", "sampling_rate"), 1),
    "dither": 0.0, "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True,
}  # fmt: skip
SETTINGS = {
    "defaults": {},
    "qwen3": QWEN3,
    "qwen25": QWEN25,
    "omni": OMNI,
    "one mean": {"image_mean": 0.4, "image_std": 0.3, "rescale_factor": 0.003, "resample": 2},
    "odd patches": {"patch_size": 6, "merge_size": 3, "temporal_patch_size": 3, "min_pixels": 324, "max_pixels": 9000},
    "one area": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": 28 * 28 * 4}, "max_pixels": None},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_images_of_all_sizes_have_the_bits_of_transformers(name):
    ours, reference = QwenImageProcessor.from_dict(SETTINGS[name]), Qwen2VLImageProcessorPil(**SETTINGS[name])
    for size in SIZES:
        image = draw(*size)
        assert_equal(arrays(ours, image), reference(image, return_tensors="np"))


def test_images_of_all_modes_and_files_have_the_bits_of_transformers():
    ours, reference = QwenImageProcessor.from_dict(QWEN3), Qwen2VLImageProcessorPil(**QWEN3)
    check_modes_and_files(ours, reference)
    array = np.asarray(draw(90, 70))
    assert_equal(arrays(ours, array), reference(array, return_tensors="np"))


def test_a_file_is_turned_as_transformers_turns_it(tmp_path):
    exif = PIL.Image.Exif()
    ours, reference = QwenImageProcessor.from_dict(QWEN25), Qwen2VLImageProcessorPil(**QWEN25)
    for exif[ORIENTATION] in range(1, 9):
        path = tmp_path / "image.jpg"
        draw(90, 50).save(path, exif=exif)
        assert_equal(arrays(ours, path), reference([str(path)], return_tensors="np"))
        assert ours.layout(path).num_tokens == ours.prepare(path).num_tokens == 6


def test_a_batch_is_its_images_one_after_another():
    images = [draw(*size) for size in SIZES[3:12]] + [draw(70, 70), draw(70, 70)]
    ours, reference = QwenImageProcessor.from_dict(QWEN25), Qwen2VLImageProcessorPil(**QWEN25)
    assert_equal(arrays(ours, *images), reference(images, return_tensors="np"))


@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_counted_from_the_size(name):
    ours, reference = QwenImageProcessor.from_dict(SETTINGS[name]), Qwen2VLImageProcessorPil(**SETTINGS[name])
    for height, width in random_sizes(2000):
        patches = reference.get_number_of_image_patches(height, width)
        assert ours.layout(Shape(height, width)).num_tokens == patches // ours.merge_size**2, (height, width)


def test_a_limit_of_tokens_lowers_the_largest_area():
    ours, reference = QwenImageProcessor.from_dict(QWEN3), Qwen2VLImageProcessorPil(**QWEN3)
    for limit in (200, 256, 1280, 10**6):
        largest = min(ours.max_pixels, limit * ours.factor**2)
        for height, width in random_sizes(1000):
            tokens = ours.layout(Shape(height, width), limit).num_tokens
            kwargs = {"min_pixels": ours.min_pixels, "max_pixels": largest}
            assert tokens == reference.get_number_of_image_patches(height, width, kwargs) // 4 <= limit
    image = draw(640, 480)
    size = {"shortest_edge": ours.min_pixels, "longest_edge": 70 * ours.factor**2}
    media = ours.prepare(image, 70)
    assert media.num_tokens == 63
    assert_equal(ours.arrays([media]), reference(image, size=size, return_tensors="np"))
    assert ours.layout(draw(99, 99), 5).num_tokens == 4, "a limit below the smallest area counts"
    with pytest.raises(MediaError, match="600 x 3 pixels needs 15 tokens, but may only have 1 token"):
        ours.prepare(draw(600, 3), 1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(image, 0)


def test_long_and_thin_images_are_refused_as_transformers_does():
    ours, reference = QwenImageProcessor.from_dict({}), Qwen2VLImageProcessorPil()
    assert ours.layout(draw(2, 400)).num_tokens == reference.get_number_of_image_patches(400, 2) // 4
    for size in ((2, 401), (401, 2)):
        with pytest.raises(MediaError, match=f"too long and thin: {size[0]} x {size[1]} pixels"):
            ours.prepare(draw(*size))
        with pytest.raises(ValueError, match="aspect ratio"):
            reference(draw(*size))


def test_digests_name_pixels_size_and_settings():
    ours, image = QwenImageProcessor.from_dict(QWEN3), draw(96, 64)
    digest = ours.prepare(image).digest
    for same in (np.asarray(image), encode(image, "PNG"), encode(image, "WEBP", lossless=True), image.copy()):
        assert ours.prepare(same).digest == digest
    assert ours.prepare(image, 5000).digest == digest, "a limit that changes nothing"
    flat = image.tobytes()
    other = image.copy()
    other.putpixel((95, 63), tuple(level ^ 1 for level in other.getpixel((95, 63))))
    different = [
        ours.prepare(PIL.Image.frombytes("RGB", (64, 96), flat)),
        ours.prepare(other),
        ours.prepare(image, 4),
        *(
            QwenImageProcessor.from_dict(QWEN3 | change).prepare(image)
            for change in ({"image_mean": 0.4}, {"resample": 2}, {"rescale_factor": 0.1}, {"temporal_patch_size": 1})
        ),
    ]
    digests = [digest, *(media.digest for media in different)]
    assert len(set(digests)) == len(digests) and all(len(digest) == 32 for digest in digests)
    # Two shapes of the same bytes that are resized to the same size.
    shapes = [PIL.Image.frombytes("RGB", size, draw(100, 102).tobytes()) for size in ((100, 102), (102, 100))]
    wide, tall = (QwenImageProcessor.from_dict({}).prepare(image) for image in shapes)
    assert wide.grid == tall.grid and wide.digest != tall.digest


def test_settings_written_by_transformers_are_read_back(tmp_path):
    for settings in SETTINGS.values():
        ours, reference = QwenImageProcessor.from_dict(settings), Qwen2VLImageProcessorPil(**settings)
        whole = {"processor_class": "Qwen3VLProcessor"}
        check_read_back(tmp_path, "Qwen3VLForConditionalGeneration", reference, ours, **whole)
        loaded = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
        assert_equal(arrays(ours, draw(50, 70)), loaded(draw(50, 70), return_tensors="np"))


def test_a_file_without_settings_of_images_does_not_count(tmp_path):
    (tmp_path / "processor_config.json").write_text('{"processor_class": "Qwen2_5_VLProcessor"}')
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    with pytest.raises(FileNotFoundError, match="has no preprocessor_config.json, and no processor_config.json with"):
        load_processors(tmp_path, config)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN25))
    assert load_processors(tmp_path, config).image == QwenImageProcessor.from_dict(QWEN25)
    (tmp_path / "processor_config.json").write_text('{"image_processor": 3}')
    with pytest.raises(ValueError, match="processor_config.json: image_processor must be an object; got 3"):
        load_processors(tmp_path, config)


def test_processors_of_an_architecture(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(QWEN3))
    assert load_processors(tmp_path, {"architectures": ["LlamaForCausalLM"]}).of_kind == {}
    vision = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    for architecture in [name for name, kind in IMAGE_PROCESSORS.items() if kind is QwenImageProcessor]:
        for config in ({"vision_config": vision}, {"thinker_config": {"vision_config": vision}}):
            assert load_processors(tmp_path, {"architectures": [architecture]} | config).image.factor == 32
    for field in vision:
        config = {"architectures": [architecture], "vision_config": vision | {field: 3}}
        with pytest.raises(ValueError, match=f"vision_config.{field} = 3 contradicts the processor's settings"):
            load_processors(tmp_path, config)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"patch_size": 0}, ValueError, "x.json: patch_size must be an integer in 1..256; got 0"),
        ({"patch_size": "14"}, ValueError, "patch_size"),
        ({"merge_size": True}, ValueError, "merge_size"),
        ({"min_pixels": -1}, ValueError, "min_pixels"),
        ({"max_pixels": 2**40}, ValueError, "max_pixels"),
        ({"min_pixels": 5000, "max_pixels": 4000}, ValueError, "min_pixels must not exceed max_pixels"),
        ({"image_mean": [0.5, 0.5]}, ValueError, "image_mean must be a number in .*, or a list of three"),
        ({"image_std": [0.5, 0.5, 0]}, ValueError, "image_std"),
        ({"image_std": "1"}, ValueError, "image_std"),
        ({"rescale_factor": 0}, ValueError, "rescale_factor"),
        ({"resample": 6}, ValueError, "resample"),
        ({"size": {"height": 4, "width": 4}}, ValueError, "size must have shortest_edge and longest_edge"),
        ({"size": {"shortest_edge": 4}}, ValueError, "size must have"),
        ({"size": {"shortest_edge": None, "longest_edge": 9000}}, ValueError, "size must have"),
        ({"size": 224}, ValueError, "size must have"),
        ({"size": QWEN3["size"], "max_pixels": 70000}, ValueError, "max_pixels = 70000 contradicts size.longest_edge"),
        ({"do_resize": False}, NotImplementedError, "do_resize = False is not implemented; implemented: True"),
        ({"do_rescale": False}, NotImplementedError, "do_rescale"),
        ({"do_normalize": False}, NotImplementedError, "do_normalize"),
        ({"do_convert_rgb": False}, NotImplementedError, "do_convert_rgb"),
        ({"do_center_crop": True}, NotImplementedError, "do_center_crop"),
        ({"do_pad": 1}, NotImplementedError, "do_pad"),
        ({"input_data_format": "channels_first"}, NotImplementedError, "input_data_format"),
        ({"image_processor_type": "SiglipImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"do_pan_and_scan": False}, NotImplementedError, "x.json: the field 'do_pan_and_scan' is not implemented"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        QwenImageProcessor.from_dict(settings, "x.json")


def test_settings_without_effect_and_both_spellings_of_the_areas():
    plain = QwenImageProcessor.from_dict(QWEN25)
    areas = {"shortest_edge": QWEN25["min_pixels"], "longest_edge": QWEN25["max_pixels"]}
    assert QwenImageProcessor.from_dict(QWEN25 | {"size": areas}) == plain
    old = {"min_pixels": QWEN25["min_pixels"], "max_pixels": QWEN25["max_pixels"]}
    assert QwenImageProcessor.from_dict(QWEN25 | {"size": old, "do_resize": None, "crop_size": {"height": 1}}) == plain
