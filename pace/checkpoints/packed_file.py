"""A file of packed weights that is written once and then mapped.

    [ head ][ body ][ state ]    whole pages each

The head describes the body completely. A file with a different head or size is from another checkpoint or incomplete,
and is rewritten. The body is not parsed before that check and not trusted after it: its user validates it.

A file is written under a temporary name and renamed when it is complete. The writer holds a lock, and others wait for
it. A lock is released when its process ends.

Nothing waits for the disk. The state names the boot of the system in which the file was written. Until that boot ends,
the file's pages hold what was written, in memory or on disk. A process that opens the file at least a minute later
syncs it to disk and records this in the state. After a crash before that, the state names another boot, and the file is
rewritten."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from pace.checkpoints.files import PAGE_BYTES
from pace.memory import format_bytes

logger = logging.getLogger("pace")

PARTIAL = ".part"
"""Suffix of a file's name until it is complete."""

ON_DISK = b"on disk"
"""State of a file that is on disk and therefore survives a reboot."""
SYNC_SECONDS = 60
"""Minimum age of a file before it is synced to disk. The system has written most of it by then (30 s on Linux)."""
POLL_SECONDS = 0.02
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Used = TypeVar("Used")


def make_head(description: bytes) -> bytes:
    """Pads a description to a head; different descriptions give different heads."""
    return description + bytes(-(len(description) + 1) % PAGE_BYTES + 1)


def open_packed(
    path: Path,
    head: bytes,
    body_bytes: int,
    use: Callable[[mmap.mmap], Used],
    write: Callable[[mmap.mmap], object],
    patience: float | None = None,
) -> Used:
    """Maps the file `path` read-only and returns the result of `use`. If there is no valid file, `write` fills the body
    first.

    Both functions get the whole mapping; for `write` the body is zeros. If `use` raises ValueError (damaged body), the
    file is rewritten. If `write` raises, no file is left. Raises OSError, for example PermissionError, with advice if
    the file must be written but cannot be. TimeoutError, an OSError, means that another process has been writing it for
    `patience` seconds."""
    with suppress(_Unusable):
        return _use(path, head, body_bytes, use)
    with _explained(path, len(head) + body_bytes), _locked(path.with_name(path.name + PARTIAL), patience) as descriptor:
        try:
            return _use(path, head, body_bytes, use)  # another process may have written it meanwhile
        except _Unusable as found:
            if found.reason:
                logger.log(found.level, "%s %s: it is written again", path, found.reason)
        logger.info("writing %s: %s", path, format_bytes(body_bytes))
        _fill(descriptor, head, body_bytes, write)
        os.replace(path.with_name(path.name + PARTIAL), path)
        try:
            return _use_open(descriptor, path, head, body_bytes, use)
        except _Unusable:
            raise ValueError(
                f"{path} was changed by another process while it was written; give each a folder"
            ) from None


class _Unusable(Exception):
    """Raised if a file cannot be used and must be written. `reason` is "" if there is none; `level` is that of the log:
    a warning only if something is wrong."""

    def __init__(self, reason: str = "", level: int = logging.INFO) -> None:
        self.reason, self.level = reason, level


def _use(path: Path, head: bytes, body_bytes: int, use: Callable[[mmap.mmap], Used]) -> Used:
    """Returns the result of `use`. Raises _Unusable if there is no file, or no complete one of this head."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise _Unusable from None
    except PermissionError:
        raise PermissionError(f"{path} may not be read by this user; give weights_cache= another folder") from None
    try:
        return _use_open(descriptor, path, head, body_bytes, use)
    finally:
        os.close(descriptor)


def _use_open(descriptor: int, path: Path, head: bytes, body_bytes: int, use: Callable[[mmap.mmap], Used]) -> Used:
    """Like `_use`, for an open file."""
    status, size = os.fstat(descriptor), len(head) + body_bytes + PAGE_BYTES
    if not stat.S_ISREG(status.st_mode):
        raise _Unusable("is not a regular file", logging.WARNING)
    found = os.pread(descriptor, len(head), 0)
    if found.strip(b"\0") and not head.startswith(found):
        raise _Unusable("has weights of other files, or of another build of pace")
    if status.st_size != size:
        raise _Unusable(f"is not whole, with {status.st_size} of {size} bytes", logging.WARNING)
    state = os.pread(descriptor, PAGE_BYTES, size - PAGE_BYTES).rstrip(b"\0")
    if found != head or state not in (ON_DISK, _boot()):
        raise _Unusable("may not have reached the disk when the system went down")
    mapping = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
    try:
        used = use(mapping)
    except ValueError as error:
        raise _Unusable(f"is damaged ({error})", logging.WARNING) from None
    if state != ON_DISK and time.time() - status.st_mtime > SYNC_SECONDS:
        threading.Thread(target=_bring_to_disk, args=(path, status), name="pace sync", daemon=True).start()
    return used


def _fill(descriptor: int, head: bytes, body_bytes: int, write: Callable[[mmap.mmap], object]) -> None:
    size = len(head) + body_bytes + PAGE_BYTES
    os.ftruncate(descriptor, 0)
    os.posix_fallocate(descriptor, 0, size)  # a full disk is an error here; later it would be a SIGBUS
    os.pwrite(descriptor, head, 0)
    mapping = mmap.mmap(descriptor, size, access=mmap.ACCESS_WRITE)
    write(mapping)
    state = _boot()
    if state is None:  # the system does not report its boot
        mapping.flush()
        os.fsync(descriptor)
        state = ON_DISK
    os.pwrite(descriptor, state, len(head) + body_bytes)


def _boot() -> bytes | None:
    """Id of the current boot of the system, or None if it is unknown."""
    try:
        return BOOT_ID.read_bytes().strip() or None
    except OSError:
        return None


def _bring_to_disk(path: Path, expected: os.stat_result) -> None:
    """Syncs a file to disk so that it survives this boot, if it is still the expected file and writable."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if os.path.samestat(os.fstat(descriptor), expected):
            os.fsync(descriptor)
            os.pwrite(descriptor, ON_DISK.ljust(PAGE_BYTES, b"\0"), expected.st_size - PAGE_BYTES)
    except OSError as error:
        logger.info("%s is not on the disk yet: %s", path, error)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(partial: Path, patience: float | None) -> Iterator[int]:
    """Yields a descriptor of `partial` with an exclusive lock; its content is arbitrary. The file is removed
    afterwards, unless it was renamed."""
    descriptor = _lock(partial, patience)
    while not _is(descriptor, partial):  # the previous owner of the lock renamed or removed the file
        os.close(descriptor)
        descriptor = _lock(partial, patience)
    try:
        yield descriptor
    finally:
        if _is(descriptor, partial):
            os.unlink(partial)
        os.close(descriptor)


def _lock(partial: Path, patience: float | None) -> int:
    """Returns a descriptor of the file, locked. Raises TimeoutError after `patience` seconds, None for no limit."""
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that is writing %s", partial)
            _wait(descriptor, partial, patience)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _wait(descriptor: int, partial: Path, patience: float | None) -> None:
    if patience is None:
        return fcntl.flock(descriptor, fcntl.LOCK_EX)
    deadline = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has been writing {partial} for {patience:.0f} s") from None
            time.sleep(POLL_SECONDS)


def unlink_unlocked(partial: Path) -> None:
    """Removes a partial file that no process is writing."""
    try:
        descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is(descriptor, partial):
            os.unlink(partial)
    except OSError:
        pass  # it is being written, or may not be removed
    finally:
        os.close(descriptor)


def _is(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextmanager
def _explained(path: Path, num_bytes: int) -> Iterator[None]:
    """Creates the folder, and adds advice to the system's errors."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        if error.errno is None:  # the TimeoutError of `_wait`
            raise
        needed = f"it takes {format_bytes(num_bytes)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            needed += f", and {format_bytes(shutil.disk_usage(path.parent).free)} are free there"
        raise OSError(
            error.errno, f"{path} cannot be written ({error.strerror}): {needed}; give weights_cache= another folder"
        ) from None
