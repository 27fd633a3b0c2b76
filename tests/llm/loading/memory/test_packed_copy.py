"""Packed copies of weights give the same bits. A copy is made once and used only for the same weights. The folder stays
within its bounds. No copy is made if it is unwanted, useless or impossible."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from pace import _C
from pace.assets import TINY
from pace.checkpoints.packed_file import PARTIAL
from pace.llm import DraftModelConfig, LLMModel
from pace.llm.loading import load, packed_weights, weights_cache
from pace.llm.loading.options import LoadOptions
from tests.checkpoints.quantized.models import save_quantized
from tests.llm.models.variants import save_tiny

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
INT4 = {"quantization": "int4"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns the folder of the copies. Models of any size get a copy."""
    monkeypatch.setenv("PACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PACE_CACHE_SIZE", "64MiB")
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 1)
    return tmp_path / "cache"


@pytest.fixture
def llama(tmp_path):
    return save_model(tmp_path / "llama")


def save_model(path: Path, family="llama", **changes):
    save_tiny(path, family, changes)
    return path


def logits(path, **options):
    with LLMModel(path, progress=False, **options) as model, model.session() as session:
        return session.append(IDS, logits="all")


def copies(folder):
    return sorted(folder.glob("*.weights"))


# -- the same bits


MODELS = {
    "floats": lambda path: save_model(path / "m"),
    "biases": lambda path: save_model(path / "m", "qwen2"),
    "a tied head": lambda path: save_model(path / "m", tie_word_embeddings=True),
    "experts": lambda path: save_model(path / "m", "qwen3_moe"),
    "experts with biases": lambda path: save_model(path / "m", "gpt_oss"),
    "heads": lambda path: save_model(path / "m", "deepseek_v3"),
    "codes": lambda path: save_quantized(path, "awq", "qwen3_moe"),
    "columns in an order": lambda path: save_quantized(path, "gptq-act-order"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_bits_are_those_of_weights_in_memory(kind, tmp_path, folder, reads):
    path = MODELS[kind](tmp_path)
    expected = logits(path, weights_cache=False)
    assert not folder.exists()
    assert torch.equal(logits(path), expected) and len(copies(folder)) == 1
    stamp = copies(folder)[0].stat()
    reads.clear()
    assert torch.equal(logits(path), expected)
    assert reads and not any(name.endswith("_proj.weight") for name in reads)
    assert copies(folder)[0].stat().st_mtime_ns == stamp.st_mtime_ns and os.listdir(folder) == [copies(folder)[0].name]


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_bits_of_gguf_files(kind, tmp_path, folder):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.files import write_gguf

    save_tiny(tmp_path / "hub", "qwen2", {"hidden_size": 256, "intermediate_size": 256})
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path / "hub", path, lambda name: kind if name.endswith("weight") and "norm" not in name else "F32")
    expected = logits(path, weights_cache=False)
    for _ in range(2):  # the first run packs, the second does not
        assert torch.equal(logits(path), expected)
    assert len(copies(folder)) == 1


@pytest.mark.usefixtures("restore_isa_and_threads")
def test_floats_have_a_copy_for_each_instruction_set_and_codes_have_one(llama, folder):
    whole = {"overrides": {"lm_head": "int8", "*embed_tokens": "int8"}, "format": "int8"}
    for isa in ("generic", _C.isa()):
        _C.select_isa(isa)
        assert torch.equal(logits(llama), logits(llama, weights_cache=False))
        assert torch.equal(logits(llama, quantization=whole), logits(llama, quantization=whole, weights_cache=False))
    of_codes = [
        path for path in copies(folder) if b'"isa": null' in path.read_bytes() and b'"isa": "' not in path.read_bytes()
    ]
    assert len(copies(folder)) == 3 and len(of_codes) == 1


def test_dtypes_and_formats_have_copies_of_their_own(llama, folder):
    for options in ({}, {"dtype": "float32"}, INT4, {"quantization": "int8"}, {}):
        assert torch.equal(logits(llama, **options), logits(llama, weights_cache=False, **options))
    assert len(copies(folder)) == 4


def test_a_draft_model_has_a_copy_too(llama, tmp_path, folder):
    draft = DraftModelConfig(save_model(tmp_path / "draft"))
    for _ in range(2):
        logits(llama, spec_config=draft)
        assert [path.name.partition(".")[0] for path in copies(folder)] == ["draft", "llama"]


# -- stale or damaged copies


def test_a_copy_of_another_checkpoint_is_written_anew(llama, folder, reads):
    logits(llama)
    for change in (
        lambda: os.utime(llama / "model.safetensors", ns=(0, 0)),
        lambda: os.utime(llama / "config.json", ns=(0, 0)),
    ):
        change()
        reads.clear()
        logits(llama)
        assert any(name.endswith("_proj.weight") for name in reads) and len(copies(folder)) == 1


def other_weights(path: Path) -> Path:
    """Writes a checkpoint of the same size and time of change next to one, and returns its weights."""
    from safetensors.torch import load_file, save_file

    other = path / "other"
    state = {name: tensor * 1.5 for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(state, other, metadata={"format": "pt"})
    status = (path / "model.safetensors").stat()
    assert other.stat().st_size == status.st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    return other


def test_a_checkpoint_of_the_same_size_and_time_has_another_copy(llama, folder):
    before = logits(llama)
    os.replace(other_weights(llama), llama / "model.safetensors")
    assert not torch.equal(logits(llama), before)
    assert torch.equal(logits(llama), logits(llama, weights_cache=False))


def test_a_checkpoint_that_is_replaced_while_it_is_loaded(llama, folder, monkeypatch):
    """The copy has the old weights, and is not used for the new ones."""
    map_copy = packed_weights.PackedCopy.map

    def replaced(self, *arguments):
        monkeypatch.setattr(packed_weights.PackedCopy, "map", map_copy)
        os.replace(other_weights(llama), llama / "model.safetensors")
        return map_copy(self, *arguments)

    monkeypatch.setattr(packed_weights.PackedCopy, "map", replaced)
    before = logits(llama)
    assert len(copies(folder)) == 1
    after = logits(llama)
    assert torch.equal(after, logits(llama, weights_cache=False)) and not torch.equal(after, before)


def test_a_writer_that_is_stopped_is_not_waited_for_forever(llama, folder, caplog, monkeypatch):
    monkeypatch.setattr(packed_weights.PackedCopy, "patience", 0.05)
    expected = logits(llama)
    [copy] = copies(folder)
    copy.unlink()
    with open(f"{copy}{PARTIAL}", "wb") as partial:
        fcntl.flock(partial, fcntl.LOCK_EX)
        assert torch.equal(logits(llama), expected) and not copies(folder)
    assert "another process has been writing" in caplog.text


def test_a_copy_of_another_format_is_written_again(llama, folder, reads, monkeypatch):
    logits(llama)
    monkeypatch.setattr(packed_weights, "FORMAT", -1)
    reads.clear()
    logits(llama)
    assert any(name.endswith("_proj.weight") for name in reads) and len(copies(folder)) == 1


def test_builds_have_copies_of_their_own(llama, folder, reads, monkeypatch, caplog):
    """Two installations in turn open a model from their copies."""
    version = packed_weights.__version__
    for turn in range(4):
        monkeypatch.setattr(packed_weights, "__version__", "0.0.0" if turn % 2 else version)
        reads.clear()
        logits(llama)
        assert any(name.endswith("_proj.weight") for name in reads) == (turn < 2)
    assert len(copies(folder)) == 2 and not caplog.records


def test_a_damaged_copy_is_written_anew(llama, folder, caplog):
    expected = logits(llama)
    [path] = copies(folder)
    data = bytearray(path.read_bytes())
    start = data.index(b"PACE", 4096)
    data[start + 16 : start + 24] = (1 << 20).to_bytes(8, "little")  # a wrong size for the kernels
    path.write_bytes(data)
    assert torch.equal(logits(llama), expected) and "is damaged" in caplog.text
    assert torch.equal(logits(llama), expected)


# -- no copy


def test_no_copy_where_none_is_wanted_or_worth_it(llama, folder, monkeypatch):
    logits(llama, weights_cache=False)
    logits(llama, backend="torch")
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 32 << 20)
    logits(llama)
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 1)
    monkeypatch.setenv("PACE_CACHE_SIZE", "0")
    logits(llama)
    monkeypatch.setenv("PACE_CACHE_SIZE", "4KiB")
    logits(llama)
    monkeypatch.setenv("PACE_CACHE_SIZE", "1GiB")
    info = _C.cpu_info()
    monkeypatch.setattr(packed_weights._C, "cpu_info", lambda: {**info, "numa_nodes": 2})
    logits(llama)
    assert not copies(folder)


def test_no_copy_on_a_disk_that_is_nearly_full(llama, folder, monkeypatch):
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 4096))
    logits(llama)
    assert not copies(folder)


def test_a_model_too_large_for_the_disk_removes_no_copy(llama, tmp_path, folder, monkeypatch):
    logits(llama)
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 30, 1 << 30, 4096))
    logits(save_model(tmp_path / "larger", hidden_size=112))
    assert [path.name.partition(".")[0] for path in copies(folder)] == ["llama"]


def test_a_copy_of_a_name_with_a_line_end_is_found(tmp_path, folder):
    logits(save_model(tmp_path / "a\nb"))
    assert [copy.path for copy in weights_cache.list_copies(folder)] == copies(folder) != []


def test_a_folder_that_cannot_be_written_is_a_warning(llama, tmp_path, folder, caplog):
    expected = logits(llama, weights_cache=False)
    (tmp_path / "file").write_text("")
    assert torch.equal(logits(llama, weights_cache=tmp_path / "file" / "cache"), expected)
    assert "loaded without a packed copy" in caplog.text


def test_an_error_of_the_checkpoint_is_an_error(llama, folder):
    path = llama / "model.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(ValueError):
        logits(llama)
    assert not copies(folder)


def test_impossible_settings_are_refused(llama, monkeypatch):
    for name, value in {"PACE_CACHE_SIZE": "much", "PACE_CACHE": "here/below"}.items():
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"{name}.*{value}"):
            patch.setenv("PACE_CACHE_SIZE", "1GiB")
            patch.setenv(name, value)
            LLMModel(llama, progress=False)


# -- disk space and memory


def test_keys_and_values_leave_the_pages_of_a_copy_alone(llama, folder, monkeypatch):
    """The system counts these pages as available."""
    monkeypatch.setattr(load, "available_memory_bytes", lambda kept=0: (1 << 26) - kept)
    budgets, in_file = [], []
    for cache in (None, None, False):
        with LLMModel(llama, progress=False, weights_cache=cache) as model:
            budgets.append(load._cache_budget(LoadOptions(llama, weights_cache=cache), model._model))
            in_file.append(model._model.mapped_nbytes)
    assert in_file[0] == in_file[1] > 10_000 and in_file[2] == 0
    assert budgets == [((1 << 26) - size) // 2 for size in in_file]


def test_those_not_used_for_longest_go_first_and_those_without_a_model_before(tmp_path, folder, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "pace")
    models = [save_model(tmp_path / name) for name in ("a", "b", "c", "d")]
    for age, path in enumerate(models[:3]):
        logits(path)
        [copy] = folder.glob(path.name + ".*")
        os.utime(copy, (1000 + age, copy.stat().st_mtime))
    size = copy.stat().st_size
    shutil.rmtree(models[2])
    monkeypatch.setenv("PACE_CACHE_SIZE", str(3 * size + 100))
    names = lambda: [path.name.partition(".")[0] for path in copies(folder)]
    logits(models[3])
    assert names() == ["a", "b", "d"]
    logits(models[0])  # now the most recently used
    logits(save_model(tmp_path / "e"))
    assert names() == ["a", "d", "e"]
    assert caplog.text.count("to make room for another copy") == 2


def test_other_files_of_the_folder_stay(llama, tmp_path, folder, monkeypatch):
    folder.mkdir()
    others = {
        "mine": b"1" * 1000,
        "yolov3.weights": b"2" * 1000,
        "mine.0123456789ab.weights": b"3" * 1000,
        "named.weights": weights_cache.TITLE + b'\n"/nowhere"\n',
        "mine.weights.part": b"4",
    }
    for name, data in others.items():
        (folder / name).write_bytes(data)
    (folder / "damaged.0123456789ab.weights").write_bytes(weights_cache.TITLE + b"\n{{{\n")
    logits(llama)
    assert {copy.checkpoint for copy in weights_cache.list_copies(folder)} == {"?", str(llama)}
    [size] = [copy.nbytes for copy in weights_cache.list_copies(folder) if copy.checkpoint != "?"]
    monkeypatch.setenv("PACE_CACHE_SIZE", str(size + 10))
    logits(save_model(tmp_path / "other"))
    assert [Path(copy.checkpoint).name for copy in weights_cache.list_copies(folder)] == ["other"]
    assert {name: (folder / name).read_bytes() for name in others} == others


def test_what_a_killed_process_left_is_removed(llama, folder):
    folder.mkdir()
    left, locked = (folder / f"{name}.0123456789ab.weights{PARTIAL}" for name in ("left", "locked"))
    left.write_bytes(bytes(1000))
    with open(locked, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(2):  # the second time, the model has its copy
            logits(llama)
            assert not left.exists() and locked.exists(), "who writes a copy holds its lock"
            left.write_bytes(bytes(1000))


def test_the_folder_is_the_users_alone(folder):
    logits(TINY)
    assert folder.stat().st_mode & 0o777 == 0o700
