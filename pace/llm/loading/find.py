"""Finds checkpoints: a local directory or GGUF file, or the Hugging Face Hub and its cache (`hub`).

Code from a repository is neither downloaded nor run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.gguf.shards import shard_paths
from pace.llm.loading.hub import (
    Check,
    exists,
    find_on_hub,
    is_hub_id,
    similar_names,
)
from pace.llm.loading.repository import (
    gguf_files,
    gguf_models,
    is_gguf_repository,
    mmproj_files,
    some,
)


def find_checkpoint(
    path_or_id: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    weights: bool = True,
    progress: bool = True,
    check: Check | None = None,
    media: bool = False,
) -> Path:
    """Returns the directory of a checkpoint: the given one if it exists, else the Hub's snapshot, downloaded if needed.

    Downloads config, tokenizer and, with `weights`, one set of weights (safetensors preferred over .bin). If the Hub
    is unreachable or must not be used (`local_files_only`, HF_HUB_OFFLINE), returns the cached snapshot if it is
    complete. An interrupted download is resumed. `token=None` uses the one saved by `hf auth login`. `progress` shows
    bars of a download, on a terminal or in a notebook. `check` is called before the weights of a repository are
    downloaded, with the directory of config.json (or a GGUF file that only has its header).
    For a GGUF file, or a directory with one as its weights, returns that file, of several shards the first.
    "NAME:QUANT", such as "org/name:Q4_K_M", is the GGUF file of a repository or directory with that quant in its name.
    Without QUANT, a GGUF repository gives Q4_K_M, else its only file. With `media`, the mmproj file of a repository is
    downloaded, too, where `find_mmproj` finds it.

    Raises FileNotFoundError for a directory, repository, revision or quant that does not exist, or is not cached and
    the Hub is offline. Also for a missing shard, and a download that ended early. Raises PermissionError for a gated or
    private repository. Raises ValueError for another file, several GGUF files, an invalid id, and a revision of a local
    directory. Also raises TypeError, OSError (disk full), and the errors of `check`.
    """
    if not isinstance(path_or_id, (str, os.PathLike)):
        raise TypeError(f"the model must be a path or a Hub id, a str or a Path; got {type(path_or_id).__name__}")
    text = os.fspath(path_or_id)
    if not text or "\0" in text:
        raise ValueError(
            f"the model must be a GGUF file, a directory or a Hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'; got {text!r}"
        )
    if address := re.match(r"(?:https?|hf)://(?:[^/]*\.[^/]*/)?([^/]+/[^/?#]+)?", text):
        advice = f"; give the id alone, {address[1]!r}" if address[1] else ""
        raise FileNotFoundError(f"there is no directory {text[:300]!r}: an address is not a Hub id{advice}")
    text, quant = _split_quant(text)
    path = Path(text).expanduser()
    if exists(path):
        return _find_here(path, quant, revision, weights)
    looks_like_file = text.lower().endswith(".gguf")
    looks_like_path = isinstance(path_or_id, os.PathLike) or text.startswith((".", "/", "~")) or text.endswith("/")
    if looks_like_file or looks_like_path or not is_hub_id(text):
        kind = "file" if looks_like_file else "directory"
        raise FileNotFoundError(f"there is no {kind} {str(path)[:300]!r}{similar_names(path)}")
    return find_on_hub(text, quant, revision, token, cache_dir, local_files_only, weights, progress, check, media)


def find_mmproj(model: Path) -> list[Path]:
    """Returns the mmproj files in the folder of a GGUF file, the best first (`mmproj_files`). In a snapshot of the Hub,
    folders above it count as well."""
    top = next((folder for folder in model.parents if folder.parent.name == "snapshots"), model.parent)
    folders = [folder for folder in model.parents if folder.is_relative_to(top)]
    names = [path.relative_to(top).as_posix() for folder in folders for path in folder.iterdir() if path.is_file()]
    return [top / name for name in mmproj_files(names, model.relative_to(top).as_posix())]


def _split_quant(text: str) -> tuple[str, str | None]:
    """Splits "org/name:Q4_K_M" into "org/name" and "Q4_K_M". A colon in the name of a local path is not a separator."""
    name, colon, quant = text.rpartition(":")
    if not colon or exists(Path(text).expanduser()) or quant.startswith(("/", "\\")):  # a URL
        return text, None
    if not name or not quant:
        raise ValueError(f"{text!r} must have a name before the colon and a quant after it, such as 'org/name:Q4_K_M'")
    return name, quant


def _find_here(path: Path, quant: str | None, revision: str | None, weights: bool) -> Path:
    """The checkpoint at a local path."""
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise PermissionError(f"this user may not read {path}; check its permissions")
    if not path.is_dir() and not is_gguf(path):
        raise ValueError(
            f"{path} is a file, but not a GGUF file; give the directory that holds config.json, the tokenizer and the "
            f"weights, or a GGUF file"
        )
    if revision is not None:
        raise ValueError(
            f"revision={revision!r} was given, but {path} is a local {'directory' if path.is_dir() else 'file'}, "
            f"which has no revisions; leave it out"
        )
    if not path.is_dir():
        if quant is not None:
            raise ValueError(f"{path} is a single file; leave out ':{quant}', which chooses among several")
        return shard_paths(path)[0]
    if quant is not None:
        names = [file.relative_to(path).as_posix() for file in path.rglob("*.[gG][gG][uU][fF]")]
        return path / gguf_files(names, quant, str(path))[0]
    return _gguf_inside(path, weights) or path


def _gguf_inside(directory: Path, weights: bool) -> Path | None:
    """The only GGUF file of a directory without other weights (with `weights` false, without another tokenizer). None
    if there is none."""
    names = [entry.name for entry in directory.iterdir()]
    if not is_gguf_repository(names, weights):
        return None
    first = list(gguf_models(names))
    if len(first) > 1:
        raise ValueError(
            f"{directory} has several GGUF files ({some(first)}); give the path of one of them, or {directory}:QUANT"
        )
    return shard_paths(directory / first[0])[0]
