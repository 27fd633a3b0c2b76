"""Images that pace's own processor prepares fit the towers: the rows of its arrays, in the order of transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pace.llm.processors.qwen_vl import QwenImageProcessor
from pace.llm.runners import EagerRunner
from tests.llm.models.towers.checks import load_layers
from tests.llm.models.towers.seeing import MERGE, MODELS, PATCH, run_to_end, save_seeing
from tests.support import backends

pytest.importorskip("transformers")
pytest.importorskip("PIL")


@pytest.mark.parametrize("model_type", MODELS)
def test_prepared_images_have_the_rows_of_their_arrays(model_type, tmp_path) -> None:
    save_seeing(tmp_path, model_type)
    settings = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "min_pixels": 64,
        "max_pixels": 4000,
    }
    processor = QwenImageProcessor.from_dict(settings, "preprocessor_config.json")
    runner = EagerRunner(load_layers(tmp_path, backends()[-1]))
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((30, 70), (17, 16))]
    media = [processor.prepare(image) for image in images]
    ours = runner.towers[0].read_inputs(processor.arrays(media))
    for prepared, given in zip(media, ours, strict=True):
        rows = run_to_end(runner.encode(prepared))
        assert torch.equal(rows, run_to_end(runner.encode(given)))
        assert rows.shape == (prepared.num_tokens, runner.towers[0].width) and given.num_tokens == prepared.num_tokens
        assert given.digest != prepared.digest, "one is of pixels, the other of patches"
