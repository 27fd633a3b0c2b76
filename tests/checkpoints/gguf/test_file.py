"""GgufFile reads the same as the gguf package, and refuses damaged files when it opens them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from pace.checkpoints.gguf.blocks import BLOCK_TYPES, Q2_0, WIDE_Q2_0
from pace.checkpoints.gguf.file import GgufFile, is_gguf
from tests.checkpoints.gguf.bytes_of_files import ARRAY, BOOL, F32, STRING, U8, U32, entry, tensor, text, whole
from tests.waiting import cpu_limit


def opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return GgufFile(path)


MATRIX = np.arange(12, dtype=np.float32).reshape(3, 4)


def test_reads_what_the_gguf_package_reads(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    integers = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31)}
    for kind, value in {**integers, "uint64": 2**63, "int64": -(2**62)}.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_float32("test.float32", 1e-5)
    writer.add_float64("test.float64", 1e-5)
    writer.add_bool("test.bool", True)
    writer.add_string("test.string", "naïve ▁ 🙂")
    writer.add_array("test.strings", ["a", "", "▁b"])
    writer.add_array("test.integers", [1, -2, 3])
    writer.add_array("test.floats", [0.5, -1.5])
    writer.add_array("test.bools", [True, False])
    writer.add_custom_alignment(64)
    random = np.random.default_rng(0)
    written = {
        "vector": random.normal(size=7).astype(np.float32),
        "matrix": random.normal(size=(5, 32)).astype(np.float16),
        "cube": random.normal(size=(2, 3, 4)).astype(np.float32),
    }
    written |= {"scalars": random.normal(size=1), "blocks": random.integers(0, 256, (4, 68), dtype=np.uint8)}
    for name, values in written.items():
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.Q8_0 if name == "blocks" else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            value = ours.metadata[key]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), key
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}
    assert list(ours.tensors) == list(written)
    for found in theirs.tensors:
        tensor = ours.tensors[found.name]
        assert (tensor.begin, tensor.nbytes) == (found.data_offset, found.n_bytes)
        assert list(tensor.shape[::-1]) == found.shape.tolist()
        data = np.ascontiguousarray(found.data).view(np.uint8).ravel()
        assert np.array_equal(ours.rows(found.name).numpy().ravel(), data)
    kinds = [ours.tensors[name].kind for name in ("blocks", "matrix", "scalars")]
    assert kinds == [BLOCK_TYPES[8], torch.float16, torch.float64]
    assert np.array_equal(ours.rows("blocks", 1, 3).numpy(), written["blocks"][1:3])
    assert np.array_equal(ours.rows("cube", 3, 6).numpy().view(np.float32), written["cube"][1])
    assert ours.rows("vector", 0, 7).shape == (1, 28)


def test_typed_reading_names_the_file_and_the_key(tmp_path):
    entries = [
        entry("count", U32, struct.pack("<I", 5)),
        entry("name", STRING, text("x")),
        entry("on", BOOL, b"\1"),
        entry("size", F32, struct.pack("<f", 0.5)),
    ]
    metadata = opened(tmp_path, whole(entries)).metadata
    assert metadata.integer("count") == 5 and metadata.text("name") == "x"
    assert metadata.flag("on") is True and metadata.number("size") == 0.5
    assert metadata.integer("absent") is None and metadata.integer("absent", 3) == 3 and metadata.number("count") == 5
    for read, key, what in (
        (metadata.integer, "size", "an integer"),
        (metadata.integer, "on", "an integer"),
        (metadata.flag, "count", "true or false"),
        (metadata.text, "count", "a string"),
    ):
        with pytest.raises(ValueError, match=rf"model\.gguf: {key} must be {what}; got"):
            read(key)
    for read, what in ((metadata.texts, "an array of strings"), (metadata.numbers, "an array of numbers")):
        with pytest.raises(ValueError, match=rf"model\.gguf: name must be {what}; got 'x'"):
            read("name")
    with pytest.raises(ValueError, match=r"model\.gguf has no llama\.block_count in its metadata"):
        metadata.required("llama.block_count", None)


ONE = [tensor("x", (3, 4), 0, 0)]


def with_entry(kind, data, key="a"):
    return whole([entry(key, kind, data)])


def with_array(kind, count, data=b""):
    return with_entry(ARRAY, struct.pack("<IQ", kind, count) + data)


def with_tensors(*tensors, num_bytes=48):
    return whole(tensors=tensors, data=bytes(num_bytes))


ALIGNMENT = "general.alignment"
DAMAGED = {
    "empty": (b"", "is not a GGUF file: it has 0 bytes"),
    "other magic": (b"PK\3\4" + bytes(40), "is not a GGUF file: .* begins with b'PK"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    "counts beyond the file": (whole(num_entries=2**60), "announces 1,152,921,504,606,846,976 metadata entries"),
    "tensors beyond the file": (whole(num_tensors=2**40), "announces 1,099,511,627,776 tensors"),
    "string beyond the file": (whole([struct.pack("<Q", 2**50) + bytes(40)]), "damaged: its header continues beyond"),
    "array beyond the file": (with_array(U8, 2**61), "announces .* numbers as the value of 'a'"),
    "strings beyond the file": (with_array(STRING, 2**61), "announces .* strings as the value of 'a'"),
    "a string of strings beyond the file": (
        with_array(STRING, 2, text("x") + struct.pack("<Q", 2**63)) + bytes(64),
        "continues beyond",
    ),
    "unknown type": (with_entry(77, bytes(8)), "the value of 'a' is of the unknown type 77"),
    "key twice": (whole([entry("a", U8, b"\1")] * 2), "has the key 'a' twice"),
    "key not UTF-8": (with_entry(U8, b"\1", b"\xff"), "a key is not UTF-8"),
    "text not UTF-8": (with_entry(STRING, text(b"\xff")), "the value of 'a' is not UTF-8"),
    "tensor twice": (with_tensors(*ONE * 2), "has the tensor 'x' twice"),
    "alignment of 0": (with_entry(U32, bytes(4), ALIGNMENT), "general.alignment must be a power of two; got 0"),
    "alignment of 24": (with_entry(U32, struct.pack("<I", 24), ALIGNMENT), "must be a power of two; got 24"),
    "alignment as text": (with_entry(STRING, text("32"), ALIGNMENT), "alignment must be an integer; got '32'"),
    "data truncated": (with_tensors(*ONE, num_bytes=47), "damaged: tensor 'x' ends at byte 144 of a file of 143"),
    "offset outside": (with_tensors(tensor("x", (3, 4), 0, 2**63)), "tensor 'x' ends at byte"),
    "shape beyond all": (with_tensors(tensor("x", (2**63, 2**63), 0, 0)), "which no file can hold"),
    "dimensions": (with_tensors(tensor("x", (1,) * 5, 0, 0)), "has 5 dimensions; at most 4"),
    "share bytes": (with_tensors(*ONE, tensor("y", (4,), 0, 32)), "'x' and 'y' in .* share bytes"),
    "no whole blocks": (
        with_tensors(tensor("x", (2, 40), 2, 0)),
        r"shape \[2, 40\]; a row of Q4_0 has a multiple of 32",
    ),
    "blocks without rows": (with_tensors(tensor("x", (), 2, 0)), "a row of Q4_0"),
}


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.alone
def test_damaged_files_are_refused_at_once(tmp_path, name):
    content, message = DAMAGED[name]
    with (
        cpu_limit(1, "refused before anything large is read or made"),
        pytest.raises(ValueError, match=message) as error,
    ):
        opened(tmp_path, content)
    assert "model.gguf" in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(whole(version=1), "version 1 of GGUF; implemented: 2, 3"), (whole(version=4), "version 4 of GGUF"),
     (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian.*gguf-convert-endian"),
     (whole([entry("a", ARRAY, struct.pack("<IQIQ", ARRAY, 1, U8, 0))]), "the value of 'a' is an array of arrays"),
     (whole(tensors=[tensor("blk.0.ffn_up.weight", (1, 256), 31, 0)], data=bytes(66)),
       r"'blk\.0\.ffn_up\.weight' .* is stored as Q4_0_4_4, .*implemented: float32, .*Q4_K"),
     (whole(tensors=[tensor("x", (1, 256), 99, 0)], data=bytes(66)), "is stored as type 99")],
    ids=["version 1", "version 4", "big endian", "nested", "Q4_0_4_4", "unknown type"],
)  # fmt: skip
def test_what_is_not_implemented_is_refused_by_name(tmp_path, content, message):
    with pytest.raises(NotImplementedError, match=message) as error:
        opened(tmp_path, content)
    assert "model.gguf" in str(error.value)


def test_every_cut_of_a_file_is_refused(tmp_path):
    """A file that ends too early, at any byte."""
    entries = [
        entry("general.architecture", STRING, text("llama")),
        entry("tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("ab") + text("c")),
        entry("n", ARRAY, struct.pack("<IQ2f", F32, 2, 1, 2)),
    ]
    content = whole(entries, ONE, MATRIX.tobytes())
    file = opened(tmp_path, content)
    assert file.metadata["tokens"] == ["ab", "c"] and np.array_equal(file.rows("x").numpy().view(np.float32), MATRIX)
    for size in range(len(content)):
        with pytest.raises(ValueError, match=r"model\.gguf"):
            opened(tmp_path, content[:size])


def test_a_header_of_unlimited_size_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pace.checkpoints.gguf.file.MAX_HEADER_BYTES", 100)
    with pytest.raises(ValueError, match="a header of more than 100 bytes"):
        opened(tmp_path, whole([entry("a", STRING, text("x" * 200))]))


def test_tensors_without_elements_and_gaps_are_read(tmp_path):
    tensors = [tensor("none", (0, 4), 0, 0), tensor("late", (3, 4), 0, 64)]
    file = opened(tmp_path, whole(tensors=tensors, data=bytes(64) + MATRIX.tobytes() + bytes(16)))
    assert file.rows("none").shape == (0, 16) and np.array_equal(
        file.rows("late", 2).numpy().view(np.float32), MATRIX[2:]
    )


@pytest.mark.parametrize("block, kind", [(18, Q2_0), (34, WIDE_Q2_0)])
def test_the_space_between_tensors_tells_the_blocks_of_q2_0(tmp_path, block, kind):
    """A file has all its Q2_0 tensors in blocks of 64, or all in PrismML's blocks of 128."""
    row = 512 // (64 if block == 18 else 128) * block
    a, vector, b = (3 * row + 31) // 32 * 32, 32, 5 * row
    names = tensor("a", (3, 512), 42, 0), tensor("v", (8,), 0, a), tensor("b", (5, 512), 42, a + vector)
    file = opened(tmp_path, whole((), names, bytes(a + vector + b)))
    assert file.tensors["a"].kind is file.tensors["b"].kind is kind and file.tensors["b"].row_bytes == row
    with pytest.raises(ValueError, match="truncated or damaged|share bytes"):
        opened(tmp_path, whole((), names, bytes(a + vector + b - 64)))


def test_released_rows_can_be_read_again_and_closed_files_cannot(tmp_path):
    file = opened(tmp_path, whole(tensors=ONE, data=MATRIX.tobytes()))
    rows = file.rows("x")
    file.release("x", 0, 2)
    assert np.array_equal(rows.numpy().view(np.float32), MATRIX)
    file.close()
    file.release("x")
    assert np.array_equal(rows.numpy().view(np.float32), MATRIX), "a view outlives the file"
    with pytest.raises(ValueError, match="has been closed"):
        file.rows("x")


def test_what_is_a_gguf_file(tmp_path):
    named, other, plain = tmp_path / "a.gguf", tmp_path / "sha256-0f", tmp_path / "b.txt"
    named.write_bytes(b"")
    other.write_bytes(b"GGUF")
    plain.write_bytes(b"text")
    (tmp_path / "folder.gguf").mkdir()
    assert is_gguf(named) and is_gguf(other)
    assert not is_gguf(plain) and not is_gguf(tmp_path / "folder.gguf") and not is_gguf(tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(ValueError, match="is a directory"):
        GgufFile(tmp_path / "folder.gguf")
