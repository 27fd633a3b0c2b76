"""Finds sentences that are hard to read: long ones, ones that begin with the wrong word, and private idioms.

`python -m tests.project.test_prose PATH ...` lists them. It reads docstrings and comments of Python, comments of C++,
and the text of Markdown pages outside of code blocks and tables."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.plugins.tiers import ROOT

MAX_WORDS = 25
OPENINGS = re.compile(r"(Of|Those|That|As|By|In which|From|Whether|To which)\b")
"""First words of a docstring that hide its subject."""
IDIOMS = re.compile(
    r"\b(so many|of which|whoever|whatever|nobody|beside|hears?|told|tells?|as many|dear(?:er|est)?|wherefore|"
    r"takes? care of|says? so|knows? of|is known to|goes with|come to know)\b",
    re.IGNORECASE,
)
SUFFIXES = {".py", ".cpp", ".h", ".inl", ".md"}


class Finding(NamedTuple):
    path: Path
    line: int
    rule: str
    text: str


def findings(path: Path) -> Iterator[Finding]:
    for line, text, is_docstring in passages(path):
        if is_docstring and (match := OPENINGS.match(text)):
            yield Finding(path, line, "opening", match[0])
        for match in IDIOMS.finditer(without_code(text)):
            yield Finding(path, line, "idiom", match[0])
        for sentence in sentences(text):
            if (count := len(sentence.split())) > MAX_WORDS:
                yield Finding(path, line, "length", f"{count} words: {sentence[:60]}")


def passages(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line number, text, and whether it is a docstring, of every passage of prose in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from python_passages(source)
    elif path.suffix == ".md":
        yield from markdown_passages(source)
    else:
        yield from joined((number, line) for number, line in cpp_comments(source))


def python_passages(source: str) -> Iterator[tuple[int, str, bool]]:
    lines = source.splitlines()
    comments = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:|pragma|ruff)", token.string):
            is_alone = lines[token.start[0] - 1].lstrip().startswith("#")
            comments.append((token.start[0] if is_alone else -token.start[0], token.string.lstrip("# -")))
    yield from joined(iter(comments))
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            value = getattr(statement, "value", None)
            if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                for number, paragraph in enumerate(re.split(r"\n\s*\n", value.value)):
                    yield statement.lineno, " ".join(paragraph.split()), number == 0


def cpp_comments(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.match(r"(.*?)//+ ?(.*)", line):
            yield (number if not match[1].strip() else -number), match[2]


def joined(comments: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, bool]]:
    """Joins comments on consecutive lines to one passage. A comment after code has a negative line number and is a
    passage by itself."""
    begin, last, texts = 0, -1, []
    for number, text in comments:
        if number > 0 and number == last + 1 and text:
            last = number
            texts.append(text)
            continue
        if texts:
            yield begin, " ".join(texts), False
        begin, last, texts = abs(number), number if number > 0 else -1, [text] if text else []
    if texts:
        yield begin, " ".join(texts), False


def markdown_passages(source: str) -> Iterator[tuple[int, str, bool]]:
    number = 1
    for part in re.split(r"(^```.*?^```$)", source, flags=re.MULTILINE | re.DOTALL):
        if not part.startswith("```"):
            for offset, paragraph in blocks(part):
                yield number + offset, paragraph, False
        number += part.count("\n")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and items of lists, with the number of lines before each; no headings, tables and quoted output."""
    begin, words = 0, []
    for offset, line in enumerate([*text.splitlines(), ""]):
        starts = re.match(r"\s*([-*]|\d+\.) ", line)
        if not line.strip() or starts or line.startswith(("#", "|", ">", "    ")):
            if words:
                yield begin, " ".join(words)
            words = []
        if not words:
            begin = offset
        if line.strip() and not line.startswith(("#", "|", ">", "    ")):
            words += re.sub(r"^\s*([-*]|\d+\.) ", "", line).split()


def without_code(text: str) -> str:
    return re.sub(r"``?[^`]*``?|\"[^\"]*\"|\]\([^)]*\)", "CODE", text)


def sentences(text: str) -> Iterator[str]:
    for sentence in re.split(r"(?<=[.!?])\s+", without_code(text)):
        if sentence.strip():
            yield sentence.strip()


GENERATED = re.compile(r"docs/(benchmarks|real-models)\.md|tests/durations\.md|benchmarks/results/.*")
"""Pages that programs write."""


def found_in(*names: str) -> dict[str, list[str]]:
    """Findings by file, of files and folders."""
    paths = [
        path for name in names for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
    ]
    files = [path for path in paths if path.suffix in SUFFIXES and not GENERATED.fullmatch(str(path.relative_to(ROOT)))]
    return {
        str(path.relative_to(ROOT)): [f"{path}:{line}: {rule}: {text}" for _, line, rule, text in findings(path)]
        for path in files
    }


@pytest.mark.parametrize(
    "name", ["pace", "csrc", "docs", "tests", "benchmarks", "examples", "integrations", "training"]
)
def test_folders(name):
    check(found_in(name))


def test_files_at_the_top():
    check(found_in(*[path.name for path in ROOT.iterdir() if path.suffix in SUFFIXES]))


def check(found: dict[str, list[str]]) -> None:
    lines = [line for findings_of_file in found.values() for line in findings_of_file]
    assert not lines, "\n".join(["hard to read:", *lines])


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


def main() -> int:
    paths = [Path(argument) for argument in sys.argv[1:]]
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*")))]
    found = [finding for file in files if file.suffix in SUFFIXES for finding in findings(file)]
    for path, line, rule, text in found:
        print(f"{path}:{line}: {rule}: {text}")
    print(len(found))
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
