"""Images of LFM2-VL: sizes, tiles and texts are those of `Lfm2VlImageProcessor` of transformers, and pixels within two
levels. That needs torchvision; the two functions that it calls are written here."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from pace.llm.processors.lfm2_vl import Lfm2VlImageProcessor
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from tests.llm.models.towers.tiles.making import MODELS, SETTINGS
from tests.llm.processors.images.comparing import Shape, arrays, random_sizes
from tests.media.samples import draw, encode, modes
from tests.plugins.tiers import sample

PUBLISHED = {
    "do_image_splitting": True, "downsample_factor": 2, "encoder_patch_size": 16, "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5], "image_processor_type": "Lfm2VlImageProcessorFast", "max_image_tokens": 256,
    "max_num_patches": 1024, "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2,
    "do_resize": True, "size": {"height": 512, "width": 512}, "tile_size": 512, "use_thumbnail": True, "resample": 2,
    "do_pad": True, "rescale_factor": 0.00392156862745098, "processor_class": "Lfm2VlProcessor",
}  # fmt: skip
SMALL = SETTINGS["lfm2_vl"]
VARIANTS = {
    "small": SMALL,
    "published": PUBLISHED,
    "no thumbnail": SMALL | {"use_thumbnail": False, "max_tiles": 9},
    "one tile": SMALL | {"do_image_splitting": False},
    "grids that are equally good": SMALL | {"min_tiles": 2, "max_tiles": 2, "max_pixels_tolerance": 0.5},
    "other levels": SMALL | {"image_mean": 0.4, "image_std": [0.2, 0.3, 0.4], "rescale_factor": 0.003},
}
SIZES = [(8, 8), (16, 24), (1, 3), (33, 70), (100, 80), (80, 100), (24, 48), (7, 40), (200, 31), (257, 255)]


def resize(image, size, interpolation, antialias):
    return torch.nn.functional.interpolate(image, size, mode=interpolation, antialias=antialias)


def normalize(image, mean, std, inplace):
    return (image - mean[:, None, None]) / std[:, None, None]


@pytest.fixture(scope="module")
def theirs():
    """`process(settings, *images)` calls the processor of transformers, and `sizes` is one that computes sizes."""
    from transformers import image_processing_backends
    from transformers.utils import import_utils

    functional = SimpleNamespace(resize=resize, normalize=normalize, InterpolationMode=SimpleNamespace(LANCZOS=None))
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    modules = {name: ModuleType(name) for name in names}
    modules[names[-1]].functional = functional
    has_torchvision = mock.patch.dict(import_utils.BACKENDS_MAPPING, torchvision=(lambda: True, ""))
    with mock.patch.dict(sys.modules, modules), has_torchvision:
        module = importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")

    def process(settings: dict, *images) -> dict:
        processor = object.__new__(module.Lfm2VlImageProcessor)
        known = {name: getattr(module.Lfm2VlImageProcessor, name) for name in dir(module.Lfm2VlImageProcessor)}
        fields = {
            name: known[name] for name in known if name in module.Lfm2VlImageProcessor._preprocess.__annotations__
        }
        fields |= {name: settings[name] for name in settings if name in fields}
        for name in ("image_mean", "image_std"):
            fields[name] = tuple(fields[name]) if isinstance(fields[name], (list, tuple)) else (fields[name],) * 3
        fields |= {"disable_grouping": True, "return_tensors": None, "return_row_col_info": True}
        tensors = [torch.tensor(np.asarray(image)).permute(2, 0, 1).contiguous() for image in images]
        return processor._preprocess(tensors, **fields)

    patches = {"tvF": functional, "pil_torch_interpolation_mapping": {2: "bilinear", 3: "bicubic"}}
    with mock.patch.multiple(image_processing_backends, create=True, **patches):
        yield SimpleNamespace(process=process, sizes=object.__new__(module.Lfm2VlImageProcessor))


def text_of(settings: dict, processed: dict) -> str:
    """The text of one image, as the processor of transformers builds it."""
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    processor = object.__new__(Lfm2VlProcessor)
    names = {"image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>"}
    for name, token in (names | {"image_thumbnail": "<|img_thumbnail|>"}).items():
        setattr(processor, f"{name}_token", token)
    ours = Lfm2VlImageProcessor.from_dict(settings)
    names = ("tile_size", "downsample_factor", "encoder_patch_size", "use_thumbnail")
    processor.image_processor = SimpleNamespace(**{name: getattr(ours, name) for name in names})
    return processor.replace_image_token(processed, 0, use_image_special_tokens=True)


@pytest.mark.parametrize("name", sample(list(VARIANTS), lambda name: name == "small"))
def test_images_of_all_sizes_are_those_of_transformers(name, theirs):
    settings = VARIANTS[name]
    ours = Lfm2VlImageProcessor.from_dict(settings)
    level = settings.get("rescale_factor", 1 / 255) / min(ours.image_std)
    for size in SIZES[: 4 if name == "published" else None]:
        image = draw(*size)
        found, expected = arrays(ours, image), theirs.process(settings, image)
        for part in ("pixel_attention_mask", "spatial_shapes"):
            assert found[part].dtype == expected[part].numpy().dtype, part
            assert np.array_equal(found[part], expected[part]), (part, size)
        assert (
            found["pixel_values"].dtype == np.float32 and found["pixel_values"].shape == expected["pixel_values"].shape
        )
        assert np.abs(found["pixel_values"] - expected["pixel_values"].numpy()).max() <= 2.01 * level, size
        assert ours.layout(image).text == text_of(settings, expected), size
        assert ours.layout(image).runs == ours.prepare(image).runs


def test_an_image_that_keeps_its_size_has_the_bits_of_transformers(theirs):
    for settings in (SMALL, VARIANTS["other levels"]):
        found = arrays(Lfm2VlImageProcessor.from_dict(settings), draw(24, 16), draw(16, 16))
        expected = theirs.process(settings, draw(24, 16), draw(16, 16))
        assert np.array_equal(found["pixel_values"], expected["pixel_values"])


def test_images_of_all_modes_become_colors():
    ours = Lfm2VlImageProcessor.from_dict(SMALL)
    for name, image in modes().items():
        if name != "La":  # has no RGB form
            assert ours.prepare(image).num_tokens == ours.layout(image).num_tokens, name


@pytest.mark.parametrize("name", ["small", "published", "grids that are equally good"])
def test_tiles_are_counted_from_the_size(name, theirs):
    """Sizes of the image processor of transformers, without an image."""
    ours = Lfm2VlImageProcessor.from_dict(VARIANTS[name])
    processor = theirs.sizes
    sizes = {name: getattr(ours, name) for name in ("downsample_factor", "max_image_tokens", "encoder_patch_size")}
    for height, width in random_sizes(1000):
        if max(height, width) > ours.max_image_tokens * min(height, width):
            continue
        is_large = processor._is_image_too_large(height, width, max_pixels_tolerance=ours.max_pixels_tolerance, **sizes)
        whole = processor.smart_resize(height, width, min_image_tokens=ours.min_image_tokens, **sizes)[::-1]
        grid = processor._get_grid_layout(height, width, ours.min_tiles, ours.max_tiles, ours.tile_size)[:2]
        rows, columns = grid[::-1] if is_large else (0, 0)
        assert ours.tiling(height, width) == (rows, columns, whole), (height, width)


def test_a_limit_of_tokens_lowers_the_tiles_and_then_the_size():
    ours, image = Lfm2VlImageProcessor.from_dict(SMALL), draw(100, 80)
    counts = [len(ours.prepare(image, limit).runs) for limit in (None, 63, 62, 45, 44, 12, 4)]
    assert counts == [7, 7, 5, 5, 4, 1, 1] or counts[:2] == [7, 7] and counts == sorted(counts, reverse=True)
    for limit in range(1, 70):
        layout = ours.layout(image, limit)
        assert 0 < layout.num_tokens <= limit and layout.runs == ours.prepare(image, limit).runs
    with pytest.raises(MediaError, match="an image of 400 x 3 pixels has more than 1 token; cut it to a shape nearer"):
        ours.layout(draw(400, 3), 1)
    with pytest.raises(ValueError, match="max_tokens must be at least 1; got 0"):
        ours.layout(image, 0)
    with pytest.raises(MediaError, match="too long and thin: 16000 x 1 pixels"):
        ours.layout(Shape(1, 16000))


def test_digests_name_pixels_size_and_settings():
    ours, image = Lfm2VlImageProcessor.from_dict(SMALL), draw(96, 64)
    digest = ours.prepare(image).digest
    assert digest == ours.prepare(encode(image, "PNG")).digest == ours.prepare(image, 5000).digest
    changed = Lfm2VlImageProcessor.from_dict(SMALL | {"image_mean": 0.4})
    others = [ours.prepare(image, 20), changed.prepare(image), ours.prepare(draw(96, 64, 1))]
    assert len({digest, *(media.digest for media in others)}) == 4


def test_processors_of_an_architecture(tmp_path):
    config = {"architectures": ["Lfm2VlForConditionalGeneration"]} | MODELS["lfm2_vl"]
    nested = {"image_processor": SMALL, "processor_class": "Lfm2VlProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert load_processors(tmp_path, config).image == Lfm2VlImageProcessor.from_dict(SMALL)
    for changed in ({"downsample_factor": 3}, {"vision_config": {}}):
        with pytest.raises(ValueError, match="contradicts the processor's settings"):
            load_processors(tmp_path, config | changed)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"min_tiles": 11}, ValueError, "x.json: min_tiles must not exceed max_tiles; got 11 and 6"),
        ({"min_image_tokens": 13}, ValueError, "min_image_tokens must not exceed max_image_tokens"),
        ({"tile_size": 20}, ValueError, "tile_size must be a multiple of encoder_patch_size"),
        ({"use_thumbnail": 1}, ValueError, "use_thumbnail must be true or false"),
        ({"do_pad": False}, NotImplementedError, "do_pad"),
        ({"image_processor_type": "Siglip2ImageProcessor"}, NotImplementedError, "image_processor_type"),
        ({"patch_size": 16}, NotImplementedError, "the field 'patch_size' is not implemented"),
    ],
)
def test_other_settings_are_refused_by_name(settings, error, message):
    with pytest.raises(error, match=message):
        Lfm2VlImageProcessor.from_dict(SMALL | settings, "x.json")
