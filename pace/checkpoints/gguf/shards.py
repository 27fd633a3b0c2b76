"""GGUF files that are split into shards: their names, and a check that they belong together."""

from __future__ import annotations

import re
from pathlib import Path

from pace.checkpoints.gguf.file import GgufFile

SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SHARDS = 1000


def shard_paths(path: Path) -> list[Path]:
    """All shards of the file that `path` belongs to, in order. Raises FileNotFoundError if one is missing."""
    found = SHARD_NAME.fullmatch(path.name)
    if not found:
        return [path]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count <= MAX_SHARDS:
        raise ValueError(
            f"{path} has the name of shard {int(found['number'])} of {count}; shards are numbered from 1 to at most "
            f"{MAX_SHARDS}"
        )
    paths = [path.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if missing := [shard.name for shard in paths if not shard.exists()]:
        more = ", ..." if len(missing) > 5 else ""
        raise FileNotFoundError(
            f"{path} is one of {count} shards; missing in {path.parent}: {', '.join(missing[:5])}{more}"
        )
    return paths


def check_shards(files: list[GgufFile]) -> None:
    """Raises ValueError unless each file's metadata agree with its name and all tensors are present."""
    total = 0
    for number, file in enumerate(files):
        count, own = file.metadata.integer("split.count", 0) or 1, file.metadata.integer("split.no", 0)
        if count != len(files) or own != number:
            what = f"is shard {own + 1} of {count} by its metadata (split.no, split.count)"
            advice = "put the shards into one folder under their original names, such as FILE-00001-of-00002.gguf"
            raise ValueError(f"{file.path} {what}, and shard {number + 1} of {len(files)} by its name; {advice}")
        total += len(file.tensors)
    announced = files[0].metadata.integer("split.tensors.count", total)
    if announced != total:
        raise ValueError(
            f"{files[0].path} announces {announced} tensors (split.tensors.count), but its {len(files)} shards have "
            f"{total}; download or copy them again"
        )
