"""What tests of image processors have in common: sizes, and comparisons with the processors of transformers."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from pace.llm.processors.image_processor import ImageProcessor
from pace.llm.processors.registry import load_processors
from tests.media.samples import files, modes

SIZES = [(1, 1), (1, 2), (2, 1), (14, 42), (28, 28), (29, 27), (42, 70), (98, 14), (200, 1), (1, 200)]
SIZES += [(33, 4097), (4097, 33), (640, 480), (500, 375), (224, 448), (1000, 7), (56, 57), (257, 255)]


def random_sizes(count: int) -> list[tuple[int, int]]:
    rng = random.Random(count)
    sides = [int(2 ** rng.uniform(0, 14)) for _ in range(2 * count)]
    return [pair for pair in zip(sides[::2], sides[1::2]) if max(pair) <= 200 * min(pair) and pair[0] * pair[1] < 4e7]


class Shape:
    """A stand-in for a large image, to ask for its size."""

    def __new__(cls, height: int, width: int) -> np.ndarray:
        return np.broadcast_to(np.zeros(3, np.uint8), (height, width, 3))


def arrays(processor: ImageProcessor, *sources) -> dict[str, np.ndarray]:
    return processor.arrays([processor.prepare(source) for source in sources])


def assert_equal(ours: dict[str, np.ndarray], reference) -> None:
    assert ours.keys() == reference.keys()
    for name, array in ours.items():
        expected = reference[name].numpy() if hasattr(reference[name], "numpy") else np.asarray(reference[name])
        assert array.dtype == expected.dtype and array.shape == expected.shape, name
        assert np.array_equal(array, expected), name


def check_modes_and_files(ours: ImageProcessor, theirs: Any) -> None:
    """Images of all modes, and files of all formats, have the bits of transformers."""
    for name, image in modes().items():
        if name != "La":  # has no RGB form
            assert_equal(arrays(ours, image), theirs(image, return_tensors="np"))
    for name, data in files().items():
        if "extras" not in name:  # these are turned
            assert_equal(arrays(ours, data), theirs(PIL.Image.open(io.BytesIO(data)), return_tensors="np"))


def check_read_back(folder: Path, architecture: str, theirs: Any, ours: ImageProcessor, **whole: Any) -> None:
    """Settings that transformers saves make `ours`: alone, or in a file of the `whole` processor, which then counts
    before the other one."""
    config = {"architectures": [architecture]}
    theirs.save_pretrained(folder)
    (folder / "processor_config.json").unlink(missing_ok=True)
    assert load_processors(folder, config).image == ours
    nested = {"image_processor": json.loads(theirs.to_json_string()), **whole}
    (folder / "processor_config.json").write_text(json.dumps(nested))
    (folder / "preprocessor_config.json").write_text('{"patch_size": 2}')
    assert load_processors(folder, config).image == ours
