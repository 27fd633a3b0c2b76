"""Memory of this process: reserved addresses whose pages become resident when written, and the amount still
available."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path("/")

MAP_NORESERVE = 0x4000
"""Value on Linux x86-64. Python's mmap module only names it from 3.13 on."""
MADV_POPULATE_WRITE = 23
"""Value on Linux."""


def reserve(num_bytes: int, huge_pages: bool = False) -> mmap.mmap:
    """Reserves private memory of zeros, freed with the object.

    It does not count against the system's commit limit, so a process that reserves much can still fork. With
    `huge_pages` the system is asked for pages of 2 MB, which speed up long reads by avoiding page-table walks. Raises
    OSError if no address space is left."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(address: int, num_bytes: int) -> None:
    """Makes the pages of a range of reserved memory resident, and does not change their contents. Releases the GIL, so
    that several threads may do this at once. Does nothing on Linux before 5.14."""
    begin = address - address % mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - begin)
    ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), size, MADV_POPULATE_WRITE)


class ReusedPages:
    """A buffer for one user at a time, kept for the next one. Thread-safe."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> mmap.mmap:
        """Returns at least `num_bytes` with undefined contents: the previous buffer if it is large enough and no longer
        referenced, else new pages. Raises OSError if no address space is left."""
        with self._lock:
            memory = self._memory
            references = 3  # the attribute, the variable, and the argument of getrefcount
            if memory is None or len(memory) < num_bytes or sys.getrefcount(memory) > references:
                memory = self._memory = reserve(num_bytes, huge_pages=True)
            return memory


_UNITS = {"B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def parse_bytes(size: int | str) -> int:
    """Bytes of a size such as 4096, "4096", "1.5 GiB" (2**30 bytes each) or "500MB" (10**6). Raises TypeError or
    ValueError. A bare "2G" is refused because programs disagree about its meaning."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise TypeError(f"a size is an int of bytes or a string such as '2GiB'; got {size!r}")
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size), re.ASCII)
    factor = _UNITS.get(match[2].upper() or "B") if match else None
    if factor is None:
        raise ValueError(
            f"a size is a number of bytes, or one with a unit: KiB, MiB, GiB, TiB (powers of 1024), kB, MB, GB, TB (of "
            f"1000); got {size!r}"
        )
    whole, _, fraction = match[1].partition(".")
    return int(whole) * factor + int(fraction or 0) * factor // 10 ** len(fraction)


def format_bytes(num_bytes: float) -> str:
    """Formats a size in the largest unit that gives at least 1, for example "12.0 KiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):  # noqa: B007
        if num_bytes < 1024:
            break
        num_bytes /= 1024
    else:
        unit = "TiB"
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def resident_bytes(peak: bool = False) -> int:
    """Resident bytes of this process now, or with `peak` the maximum so far; 0 if the system does not report it."""
    return _kilobytes(_read(Path("/proc/self/status")), "VmHWM" if peak else "VmRSS") or 0


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
        + ("keepcost",)
    ]


def allocated_bytes() -> int:
    """Bytes allocated with malloc by all threads of this process; 0 if the C library does not report it."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    ask.restype = _MallInfo
    found = ask()
    return found.uordblks + found.hblkhd


CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp [^\n]* /[^\n]*\n(?:[A-Z][^\n]*\n)*?Anonymous: +0 kB", re.MULTILINE)
"""Matches the addresses of a library's code in `/proc/self/smaps`. Code that a tool has patched has anonymous pages,
and is left out."""


def give_back_memory() -> None:
    """Returns the C library's free memory to the system, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


@cache
def give_back_code() -> None:
    """Returns the code of libraries to the system, once in a process. Most of it is only needed to import them, 60 MB
    for torch. What is needed later comes back from the page cache."""
    library = ctypes.CDLL(None)
    for begin, end in CODE.findall(_read(Path("/proc/self/smaps"))):
        address, size = int(begin, 16), int(end, 16) - int(begin, 16)
        library.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class MemoryLimit:
    """A limit on the memory of this process, below the machine's memory."""

    limit_bytes: int
    room_bytes: int
    """Bytes left below the limit. File pages of a cgroup count as free: the system drops them when memory is needed."""
    source: str
    """The file that sets the limit, or the shell command that did."""
    counts_files: bool = True
    """True if pages of mapped files count against the limit."""


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """The limits of this process's cgroup and all its ancestors (versions 1 and 2), and of its address space and data.
    Read from files below `root`."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = CGROUP_V1 if controllers else CGROUP_V2
        group = Path(path.lstrip("/"))
        # Inside a container the path may be the host's; the root of the mount is then the container's own group.
        folders = dict.fromkeys(root / files.mount / folder for folder in (group, *group.parents))
        limits += [limit for folder in folders if (limit := files.read(folder, root))]
    for line in _read(root / "proc/self/limits").splitlines():
        for name, (field, source) in ULIMITS.items():
            if line.startswith(name) and (found := line.removeprefix(name).split()[0]).isdigit():
                limit, taken = int(found), _kilobytes(_read(root / "proc/self/status"), field) or 0
                limits.append(MemoryLimit(limit, max(0, limit - taken), source, counts_files=False))
    return limits


def machine_memory_bytes(root: Path = ROOT) -> tuple[int | None, int | None]:
    """The machine's total memory and its available memory in bytes, ignoring limits on this process; None where the
    system does not report them."""
    meminfo = _read(root / "proc/meminfo")
    return _kilobytes(meminfo, "MemTotal"), _kilobytes(meminfo, "MemAvailable")


def available_memory_bytes(root: Path = ROOT, kept: int = 0) -> int:
    """Bytes that this process may still allocate: the machine's available memory, or less if a limit leaves less.
    `kept`: bytes of mapped files that are reported as available but must stay in memory."""
    total, available = machine_memory_bytes(root)
    if available is None:
        available = (total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
    rooms = [limit.room_bytes - kept * limit.counts_files for limit in memory_limits(root)]
    return max(0, min([available - kept, *rooms]))


@dataclass(frozen=True)
class _CgroupFiles:
    """File names and counters of one cgroup version."""

    mount: str
    limit: str
    usage: str
    file_pages: tuple[str, ...]
    """Counters in memory.stat."""

    def read(self, folder: Path, root: Path) -> MemoryLimit | None:
        """Returns the limit of one group; None if there is no such group or no limit."""
        limit, usage = (_read(folder / name).strip() for name in (self.limit, self.usage))
        if not limit.isdigit():
            return None
        counters = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
        reclaimable = sum(int(counters.get(name, 0)) for name in self.file_pages)
        taken = max(0, int(usage) - reclaimable) if usage.isdigit() else 0
        source = f"/{(folder / self.limit).relative_to(root)}"
        return MemoryLimit(int(limit), max(0, int(limit) - taken), source)


ULIMITS = {"Max address space": ("VmSize", "ulimit -v"), "Max data size": ("VmData", "ulimit -d")}
"""Line of /proc/self/limits -> the field of /proc/self/status that it limits, and the shell's name for it. Data is all
private writable memory; read-only file mappings do not count."""
CGROUP_V2 = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
CGROUP_V1 = _CgroupFiles(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _kilobytes(text: str, field: str) -> int | None:
    """Bytes of the line "field: n kB"; None if there is no such line."""
    found = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(file: Path) -> str:
    """The text of a file; empty if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
