"""Files of saved sessions: each damage is found, and nothing large is allocated before."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pace.llm.cache.saved_file import LENGTH, MAGIC, READ_AHEAD, SavedFile, write_file
from pace.llm.clients.session import Session
from tests.llm.clients.test_saved_sessions import fake_driver, of_version_1, tokens_of
from tests.llm.fake_model import FakeModel
from tests.llm.generators import check_idle


@pytest.fixture(scope="module")
def driver():
    return fake_driver(FakeModel(windows=(None, 20), num_states=1))


@pytest.fixture(scope="module")
def whole(driver, tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "saved"
    with Session(driver) as session:
        session.append(tokens_of(20))
        session.save(path)
    return path.read_bytes()


def refused(driver, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    with pytest.raises(ValueError, match="damaged-file"):
        Session.load(driver, path)


@pytest.mark.parametrize("step", [97, pytest.param(1, marks=pytest.mark.thorough)])
def test_truncated_and_longer_files_are_refused(driver, whole: bytes, tmp_path: Path, step: int) -> None:
    path = tmp_path / "damaged-file"
    path.write_bytes(whole)
    for length in sorted({*range(40), *range(0, len(whole), step), len(whole) - 1}, reverse=True):
        os.truncate(path, length)
        with pytest.raises(ValueError, match="damaged-file cannot be loaded: it is"):
            SavedFile(path)
    refused(driver, path, whole[: len(whole) // 2])
    refused(driver, path, whole + b"\0")
    check_idle(driver)


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=pytest.mark.thorough)])
def test_each_wrong_byte_is_refused(driver, whole: bytes, tmp_path: Path, step: int) -> None:
    """The session of another text, which is in memory meanwhile, loses nothing."""
    draw = random.Random(1)
    with Session(driver) as session:
        session.append(tokens_of(50))
        for place in [*range(len(MAGIC) + 8), *range(len(MAGIC) + 8, len(whole), step)]:
            data = bytearray(whole)
            data[place] ^= draw.randrange(1, 256)
            refused(driver, tmp_path / "damaged-file", bytes(data))
        assert torch.equal(session.append([7]), driver.engine.model.logits_of(session.tokens)[None])
    check_idle(driver)


def test_sizes_are_checked_before_memory_is_taken(driver, tmp_path: Path) -> None:
    path = tmp_path / "damaged-file"
    refused(driver, path, MAGIC + LENGTH.pack(1 << 62))
    refused(driver, path, MAGIC + LENGTH.pack(15 << 20))
    write_file(path, {}, [4], [b"1234"])
    head = path.read_bytes().replace(b'"sizes":[4]', b'"sizes":[4000000000]')
    refused(driver, path, head)
    for version in (b"0", b"1", b"3"):
        refused(driver, path, MAGIC.replace(b"2", version) + path.read_bytes()[len(MAGIC) :])


PIECES = [bytes([number + 1]) * (0 if number == 3 else 5000 + 7 * number) for number in range(3 * READ_AHEAD)]


@pytest.mark.parametrize("version", [1, 2])
def test_damage_is_found_in_each_region(tmp_path: Path, version: int) -> None:
    """In the head, at the ends and in the middle of each piece, in each digest and in the seal. Also whole pieces that
    changed places."""
    path = tmp_path / "damaged-file"
    write_file(path, {"a": 1}, list(map(len, PIECES)), PIECES)
    whole = path.read_bytes() if version == 2 else of_version_1(path.read_bytes())
    path.write_bytes(whole)
    with SavedFile(path) as file:
        assert file.version == version and file.head["a"] == 1
        assert list(map(bytes, file.pieces(0))) == PIECES and list(map(bytes, file.pieces(11))) == PIECES[11:]
        starts = file._starts
    digest_bytes = {1: 16, 2: 8}[version]
    middles = [(start + end) // 2 for start, end in zip(starts, starts[1:])]
    damage = [{place: whole[place] ^ 1} for place in (*starts, *middles, *(start - 1 for start in starts))]
    damage += [{place: whole[place] ^ 128} for place in range(starts[-1], len(whole), digest_bytes)]
    damage.append({starts[1] + k: whole[starts[2] + k] for k in range(5000)})
    for change in damage:
        data = bytearray(whole)
        for place, byte in change.items():
            data[place] = byte
        path.write_bytes(data)
        with pytest.raises(ValueError, match="damaged-file cannot be loaded: .*damaged"), SavedFile(path) as file:
            list(file.pieces(0))


def test_pieces_are_read_into_the_same_memory(tmp_path: Path) -> None:
    """So loading a file takes no more memory than a few pieces. Each is right until the next."""
    write_file(tmp_path / "file", {}, list(map(len, PIECES)), PIECES)
    with SavedFile(tmp_path / "file") as file:
        places = set()
        for piece, expected in zip(file.pieces(0), PIECES, strict=True):
            time.sleep(0.002)  # the other threads have read ahead
            assert piece == expected
            places.add(np.frombuffer(piece, np.uint8).ctypes.data if piece else 0)
    assert len(places) <= READ_AHEAD + 1


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Not what another process may be writing now, and nothing of other files."""
    name = "sav[e]d"
    for partial, age in ((f".{name}.1.part", 4000), (f".{name}.2.part", 1000), (".saved.3.part", 4000)):
        (tmp_path / partial).write_bytes(b"")
        os.utime(tmp_path / partial, (time.time() - age,) * 2)
    write_file(tmp_path / name, {}, [1], [b"1"])
    assert {path.name for path in tmp_path.iterdir()} == {name, f".{name}.2.part", ".saved.3.part"}


@pytest.mark.parametrize("number", [0, 5])
def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path, number: int) -> None:
    path = tmp_path / "damaged-file"
    write_file(path, {}, list(map(len, PIECES)), PIECES)
    with SavedFile(path) as file:
        os.truncate(path, file._starts[number] + 1)
        with pytest.raises(ValueError, match="damaged-file cannot be loaded: its contents are damaged"):
            list(file.pieces(number))


@pytest.mark.parametrize(
    "change",
    [
        {"num_computed": 21},
        {"num_computed": -1},
        {"num_computed": True},
        {"num_prompt_tokens": "20"},
        {"model": []},
        {"model": {}},
        {"num_computed": 3},
        {"starts": [0]},
        {"starts": None},
        {"starts": [0, 1]},
        {"has_mark": False},
        {"starts": [0.0, 0]},
    ],
    ids=str,
)
def test_heads_that_lie_are_refused(driver, whole: bytes, tmp_path: Path, change: dict) -> None:
    """Also with checksums that are right."""
    path = tmp_path / "damaged-file"
    path.write_bytes(whole)
    with SavedFile(path) as file:
        head = {name: value for name, value in file.head.items() if name != "sizes"} | change
        pieces = [bytes(file.piece(number)) for number in range(len(file.sizes))]
    write_file(path, head, list(map(len, pieces)), pieces)
    refused(driver, path, path.read_bytes())
    check_idle(driver)


def test_tokens_that_a_model_lacks_are_refused(driver, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged-file"
    path.write_bytes(whole)
    with SavedFile(path) as file:
        head = {name: value for name, value in file.head.items() if name != "sizes"}
        pieces = [bytes(file.piece(number)) for number in range(len(file.sizes))]
    for tokens in (b"\xff" * len(pieces[0]), b"\x32\0\0\0" * (len(pieces[0]) // 4), pieces[0][:-1]):
        write_file(path, head, [len(tokens), *map(len, pieces[1:])], [tokens, *pieces[1:]])
        refused(driver, path, path.read_bytes())
