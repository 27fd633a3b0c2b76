"""CheckpointReader: both formats, single and sharded. Damaged files are refused before anything is read."""

from __future__ import annotations

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save, save_file

from pace.checkpoints import files as files_module
from pace.checkpoints.reader import CheckpointReader
from pace.checkpoints.safetensors_file import MAX_HEADER_BYTES
from pace.checkpoints.torch_file import TorchFile
from pace.memory import resident_bytes
from tests.fuzz import checkpoints, hostile_pickles

STATE = {
    "a.weight": torch.arange(60, dtype=torch.float32).reshape(12, 5) - 30,
    "b.weight": torch.linspace(-3, 3, 70 * 9).reshape(70, 9).to(torch.bfloat16),
    "c.bias": torch.tensor([1.5, -2.0, 0.25], dtype=torch.float16),
    "d": torch.tensor(7.0),
    "e.weight": torch.zeros(0, 4),
}


def write(folder, kind, state=None):
    for name, data in checkpoints.weight_files(kind, state or STATE).items():
        (folder / name).write_bytes(data)
    return folder


def raw_file(path, header, data=b"", length=None):
    """Writes a safetensors file with this header, well-formed or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_reads_every_tensor_as_it_was_saved(kind, tmp_path):
    with CheckpointReader(write(tmp_path, kind)) as reader:
        assert {name: (info.dtype, info.shape) for name, info in reader.tensors.items()} == {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in STATE.items()
        }
        assert reader.total_bytes == sum(tensor.nbytes for tensor in STATE.values())
        for name, tensor in STATE.items():
            assert torch.equal(reader.read(name), tensor)
            reader.release(name)
            assert torch.equal(reader.read(name), tensor), "after release"


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_pieces_cover_every_row_once(kind, tmp_path):
    with CheckpointReader(write(tmp_path, kind)) as reader:
        for name, tensor in STATE.items():
            ranges = reader.row_ranges(name, piece_bytes=16 * 9 * 2)
            pieces = []
            for start, stop in ranges:
                pieces.append(reader.read(name, start, stop).clone())
                reader.release(name, start, stop)
            assert torch.equal(torch.cat(pieces) if tensor.dim() else pieces[0], tensor)
        assert len(reader.row_ranges("b.weight", piece_bytes=16 * 9 * 2)) == 5


def test_views_are_of_the_file_and_outlive_the_reader(tmp_path):
    with CheckpointReader(write(tmp_path, "safetensors")) as reader:
        first, again = reader.read("b.weight"), reader.read("b.weight")
        assert first.data_ptr() == again.data_ptr(), "a copy was made"
        reader.release("b.weight")
    assert torch.equal(first, STATE["b.weight"])
    with pytest.raises(ValueError, match="closed"):
        reader.read("b.weight")


@pytest.mark.parametrize("padding", range(4))
def test_data_may_start_at_any_byte(padding, tmp_path):
    data = save(STATE)
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * (length % 4 + padding)
    raw_file(tmp_path / "model.safetensors", header, data[8 + length :])
    reader = CheckpointReader(tmp_path)
    for name, tensor in STATE.items():
        found = reader.read(name)
        assert torch.equal(found, tensor)
        assert found.data_ptr() % found.dtype.itemsize == 0


def test_safetensors_come_before_bin_and_single_before_sharded(tmp_path):
    write(tmp_path, "bin", {"x": torch.ones(1)})
    write(tmp_path, "bin-sharded", {"x": torch.ones(1), "y": torch.ones(1)})
    assert set(CheckpointReader(tmp_path).tensors) == {"x"}
    write(tmp_path, "safetensors-sharded", {"s": torch.ones(1), "t": torch.ones(1)})
    assert set(CheckpointReader(tmp_path).tensors) == {"s", "t"}
    write(tmp_path, "safetensors", {"u": torch.ones(1)})
    assert set(CheckpointReader(tmp_path).tensors) == {"u"}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [({"w": entry("F99")}, bytes(8), "'w'.*unknown dtype 'F99'"),
     ({"w": entry(shape=(3,))}, bytes(8), "'w'.*8 bytes.*needs 12"),
     ({"w": entry(shape=(-2,))}, bytes(8), "'w'.*shape"), ({"w": entry(shape=(2.0,))}, bytes(8), "'w'.*shape"),
     ({"w": entry(shape=(True, 2))}, bytes(8), "'w'.*shape"),
     ({"w": entry(shape=(2**32, 2**32), offsets=(0, 0))}, b"", "'w'.*0 bytes"),
     ({"w": entry(offsets=(8, 0))}, bytes(8), "'w'.*-8 bytes"),
     ({"w": entry(offsets=(0, 8, 16))}, bytes(8), "'w'.*data_offsets"),
     ({"w": entry(offsets=(8, 16))}, bytes(16), "'w'.*leaves bytes 0..8 unused"),
     ({"v": entry(), "w": entry(offsets=(4, 12))}, bytes(12), "'w'.*overlaps"),
     ({"v": entry(), "w": entry()}, bytes(8), "overlaps"), ({"w": entry()}, bytes(7), "truncated"),
     ({"w": entry()}, bytes(9), "belong to no tensor"),
     ({"w": [1]}, b"", "'w'.*must have dtype, shape and data_offsets"),
     ({"w": {"dtype": "F32"}}, b"", "'w'.*must have dtype"),
     (b'{"w": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "w": 3}', b"", "'w' is given twice"),
     (b"[]", b"", "JSON object"), (b"{", b"", "not valid JSON"), (b'{"\xff": 1}', b"", "not valid JSON"),
     (b"[" * 100_000, b"", "nested too deeply")],
)  # fmt: skip
def test_headers_that_are_refused(header, data, message, tmp_path):
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(ValueError, match=message) as caught:
        CheckpointReader(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "too few"), (b"1234567", "too few"), (struct.pack("<Q", 100) + b"{}", "truncated"),
     (struct.pack("<Q", 2**63) + b"{}", "announces a header of 9,223"),
     (struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}", "at most"),
     (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git lfs pull")],
)  # fmt: skip
def test_beginnings_that_are_refused(content, message, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        CheckpointReader(tmp_path)


def test_every_truncation_of_a_file_is_noticed(tmp_path):
    data = save({"w": torch.ones(3, 2), "v": torch.ones(1)})
    for length in range(len(data)):
        (tmp_path / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(ValueError, match="truncated|too few"):
            CheckpointReader(tmp_path)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3"])
def test_dtypes_that_torch_may_lack_are_refused_by_name(dtype, tmp_path):
    raw_file(tmp_path / "model.safetensors", {"w": entry(dtype)}, bytes(8))
    with pytest.raises(NotImplementedError, match=f"'w'.*{dtype}"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_may_be_there_but_not_be_read(dtype, tmp_path):
    """GPT-J's causal masks are boolean. A checkpoint may hold them, but a weight must not be boolean."""
    save_file({"mask": torch.zeros(4).to(dtype), "w": torch.ones(2)}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    assert reader.tensors["mask"].dtype == dtype
    with pytest.raises(NotImplementedError, match=f"'mask'.*{str(dtype).removeprefix('torch.')}"):
        reader.read("mask")


# -- indexes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/dev/zero", "/etc/passwd", "", ".", "..", "a/../../b", "a\0b", None, 3, ["x"], {}],
)
def test_an_index_cannot_name_files_outside_its_directory(shard, tmp_path):
    write(tmp_path, "safetensors-sharded")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": shard}}))
    with pytest.raises(ValueError, match="a.weight.*index.json"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors-sharded", "bin-sharded"])
def test_indexes_that_do_not_fit_their_shards(kind, tmp_path):
    write(tmp_path, kind)
    path = next(tmp_path.glob("*.index.json"))
    original = json.loads(path.read_text())
    first, second = sorted(set(original["weight_map"].values()))

    def open_with(**changes):
        path.write_text(json.dumps(original | {"weight_map": original["weight_map"] | changes}))
        return CheckpointReader(tmp_path)

    with pytest.raises(ValueError, match=f"'ghost' should be in {first}, but is missing"):
        open_with(ghost=first)
    moved = next(name for name, shard in original["weight_map"].items() if shard == first)
    with pytest.raises(ValueError, match=f"'{moved}' should be in {second}, but is in {first}"):
        open_with(**{moved: second})
    (tmp_path / first).rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match=f"{first} does not exist"):
        open_with()
    (tmp_path / first).write_bytes((tmp_path / second).read_bytes())
    with pytest.raises(ValueError, match="is in both"):
        open_with()


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "[]", "", "{"])
def test_indexes_that_are_no_index(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="model.safetensors.index.json"):
        CheckpointReader(tmp_path)


def test_tensors_that_the_index_omits_are_read(tmp_path):
    """transformers loads whole shards. The model decides if the tensor belongs to it."""
    write(tmp_path, "safetensors-sharded")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["a.weight"]
    path.write_text(json.dumps(index))
    assert torch.equal(CheckpointReader(tmp_path).read("a.weight"), STATE["a.weight"])


# -- what is not a file of weights -------------------------------------------------------------------------------------


def test_links_into_a_cache_are_followed(tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    write(tmp_path / "blobs", "safetensors")
    (tmp_path / "snapshot/model.safetensors").symlink_to("../blobs/model.safetensors")
    assert len(CheckpointReader(tmp_path / "snapshot").tensors) == len(STATE)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_special_files_are_refused(name, tmp_path):
    path = tmp_path / name
    for make, error, message in (
        (path.mkdir, ValueError, "is a directory"),
        (lambda: os.mkfifo(path), ValueError, "device, pipe or socket"),
        (lambda: path.symlink_to("/dev/zero"), ValueError, "device, pipe or socket"),
        (lambda: path.symlink_to("nowhere"), FileNotFoundError, "nowhere"),
        (lambda: path.symlink_to(name), ValueError, "cannot be opened"),
    ):
        make()
        with pytest.raises(error, match=message):
            CheckpointReader(tmp_path)
        path.unlink() if path.is_symlink() or not path.is_dir() else path.rmdir()


def test_a_file_without_permission(tmp_path, monkeypatch):
    write(tmp_path, "safetensors")

    def refuse(*args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files_module.os, "open", refuse)  # not chmod: root may read everything
    with pytest.raises(PermissionError, match="model.safetensors may not be read"):
        CheckpointReader(tmp_path)


def test_directories_without_weights_say_what_they_have(tmp_path):
    with pytest.raises(FileNotFoundError, match="no weights"):
        CheckpointReader(tmp_path)
    (tmp_path / "model.Q4_K.gguf").touch()
    with pytest.raises(FileNotFoundError, match="model.Q4_K.gguf"):
        CheckpointReader(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="index file is missing"):
        CheckpointReader(tmp_path)
    with pytest.raises(FileNotFoundError, match="not a directory"):
        CheckpointReader(tmp_path / "absent")


# -- pickles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bin", "bin-legacy"])
@pytest.mark.parametrize("hostile", hostile_pickles.HOSTILE, ids=lambda hostile: hostile.__name__)
def test_hostile_pickles(kind, hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(checkpoints.dump(kind, {"w": torch.ones(2), "x": hostile()}))
    with pytest.raises(ValueError, match="pytorch_model.bin") as caught:
        CheckpointReader(tmp_path)
    if hostile in (hostile_pickles.CallsSystem, hostile_pickles.Opens, hostile_pickles.Evaluates):
        assert "run code" in str(caught.value)
    assert "weights_only" not in str(caught.value), "torch's advice to switch the protection off"
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [([torch.ones(2)], "holds a list"), ({"model": {"w": torch.ones(2)}}, "'model'.*is a dict"),
     ({"w": torch.ones(2), "epoch": 3}, "'epoch'.*is a int"), ({3: torch.ones(2)}, "3"),
     ({"w": torch.ones(2, 2).to_sparse()}, "'w'.*not a plain dense tensor")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["bin", "bin-legacy"])
def test_other_contents_of_bin_files(kind, content, message, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(checkpoints.dump(kind, content))
    with pytest.raises(ValueError, match=message):
        TorchFile(path)
    write(tmp_path, kind)
    assert torch.equal(torch.load(path, weights_only=True)["a.weight"], STATE["a.weight"]), "torch.load is as it was"


@pytest.mark.parametrize("kind", ["bin", "bin-legacy"])
def test_views_and_parameters_in_bin_files(kind, tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "transposed": base.t(), "parameter": torch.nn.Parameter(base), "expanded": torch.ones(1).expand(3, 2),
        "row": base[1],
    }  # fmt: skip
    write(tmp_path, kind, state)
    file = TorchFile(tmp_path / "pytorch_model.bin")
    for name, tensor in state.items():
        assert torch.equal(file.read(name), tensor) and file.read(name).is_contiguous()
        file.release(name)
        assert torch.equal(file.read(name), tensor)


@pytest.mark.parametrize("padding", range(4))
def test_legacy_data_may_start_at_any_byte(padding, tmp_path):
    state = {"n" + "a" * padding: torch.arange(40.0).reshape(20, 2), "b": torch.arange(5.0, dtype=torch.float64)}
    write(tmp_path, "bin-legacy", state)
    file = TorchFile(tmp_path / "pytorch_model.bin")
    for name, tensor in state.items():
        assert torch.equal(file.read(name), tensor)
        assert file.read(name).data_ptr() % tensor.itemsize == 0
        assert torch.equal(file.read(name, 1, 3), tensor[1:3])


def test_legacy_tensors_that_share_a_layout(tmp_path):
    base = torch.arange(12.0)
    write(tmp_path, "bin-legacy", {"head": base, "embedding": base, "tail": base[6:]})
    file = TorchFile(tmp_path / "pytorch_model.bin")
    assert torch.equal(file.read("head"), base) and torch.equal(file.read("tail"), base[6:])
    assert (tmp_path / "pytorch_model.bin").stat().st_size < 2000


def test_damaged_legacy_files(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    data = checkpoints.dump("bin-legacy", {"w": torch.arange(7.0), "v": torch.ones(3, 2, dtype=torch.bfloat16)})
    first_key = data.rindex(b"]q\0(X") + 9
    cases = {f"cut to {length} bytes": data[:length] for length in range(len(data))}
    cases |= {
        f"a layout of {n} elements": data.replace(b"\7" + bytes(7), n.to_bytes(8, "little", signed=True))
        for n in (6, 8, -7, 2**62)
    }
    cases["a key that nothing names"] = data[:first_key] + b"x" + data[first_key + 1 :]
    cases["more elements than the layout has"] = data.replace(b"K\7\x85", b"K\x7f\x85")
    shared = checkpoints.dump("bin-legacy", {"w": (base := torch.arange(7.0)), "view": base[:]})
    cases["a layout of two sizes"] = shared.replace(b"K\7Nt", b"K\x08Nt", 1)
    cases["a negative number of elements"] = data.replace(b"K\7Nt", b"J\xf9\xff\xff\xffNt")
    for what, content in cases.items():
        assert content != data, what
        path.write_bytes(content)
        with pytest.raises(ValueError, match="pytorch_model.bin"):
            TorchFile(path)


def test_a_compressed_archive_is_refused(tmp_path):
    """If it was mapped, its compressed bytes would be taken for weights."""
    import zipfile

    torch.save({"w": torch.zeros(1000)}, tmp_path / "plain.bin")
    with (
        zipfile.ZipFile(tmp_path / "plain.bin") as source,
        zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    with pytest.raises(ValueError, match="compressed"):
        TorchFile(tmp_path / "x.bin")


def test_bin_files_that_are_something_else(tmp_path):
    path = tmp_path / "pytorch_model.bin"
    lfs = b"version https://git-lfs.github.com/spec/v1\n"
    for content in (b"", b"PK\x03\x04", b"hello", pickle.dumps({"w": 1}), lfs):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="pytorch_model.bin"):
            TorchFile(path)


@pytest.mark.parametrize("kind", ["safetensors", "bin", "bin-legacy"])
@pytest.mark.alone
def test_release_lowers_resident_memory(kind, tmp_path):
    size = 64 << 20
    reader = CheckpointReader(write(tmp_path, kind, {"w": torch.ones(1024, size // 4096)}))
    assert float(reader.read("w").sum()) == size / 4
    full = resident_bytes()
    reader.release("w")
    released = full - resident_bytes()
    assert released > size * 0.9, f"{released >> 20} of {size >> 20} MB were given back"
