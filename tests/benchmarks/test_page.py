"""The part of a page that a benchmark writes."""

from __future__ import annotations

import json

import pytest

from benchmarks.page import check_page, markers, publish, write_into


def test_what_stands_between_the_lines_is_replaced_and_nothing_else(tmp_path) -> None:
    begin, end = markers("benchmarks/a.py")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_into(page, "benchmarks/a.py", "new\n")
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- benchmarks/a.py -->\n",
        "<!-- end of benchmarks/a.py -->\n",
        "<!-- end of benchmarks/a.py -->\n<!-- benchmarks/a.py -->\n",
    ],
)
def test_a_page_without_the_lines_is_left_alone(tmp_path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="needs the lines"):
        write_into(page, "benchmarks/a.py", "new\n")
    assert page.read_text() == text


def test_tables_go_to_the_page_or_to_stdout_and_the_report_is_the_last_line(tmp_path, capsys) -> None:
    page = tmp_path / "page.md"
    page.write_text(text := "\n".join(markers("benchmarks/a.py")))
    check_page(page, "benchmarks/a.py")
    assert page.read_text() == text  # until there is something to write
    publish(page, "benchmarks/a.py", "| 1 |\n", {"one": 1})
    assert "| 1 |" in page.read_text() and json.loads(capsys.readouterr().out) == {"one": 1}
    check_page(None, "benchmarks/a.py")
    publish(None, "benchmarks/a.py", "| 2 |\n", {"two": 2})
    assert capsys.readouterr().out.splitlines() == ["| 2 |", "", '{"two": 2}']


def test_a_page_without_the_lines_is_told_before_the_wait(tmp_path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(ValueError, match="needs the lines"):
        check_page(page, "benchmarks/a.py")
