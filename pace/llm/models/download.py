"""One large file of the Hub into its cache: in full or not at all, and on from where an earlier download ended."""

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

logger = logging.getLogger("pace")

HUB_TIMEOUT_SECONDS = 10
"""For the first answer; what takes longer counts as unreachable."""
MAX_FRUITLESS = 3
"""Times that a download is tried again though the last try brought nothing."""
ADVICE = "Try again; if it happens again, the Hub's copy or what lies between is at fault"
ETAG = re.compile(r"[\w-]+")


class BrokenDownload(FileNotFoundError):
    """A download that ended early or brought something else than was announced."""


@dataclass(frozen=True)
class FileOnHub:
    """A file of a repository, as one caller sees it."""

    repo: str
    name: str
    commit: str | None
    where: str
    """The repository and revision, for messages."""
    token: str | bool | None
    refused: Callable[[Exception], Exception | None]
    """Gives what to raise where the Hub will answer the same again."""
    bar: Callable[..., Any]
    """Makes a progress bar, as tqdm."""

    @property
    def url(self) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.repo, self.name, revision=self.commit)

    def download(self, blobs: Path) -> None:
        """Puts the file into the cache's folder of blobs, where huggingface_hub finds it. Does nothing where
        huggingface_hub does it better: files in Xet, which come in pieces, and versions that go on by themselves.

        Raises BrokenDownload, and what `refused` gives.
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
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may be at it
            if blob.exists():
                return
            begin = file.seek(0, os.SEEK_END)
            with self.bar(total=size, initial=begin, desc=self.name, unit="B", unit_scale=True) as bar:
                self._transfer(file, size, bar)
            if begin and len(etag) == 64 and _sha256(partial) != etag:
                raise self._thrown_away(file, "came damaged: its SHA-256 is not the Hub's")
            os.replace(partial, blob)

    def _transfer(self, file: BinaryIO, size: int, bar: Any) -> None:
        """Appends what is missing of `size` bytes. What has come when it fails is kept where the rest may follow."""
        fruitless = 0
        while (begin := file.seek(0, os.SEEK_END)) != size:
            try:
                for part in self._receive(begin) if begin < size else ():
                    if part is None:  # from the first byte on
                        file.truncate(0)
                        bar.reset()
                    else:
                        file.write(part)
                        bar.update(len(part))
                has_ended = True
            except Exception as error:  # of the HTTP library
                if (told := self.refused(error)) or isinstance(error, OSError) and error.errno:
                    raise (told or error) from error
                has_ended = getattr(getattr(error, "response", None), "status_code", None) == 416
                kept = file.seek(0, os.SEEK_END)
                fruitless = 0 if kept > begin else fruitless + 1
                if fruitless > MAX_FRUITLESS:
                    raise BrokenDownload(
                        f"the download of {self.name} of {self.where} ended after {kept:,} of {size:,} bytes "
                        f"({one_line(error)}). Nothing unfinished is used; the next call goes on from there"
                    ) from error
                time.sleep(fruitless)
            if has_ended and (kept := file.seek(0, os.SEEK_END)) != size:
                raise self._thrown_away(file, f"came with {kept:,} bytes, and the Hub says it has {size:,}")

    def _thrown_away(self, file: BinaryIO, what: str) -> BrokenDownload:
        file.truncate(0)
        return BrokenDownload(f"{self.name} of {self.where} {what}; it was thrown away. {ADVICE}")

    def read_beginning(self, path: Path, count: int) -> bool:
        """Writes the first `count` bytes to a file; False where they cannot be had alone. Raises what `refused`
        gives."""
        if not _can_stream():
            return False
        try:
            with open(path, "wb") as file:
                for part in self._receive(0, count):
                    file.write(part)
                    if file.tell() >= count:
                        break
        except Exception as error:  # of the HTTP library
            if told := self.refused(error):
                raise told from error
            logger.info("the beginning of %s cannot be read alone: %s", self.name, one_line(error))
            return False
        return True

    def _receive(self, begin: int, stop: int | None = None) -> Iterator[bytes | None]:
        """The bytes from `begin` on, as they come. None where the server does not begin there, but at 0."""
        from huggingface_hub import constants, utils

        headers = utils.build_hf_headers(token=self.token) | {"Accept-Encoding": "identity"}
        if begin or stop:
            headers["Range"] = f"bytes={begin}-{'' if stop is None else stop - 1}"
        options = {"headers": headers, "follow_redirects": True, "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT}
        # httpx leaves the token out where the Hub points to another host.
        with utils.get_session().stream("GET", self.url, **options) as response:
            if response.status_code >= 400:
                response.read()
            utils.hf_raise_for_status(response)
            if begin and response.status_code != 206:
                yield None
            yield from response.iter_raw()


def _can_stream() -> bool:
    """Whether huggingface_hub speaks HTTP through httpx. It does from 1.0 on; before, it goes on by itself where a
    download ended."""
    from huggingface_hub import utils

    return hasattr(utils.get_session(), "stream")


def _is_in_xet(found: Any) -> bool:
    """Whether huggingface_hub takes a file from Xet."""
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


def one_line(error: Exception) -> str:
    """An exception of another library, for a message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
