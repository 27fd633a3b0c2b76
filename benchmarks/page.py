"""Pages with a part that a benchmark writes, between two lines that name the benchmark."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any


def add_into_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="the page where the tables go (default: stdout)")


def check_page(into: Path | None, script: str) -> None:
    """Raises what `write_into` would, before the measurement; the page is not changed."""
    if into:
        _around(into, script)


def publish(into: Path | None, script: str, text: str, report: dict[str, Any] | None = None) -> None:
    """Writes the tables into a page, or prints them. If there is a report, it is the last line of stdout, as one JSON
    object."""
    if into:
        write_into(into, script, text)
    else:
        print(text)
    if report is not None:
        print(json.dumps(report))


def command(script: str) -> str:
    """The command that started this process."""
    return " ".join(["python", script, *without_paths(sys.argv[1:])])


def without_paths(arguments: list[str]) -> list[str]:
    """Removes absolute paths of this machine, which mean nothing to a reader."""
    return [re.sub(r"(^|=)/\S*", r"\1PATH", argument) for argument in arguments]


def earlier_rows(path: Path | None, script: str, num_keys: int, header: str = "| ") -> dict[tuple[str, ...], str]:
    """Returns the rows of a table between the script's two lines, by their first `num_keys` cells. It is the first
    table whose first line begins with `header`. A run of only some rows can then keep the others. Empty without a page,
    or without such a table."""
    if path is None:
        return {}
    begin, end = markers(script)
    _, found, rest = path.read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].partition(f"\n{header}")
    table = (found + rest).strip().partition("\n\n")[0].splitlines()
    header_and_rows = [line for line in table if line.startswith("| ")]
    return {tuple(cell.strip() for cell in row.split("|")[1 : 1 + num_keys]): row for row in header_and_rows[1:]}


def markers(script: str) -> tuple[str, str]:
    """The two lines of a script, such as "benchmarks/kernels.py"."""
    return f"<!-- {script} -->", f"<!-- end of {script} -->"


def write_into(path: Path, script: str, text: str) -> None:
    """Replaces the text between the script's two lines. Raises ValueError if the file does not have both, in this
    order."""
    before, after = _around(path, script)
    begin, end = markers(script)
    path.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def _around(path: Path, script: str) -> tuple[str, str]:
    begin, end = markers(script)
    before, found_begin, rest = path.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"{path} needs the lines {begin} and {end}, between which the tables go")
    return before, after
