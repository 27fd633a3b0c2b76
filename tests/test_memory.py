"""How much memory there is, and memory that is only addresses until it is written."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pace.cli import environment
from pace.memory import (
    CODE,
    ReusedPages,
    available_memory_bytes,
    format_bytes,
    give_back_code,
    parse_bytes,
    populate,
    reserve,
    resident_bytes,
)


def test_available_memory_is_of_this_machine() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50


V2 = {"limit": "memory.max", "usage": "memory.current", "files": "active_file", "mount": "sys/fs/cgroup"}
V1 = {
    "limit": "memory.limit_in_bytes",
    "usage": "memory.usage_in_bytes",
    "files": "total_active_file",
    "mount": "sys/fs/cgroup/memory",
}
LINES = {"v2": "0::{}\n", "v1": "9:name=systemd:/init\n5:cpu,memory:{}\n0::/elsewhere\n"}


class System:
    """A tree of /proc and /sys/fs/cgroup below a folder."""

    def __init__(self, root: Path, version: str, path: str) -> None:
        self.root, self.files = root, V2 if version == "v2" else V1
        self.write("proc/meminfo", "MemTotal: 40 kB\nMemFree: 1 kB\nMemAvailable: 30 kB\n")
        self.write("proc/self/cgroup", LINES[version].format(path))

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        (self.root / name).write_text(text)

    def group(self, path: str, limit: object, usage: int | None = None, file_pages: int = 0) -> None:
        folder = f"{self.files['mount']}{path.rstrip('/')}"
        self.write(f"{folder}/{self.files['limit']}", f"{limit}\n")
        self.write(f"{folder}/memory.stat", f"anon 300\n{self.files['files']} {file_pages}\nan odd line here\n")
        if usage is not None:
            self.write(f"{folder}/{self.files['usage']}", f"{usage}\n")

    @property
    def available(self) -> int:
        """Available bytes, after a check that the loader and `pace env` use the same value."""
        found = available_memory_bytes(self.root)
        assert environment.memory(self.root)["available_bytes"] == found
        return found


@pytest.fixture(params=["v2", "v1"])
def make_system(request, tmp_path):
    return lambda path: System(tmp_path, request.param, path)


UNLIMITED = ["max", 9223372036854771712]
"""The value for "no limit" in cgroup version 2 and version 1."""


@pytest.mark.parametrize("unlimited", UNLIMITED)
def test_without_a_limit_it_is_what_the_machine_has(make_system, unlimited) -> None:
    system = make_system("/user/me")
    assert system.available == 30 << 10
    system.group("/user/me", unlimited, 500)
    assert system.available == 30 << 10


def test_the_own_group_is_asked_and_its_file_pages_are_not_held_against_it(make_system) -> None:
    system = make_system("/user/me")
    system.group("/user/me", 1000, 900)
    assert system.available == 100
    system.group("/user/me", 1000, 900, file_pages=450)
    assert system.available == 550
    system.group("/user/me", 1000, 900, file_pages=5000)
    assert system.available == 1000
    system.group("/user/me", 1000, 1200)
    assert system.available == 0


@pytest.mark.parametrize("tightest", ["/a/b/c", "/a/b", "/a", "/"])
def test_all_ancestors_are_asked(make_system, tightest) -> None:
    system = make_system("/a/b/c")
    for group in ("/a/b/c", "/a/b", "/a", "/"):
        system.group(group, 9000, 8000)
    system.group(tightest, 9000, 8900)
    system.group("/a/other", 9000, 9000)
    assert system.available == 100
    assert environment.memory(system.root)["limit_bytes"] == 9000


def test_a_container_that_sees_the_hosts_path_finds_its_group_at_the_mount(make_system) -> None:
    system = make_system("/docker/0123456789")
    system.group("/", 5000, 1000)
    assert system.available == 4000


def test_a_limit_of_which_nobody_tells_what_is_taken_is_all_there(make_system) -> None:
    system = make_system("/a")
    system.group("/a", 700)
    assert system.available == 700


def test_address_space_is_memory_too(make_system) -> None:
    system = make_system("/")
    system.write(
        "proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\nMax address space   20480  unlimited  bytes\n"
    )
    system.write("proc/self/status", "Name: x\nVmSize:\t      12 kB\nVmRSS:\t 3 kB\n")
    assert system.available == 8 << 10


def test_a_limit_of_data_is_one_too(make_system) -> None:
    system = make_system("/")
    lines = (
        "Limit  Soft Limit  Hard Limit  Units\nMax data size   20480  unlimited  bytes\nMax address space "
        "unlimited 7 bytes\n"
    )
    system.write("proc/self/limits", lines)
    system.write("proc/self/status", "Name: x\nVmSize:\t      99 kB\nVmData:\t 13 kB\n")
    assert system.available == 7 << 10


def test_limits_that_are_damaged_are_none(make_system) -> None:
    system = make_system("/a")
    for text in ("", "lots", "-5", "12.5"):
        system.group("/a", text, 3)
        assert system.available == 30 << 10


SMAPS = """\
1000-3000 r-xp 00001000 00:0c 42                                 /lib/libplain.so
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
3000-4000 r-xp 00001000 00:0c 43                                 /lib/libpatched.so
Rss:                   4 kB
Anonymous:             4 kB
VmFlags: rd ex mr mw me
4000-5000 rw-p 00001000 00:0c 43                                 /lib/libpatched.so
Rss:                   4 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
5000-6000 r-xp 00000000 00:00 0                                  [vdso]
Anonymous:             0 kB
ff6000-ff7000 r-xp 00001000 00:0c 44                             /a folder/libother.so
Anonymous:             0 kB
"""


def test_only_unchanged_code_of_libraries_is_given_back() -> None:
    assert CODE.findall(SMAPS) == [("1000", "3000"), ("ff6000", "ff7000")]
    numbers = torch.arange(6.0).view(2, 3)
    give_back_code.__wrapped__()
    found = CODE.findall(Path("/proc/self/smaps").read_text(errors="replace"))
    assert len(found) > 10 and (numbers @ numbers.T).tolist() == [[5, 14], [14, 50]]


def test_resident_memory_is_counted() -> None:
    assert 1 << 20 < resident_bytes() <= resident_bytes(peak=True) < 1 << 40


def test_reserved_memory_is_zero_and_can_be_more_than_there_is() -> None:
    memory = reserve(1 << 40)
    assert len(memory) == 1 << 40 and memory[1 << 39] == 0
    memory[5] = 7
    assert memory[4:7] == b"\0\7\0"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        (" 12 B", 12),
        ("2GiB", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("500mb", 500_000_000),
        ("0.1GB", 10**8),
        ("3KB", 3000),
        ("1tib", 1 << 40),
    ],
)
def test_sizes_are_read(text, num_bytes) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["2G", "2K", "", "GiB", "1.GiB", "-1", -1, "1e9", "0x10", "1 2", "inf", "\u0661"])
def test_sizes_that_are_none_are_refused(text) -> None:
    with pytest.raises(ValueError, match="a size is a number of bytes"):
        parse_bytes(text)


def test_sizes_are_written() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 12 * 2**10, 1.5 * 2**20, 2**30, 5 * 2**40, 2**54)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "12.0 KiB",
        "1.5 MiB",
        "1.0 GiB",
        "5.0 TiB",
        "16384.0 TiB",
    ]


def test_pages_are_used_again_once_nothing_refers_to_them():
    pages = ReusedPages()
    first = torch.frombuffer(pages.take(8192), dtype=torch.float32).fill_(1)
    place, row = first.data_ptr(), first.view(2, -1)[1]
    del first
    second = torch.frombuffer(pages.take(8192), dtype=torch.float32).fill_(2)
    assert second.data_ptr() != place and row.eq(1).all()
    place = second.data_ptr()
    del second
    assert torch.frombuffer(pages.take(4096), dtype=torch.float32).data_ptr() == place
    assert len(pages.take(16384)) == 16384


def resident_pages(memory: mmap.mmap) -> list[bool]:
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    address = ctypes.c_void_p(np.frombuffer(memory, np.uint8).ctypes.data)
    assert not ctypes.CDLL(None).mincore(address, ctypes.c_size_t(len(memory)), pages)
    return [page % 2 == 1 for page in pages]


def test_populated_pages_are_resident_and_unchanged() -> None:
    """Also the pages at the ends of the range, and no others."""
    page = mmap.PAGESIZE
    memory = reserve(8 * page)
    memory[2 * page + 5] = 7
    populate(np.frombuffer(memory, np.uint8).ctypes.data + 3 * page - 1, 2 * page)
    if tuple(map(int, os.uname().release.split(".")[:2])) >= (5, 14):
        assert resident_pages(memory) == [False, False, True, True, True, False, False, False]
    assert memory[2 * page + 5] == 7 and sum(memory[:]) == 7
