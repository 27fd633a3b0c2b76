"""Memory that is addresses first: a page of it becomes resident when it is first written."""

from __future__ import annotations

import mmap

MAP_NORESERVE = 0x4000
"""Of Linux on x86-64; Python's mmap module names it only from 3.13 on."""


def reserve(num_bytes: int, huge_pages: bool = False) -> mmap.mmap:
    """Zeros that belong to this process, given back when the object goes.

    Their size does not count against what the system lets processes promise each other, so that a process with much of it can
    still fork. With `huge_pages` the system is asked for pages of 2 MB, which make long reads faster by sparing page-table walks.
    Raises OSError where there are no addresses."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
