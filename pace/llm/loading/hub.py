"""Checkpoints on the Hugging Face Hub and in its cache. huggingface_hub is imported on first use, here and in
`download`.

    names of files  ->  config and tokenizer  ->  check  ->  weights, each file whole or not at all

Code from a repository is neither downloaded nor run.
"""

from __future__ import annotations

import difflib
import glob
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from pace import env
from pace.checkpoints.gguf.config import ROPE_FACTORS
from pace.checkpoints.gguf.file import GgufFile
from pace.checkpoints.gguf.projectors.registry import TEXT_ARCHITECTURES
from pace.checkpoints.gguf.shards import SHARD_NAME
from pace.checkpoints.reader import OTHER_WEIGHT_SUFFIXES, shard_names
from pace.llm.loading.download import ADVICE, HUB_TIMEOUT_SECONDS, BrokenDownload, FileOnHub
from pace.llm.loading.repository import (
    TOKENIZER_FILES,
    VOCABULARY_FILES,
    gguf_files,
    is_gguf_repository,
    mmproj_files,
    needed_files,
    some,
)
from pace.memory import format_bytes
from pace.naming import one_line

logger = logging.getLogger("pace")

Check = Callable[[Path], object]
"""Check of a model before its weights are downloaded. Called with a directory that has a config.json, or a GGUF file
that only has its header; raises if something is wrong."""

# The Hub's rule: one or two parts of letters, digits, ".", "_" and "-". No part starts or ends with "." or "-".
HUB_ID = re.compile(r"(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?", re.ASCII)
MAX_HUB_ID = 96
HEADER_BYTES = 32 << 20
"""Size of the beginning of a larger GGUF file that is read before the rest is downloaded. A vocabulary of 262,000
tokens with scores, types and 515,000 merges takes 20 MB."""


class NoRoom(OSError):
    """A disk without room for a download."""


OURS = (TypeError, ValueError, LookupError, NameError, AttributeError, AssertionError, MemoryError, NotImplementedError)
OURS += (PermissionError, FileNotFoundError, NoRoom)
"""Exceptions that pace or a check raises during a download, but no HTTP library does."""


def is_hub_id(text: str) -> bool:
    return len(text) <= MAX_HUB_ID and HUB_ID.fullmatch(text) is not None


def find_on_hub(
    repo: str,
    quant: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    weights: bool = True,
    progress: bool = True,
    check: Check | None = None,
    media: bool = False,
) -> Path:
    """Returns the snapshot of a repository, downloaded if needed, or its GGUF file for `quant` (see `gguf_files`). If
    the Hub is unreachable, or must not be used, returns a complete cached snapshot. With `media`, also downloads the
    mmproj file of a GGUF file.

    Raises the errors of `find_checkpoint` and of `check`.
    """
    try:
        import huggingface_hub  # noqa: F401
    except ImportError as error:
        raise FileNotFoundError(
            f"there is no directory {repo!r}, and a download from the Hub needs huggingface_hub ({error})"
        ) from error
    repository = Repository(repo, quant, revision, token, cache_dir, weights, progress, check, media)
    if local_files_only:
        return repository.cached("local_files_only=True forbids to download it")
    return repository.download()


class Repository:
    """One repository at one revision, for one caller."""

    def __init__(
        self,
        repo: str,
        quant: str | None,
        revision: str | None,
        token: str | bool | None,
        cache_dir: str | Path | None,
        weights: bool,
        progress: bool,
        check: Check | None,
        media: bool,
    ):
        from huggingface_hub import constants

        self.repo, self.quant, self.revision, self.token = repo, quant, revision, token
        self.weights, self.progress, self.check, self.media = weights, progress, check, media
        self.where = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
        self.cache_dir = Path(cache_dir if cache_dir is not None else constants.HF_HUB_CACHE).expanduser()

    @property
    def folder(self) -> Path:
        """Folder of this repository in the cache: blobs, refs and snapshots."""
        return self.cache_dir / f"models--{self.repo.replace('/', '--')}"

    # -- from the cache ------------------------------------------------------------------------------------------------

    def cached(self, reason: str, cause: Exception | None = None) -> Path:
        """Returns the checkpoint in the cached snapshot. `reason` is why the Hub is not used. If asking it failed,
        `cause` is the error, and a warning is logged. Raises FileNotFoundError if nothing is cached, or only a part."""
        import huggingface_hub

        try:
            found = Path(
                huggingface_hub.snapshot_download(
                    self.repo,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    local_files_only=True,
                    allow_patterns=[],
                )
            )
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.where} is neither a directory here{hint_of_directory(self.repo)} nor in the Hub's cache, "
                f"and {reason}"
            ) from cause
        try:
            chosen = self._in_snapshot(found)
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"the Hub's cache has only a part of {self.where}, and {reason}; try again when the Hub can be used, "
                f"and the download resumes ({error})"
            ) from cause
        if cause is not None:
            logger.warning("%s: %s; using the cached copy", self.repo, reason)
        return chosen

    def _in_snapshot(self, snapshot: Path) -> Path:
        """Returns the directory or GGUF file to open. Raises FileNotFoundError if a file is missing."""
        there = [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]
        names = self._names_on_hub() or there
        if is_file := self._takes_gguf(names):
            needed = gguf_files(names, self.quant, self.repo)
        else:
            needed = needed_files(names, lambda index: shard_names(snapshot / index, Path()).values(), self.weights)
            if any(name in VOCABULARY_FILES for name in there):  # other libraries cache fewer tokenizer files
                needed = [name for name in needed if name in there or name not in TOKENIZER_FILES]
        if missing := [name for name in needed if name not in there]:
            raise FileNotFoundError(f"missing: {some(missing)}")
        return snapshot / needed[0] if is_file else snapshot

    def _names_on_hub(self) -> list[str] | None:
        """The names of all files of the snapshot, cached or not; None if huggingface_hub has not stored them, which it
        does from 2.0 on."""
        import huggingface_hub

        try:
            tree = huggingface_hub.get_cached_repo_tree(self.repo, revision=self.revision, cache_dir=self.cache_dir)
        except Exception:
            return None
        return [file.path for file in tree]

    def _takes_gguf(self, names: Iterable[str]) -> bool:
        return self.quant is not None or is_gguf_repository(names, self.weights)

    # -- from the Hub --------------------------------------------------------------------------------------------------

    def download(self) -> Path:
        """Downloads the files that are not cached yet."""
        from huggingface_hub import errors

        try:
            sizes, commit = self._list()
        except errors.OfflineModeIsEnabled:
            return self.cached("HF_HUB_OFFLINE forbids to download it")
        except Exception as error:  # any error of the HTTP library without a network
            if told := self._refused(error):
                raise told from error
            return self.cached(f"the Hub cannot be reached ({one_line(error)})", error)
        try:
            self._check_names(sizes, commit)
            if self._takes_gguf(sizes):
                return self._download_gguf(sizes, commit)
            return self._download_directory(sizes)
        except Exception as error:
            if told := self._refused(error):
                raise told from error
            if isinstance(error, OURS) and not isinstance(error, (errors.HfHubHTTPError, errors.EntryNotFoundError)):
                raise
            raise BrokenDownload(f"the download of {self.where} is incomplete: {one_line(error)}. {ADVICE}") from error

    def _list(self) -> tuple[dict[str, int | None], str | None]:
        """The names and sizes of all files, if the Hub reports sizes, and the commit."""
        import huggingface_hub

        # Makes one request; list_repo_files would wait for 26 s for an unreachable Hub.
        info = huggingface_hub.HfApi(token=self.token).model_info(
            self.repo, revision=self.revision, timeout=HUB_TIMEOUT_SECONDS, files_metadata=True
        )
        return {file.rfilename: file.size for file in info.siblings or []}, info.sha

    def _check_names(self, names: Iterable[str], commit: str | None) -> None:
        """Raises BrokenDownload for names that point outside of the cache's folder; no real repository has them."""
        parts = [part for name in names for part in (name.split("/") if not name.startswith("/") else [".."])]
        if ".." in parts or not (commit is None or commit.isalnum()):
            raise BrokenDownload(f"{self.where} has file names that point outside of it; nothing was downloaded")

    def _download_gguf(self, sizes: dict[str, int | None], commit: str | None) -> Path:
        files = gguf_files(sizes, self.quant, self.repo)
        self._check_room(files, sizes)
        if self.check is not None and not self._is_there(files[0], commit, sizes[files[0]]):
            self._check_header(files[0], sizes[files[0]], commit)
        model = self._fetch_weights(files, sizes, commit) / files[0]
        beside = mmproj_files(sizes, files[0])[:1] if self.media else []
        if beside and GgufFile(model).metadata.get("general.architecture") in TEXT_ARCHITECTURES:
            self._check_room(beside, sizes)
            self._fetch_weights(beside, sizes, commit)
        return model

    def _download_directory(self, sizes: dict[str, int | None]) -> Path:
        def read_index(index: str) -> Iterable[Path]:
            return shard_names(self._fetch([index]) / index, Path()).values()

        needed = needed_files(sizes, read_index, self.weights, self.where)
        if missing := [name for name in needed if name not in sizes]:
            raise FileNotFoundError(f"{self.where} lacks {some(missing)}, which its index of weights lists")
        large = [name for name in needed if name.endswith(OTHER_WEIGHT_SUFFIXES)]
        small = [name for name in needed if name not in large]
        directory = self._fetch(small)
        if not large:
            return directory
        if self.check is not None:
            self.check(directory)
        self._check_room(large, sizes)
        return self._fetch_weights(large, sizes, directory.name, directory.name)

    def _fetch(self, files: list[str], revision: str | None = None) -> Path:
        """Downloads files that are not cached. Returns the directory with all of them."""
        import huggingface_hub

        directory = Path(
            huggingface_hub.snapshot_download(
                self.repo,
                revision=revision or self.revision,
                cache_dir=self.cache_dir,
                token=self.token,
                # The patterns are exact names: brackets in a name must not act as wildcards.
                allow_patterns=[glob.escape(name) for name in files],
                tqdm_class=self._bar(),
            )
        )
        if missing := [name for name in files if not (directory / name).is_file()]:
            raise BrokenDownload(f"the download of {self.where} is incomplete: {some(missing)} is missing. {ADVICE}")
        return directory

    def _fetch_weights(
        self, files: list[str], sizes: dict[str, int | None], commit: str | None, revision: str | None = None
    ) -> Path:
        """Like `_fetch`, and checks that each file is complete."""
        for name in files:
            if commit is not None and not self._is_there(name, commit, sizes[name]):
                self._on_hub(name, commit).download(self.folder / "blobs")
        directory = self._fetch(files, revision)
        for name in files:
            found, size = (directory / name).stat().st_size, sizes[name]
            if not self._is_there(name, directory.name, size):
                raise BrokenDownload(
                    f"{name} of {self.where} arrived with {found:,} bytes, but the Hub lists {size:,}; it was "
                    f"deleted. {ADVICE}"
                )
        return directory

    def _is_there(self, name: str, commit: str | None, size: int | None) -> bool:
        """True if a file is in the cache. Deletes it if its size differs from the Hub's."""
        path = self.folder / "snapshots" / (commit or "main") / name
        if not path.is_file():
            return False
        if size is None or path.stat().st_size == size:
            return True
        blob = path.resolve()
        path.unlink()
        if blob.is_relative_to(self.folder.resolve()):  # keeps files that a user has linked here
            blob.unlink(missing_ok=True)
        return False

    def _on_hub(self, name: str, commit: str | None) -> FileOnHub:
        return FileOnHub(self.repo, name, commit, self.where, self.token, self._refused, self._bar())

    def _check_header(self, name: str, size: int | None, commit: str | None) -> None:
        """Calls the check with the header of a large GGUF file, in a file of the full length filled with zeros. Ignores
        errors that may come from the missing rest: longer headers, other shards, numbers that the config takes from a
        tensor. Does nothing if the header cannot be read separately."""
        if size is None or size <= HEADER_BYTES:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "header.gguf")
            if not self._on_hub(name, commit).read_beginning(path, HEADER_BYTES):
                return
            os.truncate(path, size)
            says_all = False
            try:
                header = GgufFile(path)
                says_all = not SHARD_NAME.fullmatch(name) and not set(ROPE_FACTORS) & header.tensors.keys()
                self.check(path)
            except (ValueError, NotImplementedError, MemoryError) as error:
                if isinstance(error, ValueError) and not says_all:
                    logger.info("the header of %s is checked after the download", name)
                    return
                kind = next(kind for kind in (NotImplementedError, MemoryError, ValueError) if isinstance(error, kind))
                raise kind(str(error).replace(str(path), f"{self.repo}/{name}")) from None

    def _check_room(self, files: list[str], sizes: dict[str, int | None]) -> None:
        """Raises OSError if the disk of the cache has no room for the missing files."""
        snapshots = list((self.folder / "snapshots").glob("*"))
        absent = [name for name in files if not any((snapshot / name).is_file() for snapshot in snapshots)]
        needed = sum(sizes.get(name) or 0 for name in absent)
        existing = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        partial = sum(path.stat().st_size for path in (self.folder / "blobs").glob("*.incomplete"))
        free = shutil.disk_usage(existing).free
        if needed - partial > free:
            raise NoRoom(
                f"{self.where} takes {format_bytes(needed)}, but {self.cache_dir} has only {format_bytes(free)} free; "
                f"free some space, or use another folder (cache_dir, or HF_HOME in the environment)"
            )

    def _bar(self) -> type:
        from huggingface_hub import utils

        shown = self.progress and env.shows_bars()

        class Bar(utils.tqdm):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs | {"disable": not shown})

        return Bar

    # -- what went wrong -----------------------------------------------------------------------------------------------

    def _refused(self, error: Exception) -> Exception | None:
        """Returns the exception to raise if the Hub answered, and will answer the same again; None for a network
        error."""
        from huggingface_hub import errors

        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.GatedRepoError):
            return PermissionError(
                f"{self.where} is gated: accept its conditions at https://huggingface.co/{self.repo}, then log in with "
                "`hf auth login` or pass token="
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return FileNotFoundError(
                f"{self.repo!r} exists on the Hub, but has no branch, tag or commit {self.revision!r}"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return FileNotFoundError(
                f"{self.where} is neither a directory here{hint_of_directory(self.repo)} nor a repository on the "
                "Hub that you may read. Check the spelling; for a private repository log in with `hf auth login` or "
                "pass token="
            )
        if isinstance(error, errors.LocalTokenNotFoundError):
            return PermissionError("token=True needs a saved token, but there is none; log in with `hf auth login`")
        if status == 401:
            return PermissionError(
                f"the Hub rejects the token for {self.where}; log in again with `hf auth login`, pass another token=, "
                "or token=False for none"
            )
        if status in (403, 451):
            return PermissionError(f"the Hub denies access to {self.where}: {one_line(error)}")
        return None


def hint_of_directory(repo: str) -> str:
    """Local directories whose names are similar to a repository's id, for an error message."""
    close = similar_names(Path(repo))
    return f" ({close.strip('; ')})" if close.startswith(";") else ""


def similar_names(path: Path) -> str:
    """Suggests what the user meant: the first part of the path that does not exist, and similar names."""
    while not exists(path.parent):
        path = path.parent
    names = (
        [entry.name for entry in path.parent.iterdir()]
        if os.access(path.parent, os.R_OK) and path.parent.is_dir()
        else []
    )
    close = difflib.get_close_matches(path.name, names, n=3)
    if not close:
        return f" ({path.parent.absolute()} has no {path.name[:100]!r})"
    return f"; {path.parent.absolute()} has {', '.join(map(repr, close))}"


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long
        return False
