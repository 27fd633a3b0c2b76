"""Prompts with clips: greedy text is that of transformers, alone and in a batch, with every way of running a model."""

from __future__ import annotations

import pytest
import torch

from tests.llm.models.towers.checks import check_greedy_text
from tests.llm.models.towers.hearing import MELS, features, inputs_of, save_hearing
from tests.llm.models.towers.prompts import together
from tests.llm.models.towers.seeing import NEW, load, oracle_tokens

pytest.importorskip("transformers")

ROWS = [[150], [], [20, 101], [250, 3, 99], [1, 400]]
"""Frames of the clips of each prompt."""


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hearing")
    return save_hearing(folder), folder


def test_greedy_text_is_that_of_transformers(hearing):
    oracle, folder = hearing
    prompts = [inputs_of(frames, index) for index, frames in enumerate(ROWS)]
    with load(folder, prefix_cache_bytes=0) as model:
        check_greedy_text(model, oracle, prompts, together(prompts))


def test_clips_change_the_text(hearing):
    with load(hearing[1]) as model:
        inputs = inputs_of([150], 0)
        tokens = model.generate(**inputs, max_new_tokens=NEW).generated_token_ids
        assert model.generate(**inputs | features([150], 5), max_new_tokens=NEW).generated_token_ids != tokens
        with pytest.raises(ValueError, match="20 tokens of id 90, but 1 clip must have 7"):
            model.generate(**inputs | features([50]), max_new_tokens=1)
        with pytest.raises(ValueError, match=rf"floats \[clips, {MELS}, frames\]"):
            model.generate(**inputs | {"input_features": torch.zeros(1, MELS + 1, 200)}, max_new_tokens=1)


def test_text_alone_needs_no_tower(hearing):
    oracle, folder = hearing
    inputs = inputs_of([], 1)
    with load(folder, media=False) as model:
        assert model.generate(**inputs, max_new_tokens=NEW).generated_token_ids == [oracle_tokens(oracle, inputs)]
        with pytest.raises(ValueError, match="ConditionalGeneration takes no sound: .*leave out input_features"):
            model.generate(**inputs_of([150], 0), max_new_tokens=1)
