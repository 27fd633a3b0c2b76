"""The digest of a checkpoint: the same for the same contents in other files, and another for any other contents."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.assets import TINY
from pace.checkpoints import digest as digests
from pace.checkpoints import mapping
from pace.checkpoints.digest import xxh64
from pace.checkpoints.reader import CheckpointReader
from pace.llm.loading.checkpoint import Checkpoint

PRIMES = (
    0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
)  # fmt: skip


def digest(folder: Path, workers: int = 2, version: int = 2) -> str:
    checkpoint = Checkpoint(folder)
    checkpoint.open_weights(None).close()
    return checkpoint.digest(folder, workers, version)


def reference(data: bytes) -> int:
    """XXH64 as its specification defines it, with seed 0."""
    mask = 2**64 - 1
    first, second, third, fourth, fifth = PRIMES

    def rotated(value: int, bits: int) -> int:
        value &= mask
        return (value << bits | value >> 64 - bits) & mask

    def mixed(lane: int, word: bytes) -> int:
        return rotated(lane + int.from_bytes(word, "little") * second, 31) * first & mask

    whole = len(data) // 32 * 32 if len(data) >= 32 else 0
    value = fifth
    if whole:
        lanes = [first + second, second, 0, -first]
        for start in range(0, whole, 8):
            lanes[start // 8 % 4] = mixed(lanes[start // 8 % 4], data[start : start + 8])
        value = sum(rotated(lane, bits) for lane, bits in zip(lanes, (1, 7, 12, 18)))
        for lane in lanes:
            value = ((value & mask) ^ mixed(0, lane.to_bytes(8, "little"))) * first + fourth
    value, rest = value + len(data) & mask, data[whole:]
    while len(rest) >= 8:
        value, rest = (rotated(value ^ mixed(0, rest[:8]), 27) * first + fourth) & mask, rest[8:]
    if len(rest) >= 4:
        word, rest = int.from_bytes(rest[:4], "little"), rest[4:]
        value = (rotated(value ^ word * first & mask, 23) * second + third) & mask
    for byte in rest:
        value = rotated(value ^ byte * fifth & mask, 11) * first & mask
    for bits, prime in ((33, second), (29, third), (32, 1)):
        value = (value ^ value >> bits) * prime & mask
    return value


def test_xxh64_agrees_with_its_specification() -> None:
    """At every length around its words and stripes, at every alignment, and with what the xxhash package prints."""
    assert xxh64(b"").hex() == "ef46db3751d8e999" and xxh64(bytearray(b"abc")).hex() == "44bc2cf5ad770999"
    data = bytes(random.Random(1).randrange(256) for _ in range(150))
    for length in range(140):
        start = length % 9
        part = memoryview(data)[start : start + length]
        assert int.from_bytes(xxh64(part), "big") == reference(bytes(part)), length
    with pytest.raises(BufferError):
        xxh64(memoryview(data)[::2])


def test_a_damaged_byte_changes_the_hash() -> None:
    data = bytearray(4099)
    found = {xxh64(data)}
    for place in range(len(data)):
        data[place] = 1 + place % 255
        found.add(xxh64(data))
        data[place] = 0
    assert len(found) == len(data) + 1


@pytest.mark.parametrize("version", [1, 2])
def test_names_and_shards_of_files_do_not_count(tmp_path: Path, monkeypatch, version: int) -> None:
    """With tensors of several chunks, and of one."""
    monkeypatch.setattr(mapping, "STORED_PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(digests, "STORED_PIECE_BYTES", 1 << 16)
    expected = digest(TINY, version=version)
    weights = load_file(TINY / "model.safetensors")
    split = tmp_path / "split"
    shutil.copytree(TINY, split, ignore=shutil.ignore_patterns("model.safetensors"))
    names = sorted(weights, reverse=True)
    shards = {"b.safetensors": names[::2], "a.safetensors": names[1::2]}
    for name, tensors in shards.items():
        save_file({tensor: weights[tensor] for tensor in tensors}, split / name, {"format": "pt"})
    index = {"weight_map": {tensor: name for name, tensors in shards.items() for tensor in tensors}}
    (split / "model.safetensors.index.json").write_text(json.dumps(index))
    assert digest(split, version=version) == digest(split, 1, version) == expected

    pickled = tmp_path / "pickled"
    shutil.copytree(TINY, pickled, ignore=shutil.ignore_patterns("model.safetensors"))
    torch.save(weights, pickled / "pytorch_model.bin")
    assert digest(pickled, version=version) == expected


def test_the_first_version_is_as_it_was(tmp_path: Path) -> None:
    """Files of earlier versions of pace have this digest."""
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(0)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        found = [digests.checkpoint_digest(reader, {"config": b"{}"}, 1, version) for version in (1, 2)]
    assert found == [
        "5184984929bf558608e4aa295bc4fc604cc3c9e497455dc4866aa6fe136e58b5",
        "e68ed455910e7d0c7bcfdc0763d4b2aa37868c28c02583b68ff456777723359e",
    ]


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
