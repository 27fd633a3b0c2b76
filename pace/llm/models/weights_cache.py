"""The folder of packed copies of weights (`pace.llm.models.packed_weights`): how large it may get, what it holds, and
what goes first."""

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
NAME = re.compile(r".*\.[0-9a-f]{12}" + re.escape(SUFFIX))
"""Other files of the folder are somebody else's."""
TITLE = b"weights packed by pace"
MIN_BYTES = 32 << 20
"""Of a copy. Smaller weights are packed about as fast as a file is opened."""
MAX_PATH_BYTES = 64 << 10


@dataclass(frozen=True)
class Copy:
    """A packed copy in the folder."""

    path: Path
    checkpoint: str
    """The path of the model that it was made of, "?" where the file does not say."""
    nbytes: int
    used: float
    """When a model was last loaded from it, in seconds since 1970."""

    @property
    def is_stale(self) -> bool:
        """Whether its model is no longer there."""
        return not os.path.exists(self.checkpoint)


def list_copies(folder: Path) -> list[Copy]:
    """The copies in a folder, the last used first. Other files are none, whatever their names."""
    return sorted(_copies(folder), key=lambda copy: -copy.used)


def make_room(path: Path, nbytes: int) -> bool:
    """Whether a copy of this size may be at `path`. Removes copies of models that are gone, then those not used for
    longest, where that makes room; one that is in use lives on without a name until its process ends."""
    if path.exists():
        return True
    limit = env.cache_bytes()
    if not MIN_BYTES <= nbytes <= limit:
        return False
    remove_abandoned(path.parent)
    copies = list_copies(path.parent)
    copies.sort(key=lambda copy: copy.is_stale)
    total = sum(copy.nbytes for copy in copies)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    while copies and (total + nbytes > limit or free < 2 * nbytes):
        copy = copies.pop()
        logger.info("removing %s (%s), to make room for another copy", copy.path, format_bytes(copy.nbytes))
        copy.path.unlink(missing_ok=True)
        total, free = total - copy.nbytes, free + copy.nbytes
    if free < 2 * nbytes:
        logger.info("%s has too little free space for a packed copy of %s", path.parent, format_bytes(nbytes))
        return False
    return True


def remove_abandoned(folder: Path) -> None:
    """Removes what processes that were killed had begun to write."""
    for partial in folder.glob(f"*{SUFFIX}{PARTIAL}"):
        if NAME.fullmatch(partial.name.removesuffix(PARTIAL)):
            unlink_unlocked(partial)


def mark_used(path: Path) -> None:
    """Notes that a model was loaded from a copy. The time of access says so, which reading alone need not change."""
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except OSError:
        pass  # somebody else's file, or one that was removed: it is only forgotten a little earlier


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
    """The second line of a copy; None of another file."""
    with open(path, "rb") as file:
        if file.readline(len(TITLE) + 1) != TITLE + b"\n":
            return None
        try:
            return str(json.loads(file.readline(MAX_PATH_BYTES)))
        except ValueError:
            return "?"
