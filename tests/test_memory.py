"""How much memory there is, and memory that is only addresses until it is written."""

from pace.memory import _cgroup_room, available_memory_bytes, reserve


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
