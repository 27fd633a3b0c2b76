"""Memory of this process: addresses whose pages become resident when they are written, and how much there is left to
take."""

from __future__ import annotations

import mmap
import os
import re

MAP_NORESERVE = 0x4000
"""Of Linux on x86-64; Python's mmap module names it only from 3.13 on."""


def reserve(num_bytes: int, huge_pages: bool = False) -> mmap.mmap:
    """Zeros that belong to this process, given back when the object goes.

    Their size does not count against what the system lets processes promise each other, so that a process with much of
    it can still fork. With `huge_pages` the system is asked for pages of 2 MB, which make long reads faster by sparing
    page-table walks.
    Raises OSError where there are no addresses."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 4096, "4096", "1.5 GiB" (2**30 bytes each) or "500MB" (10**6). Raises TypeError and
    ValueError; a bare "2G" is refused, for programs differ about what it means."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"a size is an int of bytes or a string such as '2GiB'; got {size!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size), re.ASCII)
    factor = _UNITS.get(match[2].upper() or "B") if match else None
    if factor is None:
        raise ValueError(
            f"a size is a number of bytes, or one with a unit: KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (of 1000); got {size!r}"
        )
    whole, _, fraction = match[1].partition(".")
    return int(whole) * factor + int(fraction or 0) * factor // 10 ** len(fraction)


def format_bytes(num_bytes: float) -> str:
    """In the largest unit of which it is at least one: "12.0 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):  # noqa: B007
        if num_bytes < 1024:
            break
        num_bytes /= 1024
    else:
        unit = "TiB"
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def resident_bytes(peak: bool = False) -> int:
    """Bytes of this process that are in memory now, or with `peak` the most there have been; 0 where the system does not
    tell."""
    field = "VmHWM:" if peak else "VmRSS:"
    lines = (_read("/proc/self/status") or "").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def available_memory_bytes() -> int:
    """Bytes that this process may still take: the machine's available memory, or what its cgroup (v2 or v1) leaves if
    less. File pages count as available, as in the kernel's own MemAvailable: it drops them when memory is asked for."""
    limits = []
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    if not limits:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    rooms = [_cgroup_room(*names) for names in _CGROUP_FILES]
    limits += [room for room in rooms if room is not None]
    return min(limits)


_CGROUP_FILES = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "/sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)
"""Folder, limit, usage, and the names of file pages in memory.stat; version 2, then version 1."""


def _cgroup_room(folder: str, limit_name: str, usage_name: str, file_pages: tuple[str, ...]) -> int | None:
    """Bytes that a cgroup leaves; None where there is no such cgroup or no limit."""
    limit, usage = (_read(f"{folder}/{name}") for name in (limit_name, usage_name))
    if not limit or not usage or not limit.strip().isdigit() or not usage.strip().isdigit():
        return None
    counters = dict(
        line.split() for line in (_read(f"{folder}/memory.stat") or "").splitlines() if len(line.split()) == 2
    )
    reclaimable = sum(int(counters.get(name, 0)) for name in file_pages)
    return max(0, int(limit) - max(0, int(usage) - reclaimable))


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="ascii") as stream:
            return stream.read()
    except OSError:
        return None
