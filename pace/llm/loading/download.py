"""Downloads one large file of the Hub into its cache, whole or not at all. Resumes an interrupted download."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pace.naming import one_line

logger = logging.getLogger("pace")

HUB_TIMEOUT_SECONDS = 10
"""Timeout for the first answer; slower hosts count as unreachable."""
MAX_FRUITLESS = 3
"""Number of consecutive retries without progress."""
ADVICE = "Try again; if it happens again, the Hub's copy or what lies between is at fault"
ETAG = re.compile(r"[\w-]+")


class BrokenDownload(FileNotFoundError):
    """A download that ended early or differs from what was announced."""


@dataclass(frozen=True)
class FileOnHub:
    """A file of a repository, for one caller."""

    repo: str
    name: str
    commit: str | None
    where: str
    """The repository and revision, for error messages."""
    token: str | bool | None
    refused: Callable[[Exception], Exception | None]
    """Returns the exception to raise if the Hub will answer the same again; None to retry."""
    bar: Callable[..., Any]
    """Makes a progress bar, like tqdm."""

    @property
    def url(self) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.repo, self.name, revision=self.commit)

    def download(self, blobs: Path) -> None:
        """Downloads the file into the cache's folder of blobs, where huggingface_hub finds it. Does nothing if
        huggingface_hub does it better: for files in Xet, and in versions that resume downloads themselves.

        Raises BrokenDownload, and the exceptions from `refused`.
        """
        import huggingface_hub

        if not _can_stream():
            return
        found = huggingface_hub.get_hf_file_metadata(self.url, token=self.token, timeout=HUB_TIMEOUT_SECONDS)
        etag, size = found.etag, found.size
        if not etag or not ETAG.fullmatch(etag) or not size or _is_in_xet(found):
            return
        blobs.mkdir(parents=True, exist_ok=True)
        blob, partial = blobs / etag, blobs / f"{etag}.incomplete"
        with open(partial, "ab", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be downloading it
            if blob.exists():
                return
            begin = file.seek(0, os.SEEK_END)
            with self.bar(total=size, initial=begin, desc=self.name, unit="B", unit_scale=True) as bar:
                self._transfer(file, size, bar)
            if begin and len(etag) == 64 and _sha256(partial) != etag:
                raise self._thrown_away(file, "arrived damaged: its SHA-256 differs from the Hub's")
            os.replace(partial, blob)

    def _transfer(self, file: BinaryIO, size: int, bar: Any) -> None:
        """Appends the missing part of `size` bytes. If it fails, the received part is kept so that the download can
        resume."""
        fruitless = 0
        while (begin := file.seek(0, os.SEEK_END)) != size:
            try:
                for part in self._receive(begin) if begin < size else ():
                    if part is None:  # the server restarts at the first byte
                        file.truncate(0)
                        bar.reset()
                    else:
                        file.write(part)
                        bar.update(len(part))
                has_ended = True
            except Exception as error:  # from the HTTP library
                if (told := self.refused(error)) or isinstance(error, OSError) and error.errno:
                    raise (told or error) from error
                has_ended = getattr(getattr(error, "response", None), "status_code", None) == 416
                kept = file.seek(0, os.SEEK_END)
                fruitless = 0 if kept > begin else fruitless + 1
                if fruitless > MAX_FRUITLESS:
                    raise BrokenDownload(
                        f"the download of {self.name} of {self.where} ended after {kept:,} of {size:,} bytes "
                        f"({one_line(error)}). The unfinished file is not used; the next call resumes it"
                    ) from error
                time.sleep(fruitless)
            if has_ended and (kept := file.seek(0, os.SEEK_END)) != size:
                raise self._thrown_away(file, f"arrived with {kept:,} bytes, but the Hub lists {size:,}")

    def _thrown_away(self, file: BinaryIO, what: str) -> BrokenDownload:
        file.truncate(0)
        return BrokenDownload(f"{self.name} of {self.where} {what}; it was deleted. {ADVICE}")

    def read_beginning(self, path: Path, count: int) -> bool:
        """Writes the first `count` bytes to a file. Returns False if they cannot be read separately. Raises the
        exceptions from `refused`."""
        if not _can_stream():
            return False
        try:
            with open(path, "wb") as file:
                for part in self._receive(0, count):
                    file.write(part)
                    if file.tell() >= count:
                        break
        except Exception as error:  # from the HTTP library
            if told := self.refused(error):
                raise told from error
            logger.info("cannot read only the beginning of %s: %s", self.name, one_line(error))
            return False
        return True

    def _receive(self, begin: int, stop: int | None = None) -> Iterator[bytes | None]:
        """Yields the bytes from `begin` on. Yields None first if the server starts at 0 instead."""
        from huggingface_hub import constants, utils

        headers = utils.build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if begin or stop:
            headers["Range"] = f"bytes={begin}-{'' if stop is None else stop - 1}"
        options = {"headers": headers, "follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        # httpx drops the token when the Hub redirects to another host.
        with utils.get_session().stream("GET", self.url, **options) as response:
            if response.status_code >= 400:
                response.read()
            utils.hf_raise_for_status(response)
            if begin and response.status_code != 206:
                yield None
            yield from response.iter_raw()


def _can_stream() -> bool:
    """True if huggingface_hub uses httpx, from version 1.0 on. Older versions resume downloads themselves."""
    from huggingface_hub import utils

    return hasattr(utils.get_session(), "stream")


def _is_in_xet(found: Any) -> bool:
    """True if huggingface_hub downloads a file from Xet."""
    if getattr(found, "xet_file_data", None) is None:
        return False
    try:
        from huggingface_hub.utils._runtime import is_xet_available
    except ImportError:
        return True
    return is_xet_available()


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
