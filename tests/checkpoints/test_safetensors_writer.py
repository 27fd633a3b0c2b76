"""Files written piece by piece equal those that safetensors writes. Incomplete files are refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pace.checkpoints.safetensors_file import SafetensorsFile, TensorInfo
from pace.checkpoints.safetensors_writer import SafetensorsWriter

TENSORS = {
    "codes": torch.arange(35, dtype=torch.int8).view(7, 5), "words": torch.arange(-6, 6, dtype=torch.int32).view(4, 3),
    "shape": torch.tensor([7, 5]), "scales": torch.randn(3, 1).bfloat16(), "vector": torch.randn(9),
    "empty": torch.empty(0, 4),
}  # fmt: skip


def announce(tensors) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def test_other_readers_find_what_was_written(tmp_path):
    path = tmp_path / "a.safetensors"
    with SafetensorsWriter(path, announce(TENSORS), {"made": "here"}) as writer:
        for name, tensor in reversed(TENSORS.items()):
            for start in range(len(tensor) - 1, -1, -2):  # from the end, two rows at a time
                writer.write(name, tensor[max(start - 1, 0) : start + 1], max(start - 1, 0))
    for found in (load_file(path), {name: SafetensorsFile(path).read(name) for name in TENSORS}):
        assert found.keys() == TENSORS.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in TENSORS.items()
        )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "here"}
    file = SafetensorsFile(path)
    assert all(file.read(name).data_ptr() % tensor.itemsize == 0 for name, tensor in TENSORS.items() if tensor.numel())


def test_what_is_not_whole_is_refused(tmp_path):
    with pytest.raises(ValueError, match="words"):
        with SafetensorsWriter(tmp_path / "a", announce(TENSORS)) as writer:
            for name in TENSORS.keys() - {"words"}:
                writer.write(name, TENSORS[name])
            writer.write("words", TENSORS["words"][:3])
    with pytest.raises(KeyError, match="other"):  # the first error is reported
        with SafetensorsWriter(tmp_path / "b", announce(TENSORS)) as writer:
            writer.write("other", TENSORS["words"])
    with pytest.raises(FileExistsError):
        SafetensorsWriter(tmp_path / "b", announce(TENSORS))


def test_a_file_that_the_disk_cannot_hold_is_not_begun(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=500))
    with pytest.raises(
        OSError,
        match=r"needs .*, and its disk has 500 bytes left; free some space, or write to another disk: .*a\.safetensors",
    ):
        SafetensorsWriter(tmp_path / "a.safetensors", announce(TENSORS))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("rows", "start"),
    [(torch.zeros(4, 3), 0), (torch.zeros(4, 2, dtype=torch.int32), 0), (torch.zeros(2, 3, dtype=torch.int32), 3),
     (torch.zeros(2, 3, dtype=torch.int32), -1)],
    ids=["dtype", "width", "beyond", "before"],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, rows, start):
    writer = SafetensorsWriter(tmp_path / "a", announce(TENSORS))
    with pytest.raises(ValueError, match="cannot write .* of words"):
        writer.write("words", rows, start)
