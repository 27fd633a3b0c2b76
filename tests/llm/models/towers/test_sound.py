"""Prompts with clips: greedy text is that of transformers, alone and in a batch, with every way of running a model."""

from __future__ import annotations

import pytest
import torch

from pace.llm import LLMModel
from tests.llm.models.towers.hearing import CLIP, MELS, features, inputs_of, save_hearing
from tests.llm.models.towers.seeing import results

pytest.importorskip("transformers")

ROWS = [[150], [], [20, 101], [250, 3, 99], [1, 400]]
"""Frames of the clips of each prompt."""
NEW = 64


def load(folder, **options) -> LLMModel:
    return LLMModel(folder, **{"dtype": "float32", "progress": False, **options})


@torch.no_grad()
def oracle_tokens(oracle, inputs) -> list[int]:
    given = inputs if (inputs["input_ids"] == CLIP).any() else {"input_ids": inputs["input_ids"]}
    out = oracle.generate(**given, max_new_tokens=NEW, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hearing")
    return save_hearing(folder), folder


def prompt(frames: list[int], seed: int) -> dict[str, torch.Tensor]:
    inputs = inputs_of(frames or [1], seed)
    if not frames:
        keep = inputs["input_ids"][0] != CLIP
        inputs = {"input_ids": inputs["input_ids"][:, keep], "attention_mask": inputs["attention_mask"][:, keep]}
    return inputs


def together(rows) -> dict[str, torch.Tensor]:
    """The prompts as one batch, padded on the left, with the arrays of all clips."""
    prompts = [prompt(frames, index) for index, frames in enumerate(rows)]
    width = max(one["input_ids"].shape[1] for one in prompts)
    batch = {
        name: torch.cat([torch.nn.functional.pad(one[name], (width - one[name].shape[1], 0)) for one in prompts])
        for name in ("input_ids", "attention_mask")
    }
    of_clips = [one for one in prompts if "input_features" in one]
    frames = max(one["input_features"].shape[2] for one in of_clips)
    for name in ("input_features", "input_features_mask"):
        batch[name] = torch.cat(
            [torch.nn.functional.pad(one[name], (0, frames - one[name].shape[-1])) for one in of_clips]
        )
    return batch


def test_greedy_text_is_that_of_transformers(hearing):
    """Alone, in a batch that is padded on the left, and with prompts cut into chunks: the same bits."""
    oracle, folder = hearing
    with load(folder, prefix_cache_bytes=0) as model:
        alone = []
        for index, frames in enumerate(ROWS):
            inputs = prompt(frames, index)
            alone += results(model.generate(**inputs, max_new_tokens=NEW, logprobs=0))
            assert alone[-1][0] == oracle_tokens(oracle, inputs), f"clips of {frames} frames"
        assert len({tuple(tokens) for tokens, _ in alone}) == len(ROWS)
        batch = together(ROWS)
        assert results(model.generate(**batch, max_new_tokens=NEW, logprobs=0)) == alone
        model._engine.scheduler.max_tokens_per_step = 7
        assert results(model.generate(**batch, max_new_tokens=NEW, logprobs=0)) == alone


def test_clips_change_the_text(hearing):
    with load(hearing[1]) as model:
        inputs = prompt([150], 0)
        tokens = model.generate(**inputs, max_new_tokens=NEW).generated_token_ids
        assert model.generate(**inputs | features([150], 5), max_new_tokens=NEW).generated_token_ids != tokens
        with pytest.raises(ValueError, match="20 tokens of id 90, but 1 clip must have 7"):
            model.generate(**inputs | features([50]), max_new_tokens=1)
        with pytest.raises(ValueError, match=rf"floats \[clips, {MELS}, frames\]"):
            model.generate(**inputs | {"input_features": torch.zeros(1, MELS + 1, 200)}, max_new_tokens=1)


def test_text_alone_needs_no_tower(hearing):
    oracle, folder = hearing
    inputs = prompt([], 1)
    with load(folder, media=False) as model:
        assert model.generate(**inputs, max_new_tokens=NEW).generated_token_ids == [oracle_tokens(oracle, inputs)]
        with pytest.raises(ValueError, match="ConditionalGeneration takes no sound: .*leave out input_features"):
            model.generate(**prompt([150], 0), max_new_tokens=1)
