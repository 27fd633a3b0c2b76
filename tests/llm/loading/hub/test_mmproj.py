"""The mmproj file of a repository of GGUF files comes with the model, unless media are not wanted."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.llm import LLMModel
from pace.llm.loading.options import LoadOptions
from pace.server.fingerprint import fingerprint
from tests.checkpoints.gguf.files import write_gguf
from tests.checkpoints.gguf.projectors.qwen_files import save_pair
from tests.llm.models.variants import save_tiny

SMALL = {"progress": False, "kv_cache_bytes": "4MiB", "weights_cache": False, "num_threads": 1}
NAME = "org/vl-GGUF:Q4_K_M"


@pytest.fixture
def repository(hub, tmp_path, monkeypatch):
    """Returns the hub, and the local mmproj file."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    _, model, mmproj = save_pair(tmp_path / "pair", "qwen3_vl")
    save_tiny(tmp_path / "olmo2", "olmo2", {})
    write_gguf(tmp_path / "olmo2", tmp_path / "olmo2.gguf")
    towers = mmproj.read_bytes()
    hub.repos |= {
        "org/vl-GGUF": {
            "Q4_K_M/vl-Q4_K_M.gguf": model.read_bytes(),
            "mmproj-F32.gguf": towers,
            "mmproj-F16.gguf": towers,
        },
        "org/olmo-GGUF": {"olmo-Q4_K_M.gguf": (tmp_path / "olmo2.gguf").read_bytes(), "mmproj-F16.gguf": towers},
    }
    return hub, mmproj


def kinds(name: str, **options) -> list[str]:
    with LLMModel(name, **SMALL, **options) as model:
        return [tower.kind for tower in model._model.towers]


def test_it_is_downloaded_with_the_model(repository):
    hub, mmproj = repository
    assert kinds(NAME, media=False) == [] and hub.downloads == ["Q4_K_M/vl-Q4_K_M.gguf"]
    assert kinds(NAME, local_files_only=True) == [], "it was not wanted before"
    assert kinds(NAME, mmproj=mmproj) == ["image"] and len(hub.downloads) == 1
    assert kinds(NAME) == ["image"] and hub.downloads[1:] == ["mmproj-F16.gguf"]
    assert kinds(NAME) == ["image"] and kinds("org/vl-GGUF", local_files_only=True) == ["image"]
    assert len(hub.downloads) == 2
    prints = [fingerprint(LoadOptions(NAME, **options)) for options in ({}, {"media": False}, {"mmproj": mmproj})]
    assert len(set(prints)) == 3 and fingerprint(LoadOptions(NAME)) == prints[0]


def test_a_model_of_text_needs_none(repository):
    hub, _ = repository
    assert kinds("org/olmo-GGUF") == [] and hub.downloads == ["olmo-Q4_K_M.gguf"]
