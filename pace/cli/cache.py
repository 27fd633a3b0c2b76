"""`pace cache`: lists and clears the packed copies of weights, which make a model open at once."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from pace import env
from pace.llm.loading.weights_cache import Copy, list_copies, remove_abandoned
from pace.memory import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "clear"),
        default="list",
        help="list the copies (default), or remove them; a running model keeps its own until it ends",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="COPY_OR_MODEL",
        help="copies to remove, by their name or by the path of their model (default: all)",
    )
    parser.add_argument(
        "--weights-cache",
        type=Path,
        metavar="DIR",
        help="folder of the copies (default: $PACE_CACHE, else ~/.cache/pace)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    folder = arguments.weights_cache or env.cache_directory()
    copies = list_copies(folder) if folder else []
    if arguments.action == "list":
        if arguments.names:
            arguments.parser.error("`pace cache list` takes no names")
        print(_as_json(folder, copies) if arguments.json else _as_text(folder, copies))
        return 0
    removed = _chosen(copies, arguments.names)
    if folder:
        remove_abandoned(folder)
    for copy in removed:
        copy.path.unlink(missing_ok=True)
    print(_as_json(folder, removed) if arguments.json else f"removed {_sizes(removed)}")
    return 0


def _chosen(copies: list[Copy], names: list[str]) -> list[Copy]:
    """Returns the copies with these names or models; all of them if `names` is empty. Raises ValueError for an unknown
    name."""
    if not names:
        return copies
    found: dict[Path, Copy] = {}
    for name in names:
        of_name = [copy for copy in copies if name == copy.path.name or os.path.realpath(name) == copy.checkpoint]
        if not of_name:
            raise ValueError(f"there is no copy with the name or of the model {name}; `pace cache` lists the copies")
        found |= {copy.path: copy for copy in of_name}
    return list(found.values())


def _as_json(folder: Path | None, copies: list[Copy]) -> str:
    found = [
        {"name": copy.path.name, "model": copy.checkpoint, "bytes": copy.nbytes, "used": copy.used} for copy in copies
    ]
    report = {"folder": folder and str(folder), "limit": env.cache_bytes(), "copies": found}
    return json.dumps(report, indent=2)


def _as_text(folder: Path | None, copies: list[Copy]) -> str:
    if folder is None:
        return "no packed copies are kept (PACE_CACHE_SIZE is 0, or there is no home directory)"
    lines = [f"{folder}: {_sizes(copies)} of {format_bytes(env.cache_bytes())}"]
    for copy in copies:
        gone = "  (the model is gone)" if copy.is_stale else ""
        lines += [f"  {format_bytes(copy.nbytes):>10}  used {_ago(copy.used):<12} {copy.path.name}"]
        lines += [f"              of {copy.checkpoint}{gone}"]
    return "\n".join(lines)


def _sizes(copies: list[Copy]) -> str:
    """Number of copies and their total size."""
    number = "1 copy" if len(copies) == 1 else f"{len(copies)} copies"
    return f"{number}, {format_bytes(sum(copy.nbytes for copy in copies))}"


def _ago(moment: float) -> str:
    seconds = max(0, time.time() - moment)
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name} ago"
    return "just now"
