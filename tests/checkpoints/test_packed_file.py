"""Files of packed weights: written once, used only if they are complete, and safe with several processes at once."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import resource
import tempfile
import threading
from pathlib import Path

import pytest

from pace.checkpoints import packed_file
from pace.checkpoints.packed_file import PARTIAL, make_head, open_packed

BODY = 3 * 4096
HEAD = make_head(b"of this")


def fill(mapping):
    mapping[len(HEAD) : len(HEAD) + BODY] = b"w" * BODY


def body(mapping):
    return bytes(mapping[len(HEAD) : len(HEAD) + BODY])


def refuse(mapping):
    pytest.fail("the file was written again")


def make(path, write=fill, use=body, head=HEAD):
    return open_packed(path, head, BODY, use, write)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "a.experts"


def test_heads_are_whole_pages_and_differ_wherever_descriptions_do():
    lengths = [0, 1, 4094, 4095, 4096, 4097]
    heads = [make_head(b"x" * length) for length in lengths]
    assert [len(head) % 4096 for head in heads] == [0] * len(lengths) and len(set(heads)) == len(lengths)
    assert make_head(b"x") != make_head(b"y")


def test_it_is_written_once_and_found_from_then_on(path):
    assert make(path) == b"w" * BODY
    assert make(path, write=refuse) == b"w" * BODY
    assert os.listdir(path.parent) == [path.name]


def cut_off(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    os.truncate(path, path.stat().st_size + 1)


def empty(path):
    path.write_bytes(b"")


def change_head(path):
    with open(path, "r+b") as file:
        file.write(b"O")


@pytest.mark.parametrize(
    ("damage", "level", "reason"),
    [
        (cut_off, "WARNING", "is not whole, with 20479 of 20480 bytes"),
        (grow, "WARNING", "is not whole, with 20481 of 20480 bytes"),
        (empty, "WARNING", "is not whole, with 0 of 20480 bytes"),
        (change_head, "INFO", "has weights of other files, or of another build of pace"),
    ],
)
def test_what_is_not_whole_or_of_something_else_is_written_again(path, damage, level, reason, caplog):
    """The log says why, once; it warns only if something is wrong."""
    caplog.set_level("INFO", "pace")
    make(path)
    damage(path)
    caplog.clear()
    assert make(path) == b"w" * BODY
    why, writing = caplog.records
    assert (why.levelname, why.message) == (level, f"{path} {reason}: it is written again")
    assert make(path, write=refuse) == b"w" * BODY and writing.levelname == "INFO"


def test_a_body_that_its_user_refuses_is_written_anew(path, caplog):
    make(path)
    with open(path, "r+b") as file:
        file.seek(len(HEAD))
        file.write(b"x")

    def checked(mapping):
        if body(mapping) != b"w" * BODY:
            raise ValueError("an x")
        return "good"

    assert make(path, use=checked) == "good" and caplog.text.count("damaged (an x)") == 1


def test_a_file_that_was_not_finished_is_not_used_and_does_not_stay(path):
    path.parent.mkdir()
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(HEAD + b"v" * BODY)  # left by a process that was killed

    def zeros_first(mapping):
        assert body(mapping) == bytes(BODY)
        fill(mapping)

    assert make(path, write=zeros_first) == b"w" * BODY
    assert not partial.exists()


def test_an_error_while_it_is_written_leaves_nothing(path):
    def fail(mapping):
        raise KeyError("a damaged tensor")

    with pytest.raises(KeyError):
        make(path, write=fail)
    assert os.listdir(path.parent) == []
    assert make(path) == b"w" * BODY


def test_a_link_under_the_partial_name_is_not_followed(path):
    path.parent.mkdir()
    target = path.parent / "precious"
    target.write_bytes(b"mine")
    path.with_name(path.name + PARTIAL).symlink_to(target)
    with pytest.raises(OSError, match="cannot be written"):
        make(path)
    assert target.read_bytes() == b"mine"


def test_threads_that_want_it_at_once_get_one_file(path):
    written, results, go = [], [], threading.Barrier(4)

    def slow(mapping):
        written.append(1)
        fill(mapping)

    def run():
        go.wait()
        results.append(make(path, write=slow))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [b"w" * BODY] * 4 and written == [1]
    assert os.listdir(path.parent) == [path.name]


def _write_until_killed(path, started):
    def hang(mapping):
        started.set()
        threading.Event().wait()

    make(path, write=hang)


def test_the_lock_of_a_process_that_was_killed_is_nobodys(path):
    context = multiprocessing.get_context("spawn")
    started = context.Event()
    process = context.Process(target=_write_until_killed, args=(path, started))
    process.start()
    assert started.wait(200)
    results = []
    waiting = threading.Thread(target=lambda: results.append(make(path)))
    waiting.start()
    waiting.join(0.2)
    assert not results and not path.exists(), "it did not wait for who writes"
    process.kill()
    waiting.join(60)
    process.join()
    assert results == [b"w" * BODY]
    assert os.listdir(path.parent) == [path.name]


# -- crashes of the system


@pytest.fixture
def boot(tmp_path, monkeypatch):
    """`boot(name)` sets the system's boot id; None removes it. It begins as "first"."""
    name = tmp_path / "boot_id"
    monkeypatch.setattr(packed_file, "BOOT_ID", name)

    def begin(boot):
        name.unlink() if boot is None else name.write_text(boot + "\n")

    begin("first")
    return begin


def wait_for_sync():
    for thread in threading.enumerate():
        if thread.name == "pace sync":
            thread.join(60)


def age(path):
    os.utime(path, (0, path.stat().st_mtime - packed_file.SYNC_SECONDS - 1))


def test_a_new_file_is_good_until_the_system_goes_down(path, boot, caplog):
    caplog.set_level("INFO", "pace")
    make(path)
    make(path, write=refuse)
    boot("second")
    assert make(path) == b"w" * BODY and "may not have reached the disk" in caplog.text
    assert make(path, write=refuse) == b"w" * BODY


def test_a_file_that_was_opened_later_outlives_the_system(path, boot):
    make(path)
    make(path, write=refuse)
    wait_for_sync()
    boot("second")
    make(path)  # the file was too new to be synced to the disk
    age(path)
    make(path, write=refuse)
    wait_for_sync()
    boot("third")
    assert make(path, write=refuse) == b"w" * BODY


def test_a_file_whose_pages_were_lost_is_written_anew(path, boot):
    """After a crash the file's size may have reached the disk, but not its pages."""
    make(path)
    path.write_bytes(HEAD + bytes(BODY) + bytes(4096))
    assert make(path) == b"w" * BODY


def test_a_system_that_does_not_say_when_it_started_waits_for_the_disk(path, boot, monkeypatch):
    boot(None)
    synced = []
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(descriptor) or sync(descriptor))
    make(path)
    assert synced
    boot("second")
    assert make(path, write=refuse) == b"w" * BODY


# -- folders that cannot be written


def test_a_server_of_files_that_does_not_answer_is_told_like_other_errors(path, monkeypatch):
    """The system's ETIMEDOUT is a TimeoutError, like the one about a writer that takes too long."""

    def fail(*arguments):
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(TimeoutError, match="cannot be written.*give weights_cache="):
        make(path)


def test_a_folder_that_cannot_be_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written.*it takes 16.0 KiB; give weights_cache="):
        make(tmp_path / "file" / "a.experts")


@pytest.fixture
def nobody():
    """Makes the calling thread access files as another user, who owns none of them."""
    libc = ctypes.CDLL(None)
    before = libc.setfsuid(65534) if os.geteuid() == 0 else None
    yield
    if before is not None:
        libc.setfsuid(before)


@pytest.fixture
def shared_folder():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        yield Path(name)
        os.chmod(name, 0o700)


def test_a_folder_that_may_not_be_written_is_told(shared_folder, nobody):
    with pytest.raises(PermissionError, match="cannot be written.*give weights_cache="):
        make(shared_folder / "a.experts")


def test_a_file_for_which_there_is_no_room_is_told_before_anything_is_packed(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (BODY, before[1]))
    try:
        with pytest.raises(OSError, match="it takes 16.0 KiB, and .* are free there; give weights_cache="):
            make(path, write=refuse)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(path.parent) == []
