"""Fixture: a fake Hub in this process."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz import checkpoints
from tests.llm.loading.hub.fake_hub import FakeHub

STATE = {"v": torch.ones(2), "w": torch.zeros(3)}
COMMON = {"config.json": b"{}", "generation_config.json": b"{ }", "chat_template.jinja": b"x",
          **checkpoints.tokenizer_files()}  # fmt: skip
UNWANTED = {
    "README.md": b"x", "modeling_custom.py": b"raise SystemExit", "model.Q4.gguf": b"x", "consolidated.00.pth": b"x",
    "onnx/model.onnx": b"x", "tf_model.h5": b"x", "original/params.json": b"{}", "picture.png": b"x",
}  # fmt: skip
REPOS = {
    "org/single": {**COMMON, **UNWANTED, **checkpoints.weight_files("safetensors", STATE),
      **checkpoints.weight_files("bin", STATE)},
    "org/sharded": {**COMMON, **UNWANTED, **checkpoints.weight_files("safetensors-sharded", STATE),
      **checkpoints.weight_files("bin-sharded", STATE), "model-00003-of-00003.safetensors": b"left over"},
    "org/bin": {**COMMON, **UNWANTED, **checkpoints.weight_files("bin-sharded", STATE)},
    "org/empty": {"README.md": b"x"}, "org/others": {"config.json": b"{}", "model.onnx": b"x"},
    "org/escapes": {**COMMON, "model.safetensors.index.json": b'{"weight_map": {"w": "../../secret"}}'},
    "toplevel": {**COMMON, **checkpoints.weight_files("safetensors", STATE)},
}  # fmt: skip


@pytest.fixture
def hub(monkeypatch, tmp_path_factory):
    """Yields a FakeHub of `REPOS` that huggingface_hub uses as the Hub. Tests may add repositories."""
    constants = pytest.importorskip("huggingface_hub").constants

    hub = FakeHub(dict(REPOS))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield hub
    hub.close()
