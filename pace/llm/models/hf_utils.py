"""Where a checkpoint comes from: a local directory or GGUF file, or the Hugging Face Hub and its cache. The only
importer of huggingface_hub, when it is needed.

    directory = find_checkpoint("Qwen/Qwen2.5-0.5B-Instruct")
    config = read_config_json(directory)
    tokenizer = load_tokenizer(directory, vocab_size=config["vocab_size"])

Code that a repository brings along is neither downloaded nor run.
"""

from __future__ import annotations

import difflib
import glob
import logging
import os
import re
from collections.abc import Callable, Iterable
from fnmatch import fnmatch
from pathlib import Path

from pace import env
from pace.checkpoints.files import read_json_object
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.gguf.file import is_gguf
from pace.checkpoints.gguf.shards import SHARD_NAME, shard_paths
from pace.checkpoints.reader import (
    GPTQ_NAME,
    INDEX_SUFFIX,
    OTHER_WEIGHT_SUFFIXES,
    SAFETENSORS_NAME,
    TORCH_NAME,
    shard_names,
)
from pace.tokenizer.loading import TOKENIZER_FILES, VOCABULARY_FILES
from pace.tokenizer.loading import load_tokenizer as load_tokenizer

logger = logging.getLogger("pace")

QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""Where AutoGPTQ, AutoAWQ and ModelOpt said how weights are quantised before config.json did, and the `quant_method`
that they meant."""
CONFIG_FILES = ("config.json", "generation_config.json", *QUANTIZATION_FILES)

# The Hub's rule: one or two parts of letters, digits, ".", "_" and "-", none of which starts or ends with "." or "-".
HUB_ID = re.compile(r"(?:\w(?:[\w.-]*\w)?/)?\w(?:[\w.-]*\w)?", re.ASCII)
MAX_HUB_ID = 96
HUB_TIMEOUT_SECONDS = 10
"""For the first answer; what takes longer counts as unreachable."""


def find_checkpoint(
    path_or_id: str | Path,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
    weights: bool = True,
    progress: bool = True,
) -> Path:
    """The directory of a checkpoint: the given one if it exists, else the Hub's snapshot, downloaded as far as needed.

    Downloaded are config, tokenizer and, with `weights`, one set of weights (safetensors preferred over .bin). Where
    the Hub cannot be reached, or is not to be asked (`local_files_only`, HF_HUB_OFFLINE), the cached snapshot is taken.
    `token=None` takes the one saved by `hf auth login`. `progress` shows bars of a download, on a terminal or in a
    notebook.
    A GGUF file, or a directory whose weights are one, gives that file, of several shards the first; it stands for a
    directory.

    Raises FileNotFoundError (no such directory, repository or revision; not cached and offline; a missing shard),
    PermissionError (gated or private), ValueError (another file, several GGUF files, not an id, a revision of a local
    directory), TypeError.
    """
    if not isinstance(path_or_id, (str, os.PathLike)):
        raise TypeError(f"the model must be a path or a Hub id, a str or a Path; got {type(path_or_id).__name__}")
    text = os.fspath(path_or_id)
    path = Path(text).expanduser()
    if not text or "\0" in text:
        raise ValueError(
            f"the model must be a GGUF file, a directory or a Hub id such as 'Qwen/Qwen2.5-0.5B-Instruct'; got {text!r}"
        )
    if _exists(path):
        if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
            raise PermissionError(f"{path} may not be read by this user; check its permissions")
        if not path.is_dir() and not is_gguf(path):
            raise ValueError(
                f"{path} is a file; give the directory that holds config.json, the tokenizer and the weights, or a GGUF file"
            )
        if revision is not None:
            raise ValueError(
                f"revision={revision!r} was given, but {path} is a local {'directory' if path.is_dir() else 'file'}, which has no revisions"
            )
        return _gguf_inside(path, weights) or path if path.is_dir() else shard_paths(path)[0]
    looks_like_file = text.lower().endswith(".gguf")
    looks_like_path = isinstance(path_or_id, os.PathLike) or text.startswith((".", "/", "~")) or text.endswith("/")
    if looks_like_file or looks_like_path or len(text) > MAX_HUB_ID or not HUB_ID.fullmatch(text):
        kind = "file" if looks_like_file else "directory"
        raise FileNotFoundError(f"there is no {kind} {str(path)[:300]!r}{_similar_names(path)}")
    return _find_on_hub(text, revision, token, cache_dir, local_files_only, weights, progress)


def _gguf_inside(directory: Path, weights: bool) -> Path | None:
    """The one GGUF file of a directory that has no other weights (or, where these are not wanted, no other
    tokenizer)."""
    names = {entry.name for entry in directory.iterdir()}
    others = {name + end for name in (SAFETENSORS_NAME, TORCH_NAME) for end in ("", INDEX_SUFFIX)}
    if names & (others if weights else others.union(VOCABULARY_FILES)):
        return None
    first = {SHARD_NAME.sub(r"\g<stem>-00001-of-\g<count>.gguf", name) for name in names if name.endswith(".gguf")}
    if len(first) > 1:
        raise ValueError(f"{directory} has several GGUF files ({_some(sorted(first))}); give the path of one of them")
    return shard_paths(directory / first.pop())[0] if first else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long to exist
        return False


def _similar_names(path: Path) -> str:
    """What the user may have meant: the first part of the path that does not exist, and its likely spellings."""
    while not _exists(path.parent):
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


# ----------------------------------------------------------------------------------------------------------------- the
# Hub


def _find_on_hub(
    repo: str,
    revision: str | None,
    token: str | bool | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
    weights: bool,
    progress: bool,
) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors, utils
    except ImportError as error:
        raise FileNotFoundError(
            f"there is no directory {repo!r}, and asking the Hub for it needs huggingface_hub ({error})"
        ) from error
    where = f"{repo!r}" + (f" at revision {revision!r}" if revision else "")
    common = {"revision": revision, "cache_dir": cache_dir}

    def cached(reason: str, cause: Exception | None = None) -> Path:
        """The cached snapshot; a warning says so where the Hub was asked (`cause`: how it failed)."""
        try:
            found = huggingface_hub.snapshot_download(
                repo, **common, local_files_only=True, allow_patterns=["config.json"]
            )
        except (errors.LocalEntryNotFoundError, FileNotFoundError):
            raise FileNotFoundError(
                f"{where} is neither a directory here{_hint_of_directory(repo)} nor in the Hub's cache, and {reason}"
            ) from cause
        if cause is not None:
            logger.warning("%s: %s; using the cached copy", repo, reason)
        return Path(found)

    if local_files_only:
        return cached("local_files_only=True forbids to download it")

    class Bar(utils.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs | {"disable": not (progress and env.shows_bars())})

    def fetch(files: list[str]) -> Path:
        # The patterns are exact names: brackets in a name must not act as wildcards.
        patterns = [glob.escape(name) for name in files]
        return Path(
            huggingface_hub.snapshot_download(repo, **common, token=token, allow_patterns=patterns, tqdm_class=Bar)
        )

    try:
        # Asks once, where list_repo_files would ask for 26 s of a Hub that is not there.
        siblings = (
            huggingface_hub.HfApi(token=token).model_info(repo, revision=revision, timeout=HUB_TIMEOUT_SECONDS).siblings
        )
        names = [file.rfilename for file in siblings or []]
        return fetch(needed_files(names, lambda index: shard_names(fetch([index]) / index, Path()).values(), weights))
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{where} is gated: accept its conditions at https://huggingface.co/{repo}, then log in with `hf auth login` or "
            "pass token="
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{repo!r} exists on the Hub, but has no branch, tag or commit {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{where} is neither a directory here{_hint_of_directory(repo)} nor a repository on the Hub that you may see. Check the "
            "spelling; for a private repository log in with `hf auth login` or pass token="
        ) from error
    except errors.OfflineModeIsEnabled:
        return cached("HF_HUB_OFFLINE forbids to download it")
    except (ValueError, PermissionError, FileNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            return cached(f"the Hub cannot be reached ({_one_line(error)})", error)
        raise
    except Exception as error:  # whatever the HTTP library raises when there is no network
        return cached(f"the Hub cannot be reached ({_one_line(error)})", error)


def _hint_of_directory(repo: str) -> str:
    close = _similar_names(Path(repo))
    return f" ({close.strip('; ')})" if close.startswith(";") else ""


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def needed_files(names: Iterable[str], shards_of: Callable[[str], Iterable[Path]], weights: bool = True) -> list[str]:
    """Which files of a repository to download; `shards_of(index name)` gives the shards that an index names.

    Raises FileNotFoundError where the repository has no config.json or no weights that can be used.
    """
    names = sorted(names)
    wanted = [
        name for name in names if name in CONFIG_FILES or any(fnmatch(name, pattern) for pattern in TOKENIZER_FILES)
    ]
    if not weights:
        return wanted
    if "config.json" not in names:
        raise FileNotFoundError(f"the repository has no config.json; it has {_some(names)}")
    for name in (SAFETENSORS_NAME, TORCH_NAME):
        if name in names:
            return [*wanted, name]
        if name + INDEX_SUFFIX in names:
            shards = sorted({path.as_posix() for path in shards_of(name + INDEX_SUFFIX)})
            return [*wanted, name + INDEX_SUFFIX, *shards]
    if len(found := [name for name in names if fnmatch(name, GPTQ_NAME)]) == 1:
        return [*wanted, *found]
    others = [name for name in names if name.endswith(OTHER_WEIGHT_SUFFIXES)]
    raise FileNotFoundError(
        f"the repository has no {SAFETENSORS_NAME} or {TORCH_NAME}, single or sharded; it has {_some(others or names)}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"


# ----------------------------------------------------------------------------------------------------------- what is in
# it


def read_config_json(directory: str | Path) -> dict:
    """config.json, with the `quantization_config` that early checkpoints have in a file of its own; or what a GGUF file
    has instead. FileNotFoundError or ValueError where it is missing or no JSON object."""
    if is_gguf(Path(directory)):
        with GgufCheckpoint(directory) as checkpoint:
            return checkpoint.config
    path = Path(directory) / "config.json"
    if not os.path.lexists(path):
        raise FileNotFoundError(
            f"{directory} has no config.json, so it is not a Hugging Face checkpoint; give the directory that holds config.json and "
            f"the weights{_what_is_there(Path(directory))}"
        )
    config = read_json_object(path)
    for name, method in QUANTIZATION_FILES.items():
        beside = path.with_name(name)
        if not (config.get("quantization_config") or config.get("compression_config")) and os.path.lexists(beside):
            config["quantization_config"] = {"quant_method": method, **read_json_object(beside)}
    return config


def _what_is_there(directory: Path) -> str:
    if not directory.is_dir():
        return ""
    names = sorted(entry.name for entry in directory.iterdir())
    nested = [name for name in names if (directory / name / "config.json").is_file()]
    return f" (perhaps {nested[0]!r} inside it)" if nested else f" (it has {_some(names)})"


def read_generation_config(directory: str | Path) -> dict:
    """generation_config.json as it is, {} where there is none; ValueError where it is no JSON object."""
    path = Path(directory) / "generation_config.json"
    return read_json_object(path) if os.path.lexists(path) else {}
