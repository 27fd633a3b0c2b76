"""Pages with a part that a benchmark writes: what stands between two lines that name it."""

from __future__ import annotations

from pathlib import Path


def markers(script: str) -> tuple[str, str]:
    """The two lines of a script, such as "benchmarks/cache.py"."""
    return f"<!-- {script} -->", f"<!-- end of {script} -->"


def write_into(path: Path, script: str, text: str) -> None:
    """Replaces what stands between the script's two lines. Raises ValueError where the file has not both of them, in this order."""
    begin, end = markers(script)
    before, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{path} needs the lines {begin} and {end}, between which the tables go")
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")
