"""Memory of this process: addresses whose pages become resident when they are written, and how much there is left to
take."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")

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


class ReusedPages:
    """Memory for one user at a time, kept for the next one. May be asked from several threads."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> mmap.mmap:
        """At least `num_bytes`, of any content: what was taken last where nothing refers to it any more, else new pages.
        Raises OSError where there are no addresses."""
        with self._lock:
            memory = self._memory
            references = 3  # of the attribute, the variable, and what counts them
            if memory is None or len(memory) < num_bytes or sys.getrefcount(memory) > references:
                memory = self._memory = reserve(num_bytes, huge_pages=True)
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
    return _kilobytes(_read(Path("/proc/self/status")), "VmHWM" if peak else "VmRSS") or 0


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
        + ("keepcost",)
    ]


def allocated_bytes() -> int:
    """Bytes that malloc has given to all threads of this process; 0 where the C library does not say."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return 0
    ask.restype = _MallInfo
    found = ask()
    return found.uordblks + found.hblkhd


def give_back_memory() -> None:
    """Gives free memory of the C library back to the system, where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


@dataclass(frozen=True)
class MemoryLimit:
    """A bound on what this process may take, below what the machine has."""

    limit_bytes: int
    room_bytes: int
    """What is left of it. File pages of a cgroup count as left: the system drops them when memory is asked for."""
    source: str
    """The file that sets it, or how a user did."""
    counts_files: bool = True
    """Whether pages of mapped files count."""


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """The limits of this process's cgroup and of all its ancestors, version 2 and version 1, and of its address space
    and data; from the files below `root`."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = CGROUP_V1 if controllers else CGROUP_V2
        group = Path(path.lstrip("/"))
        # Inside a container the path may be the host's; what is mounted there as the root is its own group.
        folders = dict.fromkeys(root / files.mount / folder for folder in (group, *group.parents))
        limits += [limit for folder in folders if (limit := files.read(folder, root))]
    for line in _read(root / "proc/self/limits").splitlines():
        for name, (field, source) in ULIMITS.items():
            if line.startswith(name) and (found := line.removeprefix(name).split()[0]).isdigit():
                limit, taken = int(found), _kilobytes(_read(root / "proc/self/status"), field) or 0
                limits.append(MemoryLimit(limit, max(0, limit - taken), source, counts_files=False))
    return limits


def machine_memory_bytes(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Bytes of memory that the machine has, and that are free or would be when asked for, whatever this process may
    take of them; None where the system does not tell."""
    meminfo = _read(root / "proc/meminfo")
    return _kilobytes(meminfo, "MemTotal"), _kilobytes(meminfo, "MemAvailable")


def available_memory_bytes(root: Path = ROOT, kept: int = 0) -> int:
    """Bytes that this process may still take: the machine's available memory, or what the tightest limit leaves if
    less. `kept`: bytes of mapped files that count as available, and are to stay in memory."""
    total, available = machine_memory_bytes(root)
    if available is None:
        available = (total or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) // 2
    rooms = [limit.room_bytes - kept * limit.counts_files for limit in memory_limits(root)]
    return max(0, min([available - kept, *rooms]))


@dataclass(frozen=True)
class _CgroupFiles:
    """What one version of cgroups calls its files."""

    mount: str
    limit: str
    usage: str
    file_pages: tuple[str, ...]
    """Counters in memory.stat."""

    def read(self, folder: Path, root: Path) -> MemoryLimit | None:
        """None where there is no such group or no limit."""
        limit, usage = (_read(folder / name).strip() for name in (self.limit, self.usage))
        if not limit.isdigit():
            return None
        counters = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if line.count(" ") == 1)
        reclaimable = sum(int(counters.get(name, 0)) for name in self.file_pages)
        taken = max(0, int(usage) - reclaimable) if usage.isdigit() else 0
        source = f"/{(folder / self.limit).relative_to(root)}"
        return MemoryLimit(int(limit), max(0, int(limit) - taken), source)


ULIMITS = {"Max address space": ("VmSize", "ulimit -v"), "Max data size": ("VmData", "ulimit -d")}
"""Line of /proc/self/limits -> field of /proc/self/status that it bounds, and the shell's word for it. Data is all
private memory that may be written; what is mapped of files to be read is none."""
CGROUP_V2 = _CgroupFiles("sys/fs/cgroup", "memory.max", "memory.current", ("inactive_file", "active_file"))
CGROUP_V1 = _CgroupFiles(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)


def _kilobytes(text: str, field: str) -> int | None:
    """The bytes of a line "field:   n kB"; None where there is none."""
    found = re.search(rf"^{field}:\s*(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(file: Path) -> str:
    """Empty where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
