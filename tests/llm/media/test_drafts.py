"""Drafts by multi-token prediction after images: the same tokens, at the positions of the model itself."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from pace.llm import LLMModel, MtpConfig
from tests.llm.models.towers.seeing import inputs_of, results, save_seeing

ROWS = [[(4, 6)], [(2, 10), (6, 2)], [(8, 8)]]
OUTPUTS = ("o_proj", "out_proj", "down_proj")
LAST = "model.language_model.layers.1."
"""The layer of the tiny models with attention."""


def save_with_mtp(folder, model_type: str) -> None:
    """Saves a tiny model that sees, with a layer for multi-token prediction. It passes the embedding on, so that most
    drafts are right."""
    save_seeing(folder, model_type)
    state = load_file(folder / "model.safetensors")
    state = {
        name: 0.01 * tensor if "visual" not in name and any(part in name for part in OUTPUTS) else tensor
        for name, tensor in state.items()
    }
    width = state["model.language_model.embed_tokens.weight"].shape[1]
    block = {name.replace(LAST, "mtp.layers.0."): tensor.clone() for name, tensor in state.items() if LAST in name}
    norms = {f"mtp.pre_fc_norm_{name}.weight": torch.zeros(width) for name in ("embedding", "hidden")}
    norm = {"mtp.norm.weight": state["model.language_model.norm.weight"].clone()}
    mtp = {"mtp.fc.weight": torch.eye(width, 2 * width)}
    save_file(state | block | norms | norm | mtp, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder, **options) -> LLMModel:
    return LLMModel(folder, **{"dtype": "float32", "progress": False, "kv_cache_bytes": "16MiB", **options})


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_multi_token_prediction_after_images(model_type, tmp_path, monkeypatch) -> None:
    save_with_mtp(tmp_path, model_type)
    with load(tmp_path) as plain, load(tmp_path, spec_config=MtpConfig(num_draft_tokens=3, adaptive=False)) as drafted:
        source = drafted.generator.engine.drafter.source
        seen = []
        build = source._batches.build

        def built(spans, kv):
            batch = build(spans, kv)
            seen.append((spans[0].start, batch.angle_positions))
            return batch

        monkeypatch.setattr(source._batches, "build", built)
        for again in range(2):  # the second time, rows of the draft head come from its prefix cache
            for index, grids in enumerate(ROWS):
                inputs = inputs_of([grids], index)
                out = drafted.generate(**inputs, max_new_tokens=20, logprobs=0)
                assert results(out) == results(plain.generate(**inputs, max_new_tokens=20, logprobs=0))
                assert out.metrics.num_accepted_tokens > out.metrics.num_drafted_tokens / 3, again
        lags = {positions[0, -1].item() - (start + positions.shape[1] - 1) for start, positions in seen}
        assert lags == {-3, 0, -12}, "positions lag behind after an image"
        drafted.generator.engine.drafter.check_integrity()
