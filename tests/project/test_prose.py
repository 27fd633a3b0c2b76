"""Prose is plain: no sentence of more than 25 words, no docstring that begins with the wrong word, no private idiom.

`python -m tests.project.prose PATH` lists what is found and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins.tiers import ROOT
from tests.project.prose import SUFFIXES, findings

GENERATED = re.compile(r"docs/(benchmarks|real-models)\.md|tests/durations\.md|benchmarks/results/.*")
"""Pages that programs write."""
CEILINGS = {"benchmarks/RESULTS.md": 95}
"""Findings that older pages still have. They may only fall."""


def found_in(*names: str) -> dict[str, list[str]]:
    """Findings by file, of files and folders."""
    paths = [path for name in names for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))]
    files = [path for path in paths if path.suffix in SUFFIXES and not GENERATED.fullmatch(str(path.relative_to(ROOT)))]
    return {
        str(path.relative_to(ROOT)): [f"{path}:{line}: {rule}: {text}" for _, line, rule, text in findings(path)]
        for path in files
    }


@pytest.mark.parametrize("name", ["pace", "csrc", "docs", "tests", "benchmarks", "examples", "integrations", "training"])
def test_folders(name):
    check(found_in(name))


def test_files_at_the_top():
    check(found_in(*[path.name for path in ROOT.iterdir() if path.suffix in SUFFIXES]))


def check(found: dict[str, list[str]]) -> None:
    too_many = {path: lines for path, lines in found.items() if len(lines) > CEILINGS.get(path, 0)}
    assert not too_many, "\n".join(["hard to read:", *(line for lines in too_many.values() for line in lines)])
    for path in CEILINGS.keys() & found.keys():
        assert len(found[path]) == CEILINGS[path], f"lower the ceiling of {path} to {len(found[path])}"


@pytest.mark.parametrize(
    ("name", "text", "rules"),
    [
        ("a.py", '"""Of the words, those that count."""', ["opening"]),
        ("a.py", '"""The words that count."""\n# What it tells whoever asks.\n', ["idiom", "idiom"]),
        ("a.py", "x = 1  # " + "word " * 26, ["length"]),
        ("a.py", "# " + "word " * 20 + "\n# " + "word " * 6, ["length"]),
        ("a.py", "# " + "word " * 20 + "end.\n# " + "word " * 6, []),
        ("a.py", 'def f():\n    x = 1\n    """As a field."""\n', ["opening"]),
        ("a.py", 'x = "whoever"\n', []),
        ("a.cpp", "int x;  // " + "word " * 26, ["length"]),
        ("a.h", "// " + "word " * 20 + "\n// " + "word " * 6, ["length"]),
        ("a.md", "# Nobody\n\n| nobody |\n\n```\nnobody\n```\n\n- nobody\n- `nobody` [as](nobody)\n", ["idiom"]),
    ],
)
def test_what_is_found(name, text, rules, tmp_path):
    (tmp_path / name).write_text(text)
    assert [finding.rule for finding in findings(tmp_path / name)] == rules


def test_the_line_is_named(tmp_path):
    path = Path(tmp_path / "a.md")
    path.write_text("One.\n\n```\ncode\n```\n\nTwo.\n\nIt is nobody's.\n")
    assert [finding.line for finding in findings(path)] == [9]
