"""How much memory there is, and memory that is only addresses until it is written."""

import pytest

from pace.memory import _cgroup_room, available_memory_bytes, format_bytes, parse_bytes, reserve


def test_available_memory_is_of_this_machine() -> None:
    assert 1 << 20 < available_memory_bytes() < 1 << 50


def test_a_cgroup_is_asked_and_its_file_pages_are_not_held_against_it(tmp_path) -> None:
    names = (str(tmp_path), "memory.max", "memory.current", ("inactive_file", "active_file"))
    assert _cgroup_room(*names) is None
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_room(*names) is None, "no limit"
    (tmp_path / "memory.max").write_text("1000\n")
    assert _cgroup_room(*names) == 100
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 400\nactive_file 50\nodd line here\n")
    assert _cgroup_room(*names) == 550


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
