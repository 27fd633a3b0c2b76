"""Files of saved sessions: each damage is found, and nothing large is allocated before."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from pace.llm.cache.saved_file import LENGTH, MAGIC, SavedFile, write_file
from pace.llm.clients.session import Session
from tests.llm.clients.test_saved_sessions import fake_driver, tokens_of
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
    refused(driver, path, MAGIC.replace(b"1", b"2") + head[len(MAGIC) :])


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
