"""The part of a page that a benchmark writes."""

from __future__ import annotations

import pytest

from benchmarks.page import markers, write_into


def test_what_stands_between_the_lines_is_replaced_and_nothing_else(tmp_path) -> None:
    begin, end = markers("benchmarks/a.py")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    write_into(page, "benchmarks/a.py", "new\n")
    assert page.read_text() == f"before\n{begin}\nnew\n{end}\nafter\n"


@pytest.mark.parametrize("text", ["nothing", "<!-- benchmarks/a.py -->\n", "<!-- end of benchmarks/a.py -->\n", "<!-- end of benchmarks/a.py -->\n<!-- benchmarks/a.py -->\n"])
def test_a_page_without_the_lines_is_left_alone(tmp_path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="needs the lines"):
        write_into(page, "benchmarks/a.py", "new\n")
    assert page.read_text() == text
