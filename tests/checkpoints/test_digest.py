"""The digest of a checkpoint: the same for the same contents in other files, and another for any other contents."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pace.assets import TINY
from pace.llm.loading.checkpoint import Checkpoint


def digest(folder: Path, workers: int = 2) -> str:
    checkpoint = Checkpoint(folder)
    checkpoint.open_weights(None).close()
    return checkpoint.digest(folder, workers)


def test_names_and_shards_of_files_do_not_count(tmp_path: Path) -> None:
    expected = digest(TINY)
    weights = load_file(TINY / "model.safetensors")
    split = tmp_path / "split"
    shutil.copytree(TINY, split, ignore=shutil.ignore_patterns("model.safetensors"))
    names = sorted(weights, reverse=True)
    shards = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for name, tensors in shards.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, split / name, {"format": "pt"})
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest(split) == digest(split, workers=1) == expected

    pickled = tmp_path / "pickled"
    shutil.copytree(TINY, pickled, ignore=shutil.ignore_patterns("model.safetensors"))
    torch.save(weights, pickled / "pytorch_model.bin")
    assert digest(pickled) == expected


def test_any_other_tensor_counts(tmp_path: Path) -> None:
    weights = load_file(TINY / "model.safetensors")
    name = min(weights)
    found = {digest(TINY)}
    for number, change in enumerate(
        [
            {name: weights[name].float()},
            {name: weights[name].flatten()},
            {"extra": torch.ones(1)},
            {name: weights[name].roll(1, 0)},
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("model.safetensors"))
        save_file(weights | {key: value.contiguous() for key, value in change.items()}, folder / "model.safetensors")
        found.add(digest(folder))
    assert len(found) == 5
