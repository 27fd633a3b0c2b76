"""The folder of packed copies of weights (`pace.llm.loading.packed_weights`): its size limit, its contents, and the
order of removal."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pace import env
from pace.checkpoints.packed_file import PARTIAL, unlink_unlocked
from pace.memory import format_bytes

logger = logging.getLogger("pace")

SUFFIX = ".weights"
NAME = re.compile(r".*\.[0-9a-f]{12}" + re.escape(SUFFIX), re.DOTALL)
"""Files with other names do not belong to pace."""
TITLE = b"weights packed by pace"
MIN_BYTES = 32 << 20
"""Minimum size of a copy. Smaller weights are packed about as fast as a file is opened."""
MAX_PATH_BYTES = 64 << 10


@dataclass(frozen=True)
class Copy:
    """A packed copy in the folder."""

    path: Path
    checkpoint: str
    """Path of the model that was packed; "?" if the file does not say."""
    nbytes: int
    used: float
    """Time of the last load from it, in seconds since 1970."""

    @property
    def is_stale(self) -> bool:
        """True if its model no longer exists."""
        return not os.path.exists(self.checkpoint)


def list_copies(folder: Path) -> list[Copy]:
    """The copies in a folder, most recently used first. Other files are ignored, even if their names match."""
    return sorted(_copies(folder), key=lambda copy: -copy.used)


def make_room(path: Path, nbytes: int) -> bool:
    """Makes room for a copy of this size at `path`; returns True if it may be there. Removes copies of deleted models,
    then the least recently used. A copy in use stays readable until its process ends."""
    remove_abandoned(path.parent)
    if path.exists():
        return True
    limit = env.cache_bytes()
    if not MIN_BYTES <= nbytes <= limit:
        return False
    copies = list_copies(path.parent)
    copies.sort(key=lambda copy: copy.is_stale)
    total = sum(copy.nbytes for copy in copies)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free + total < 2 * nbytes:
        logger.info("%s has too little free space for a packed copy of %s", path.parent, format_bytes(nbytes))
        return False
    while copies and (total + nbytes > limit or free < 2 * nbytes):
        copy = copies.pop()
        logger.info("removing %s (%s), to make room for another copy", copy.path, format_bytes(copy.nbytes))
        copy.path.unlink(missing_ok=True)
        total, free = total - copy.nbytes, free + copy.nbytes
    return True


def remove_abandoned(folder: Path) -> None:
    """Removes partial files of processes that were killed."""
    for partial in folder.glob(f"*{SUFFIX}{PARTIAL}"):
        if NAME.fullmatch(partial.name.removesuffix(PARTIAL)):
            unlink_unlocked(partial)


def mark_used(path: Path) -> None:
    """Records that a model was loaded from a copy, in the access time, which reading does not always update."""
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except OSError:
        pass  # owned by another user, or removed: it is only evicted a little earlier


def _copies(folder: Path) -> Iterator[Copy]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            try:
                checkpoint, status = _checkpoint_of(entry.path), entry.stat()
            except OSError:
                continue  # it has been removed, or may not be read
            if checkpoint is not None:
                yield Copy(Path(entry.path), checkpoint, status.st_size, status.st_atime)


def _checkpoint_of(path: str) -> str | None:
    """The second line of a copy; None for another file."""
    with open(path, "rb") as file:
        if file.readline(len(TITLE) + 1) != TITLE + b"\n":
            return None
        try:
            return str(json.loads(file.readline(MAX_PATH_BYTES)))
        except ValueError:
            return "?"
