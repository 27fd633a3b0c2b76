"""Keys that are typed before they are read."""

from __future__ import annotations

import pytest

from pace.cli.chat.ahead import TypedAhead


@pytest.mark.parametrize(
    ("keys", "lines", "begun"),
    [
        ("", [], ""),
        ("one", [], "one"),
        ("one\rtwo\nth", ["one", "two"], "th"),
        ("onx\x7fe\b\x7f\x7f\x7f\x7fa", [], "a"),
        ("one two\x17three\r\x17\x15a\x15b", ["one three"], "b"),
        ("a\x1b[D\x1b[1;5Cb\x1bOAc\x1bfd\x1b", [], "abcd"),
        ("a\x1b[200~b\rc\x1b[201~d\re", ["ab\ncd"], "e"),
        ("\x1b[200~a\rb", [], "a\nb"),
        ("\x04", [None], ""),
        ("a\x04\r\x04", ["a", None], ""),
        ("é\t🙂\x07\x00", [], "é\t🙂"),
    ],
)
def test_keys_make_lines(keys, lines, begun):
    ahead = TypedAhead()
    ahead.add(keys)
    assert (list(ahead.lines), ahead.begun) == (lines, begun)
    ahead.clear()
    assert (list(ahead.lines), ahead.begun) == ([], "")


def test_a_line_may_come_in_parts():
    ahead = TypedAhead()
    for keys in ("on", "e\rt", "wo", "\x7f\r"):
        ahead.add(keys)
    assert (list(ahead.lines), ahead.begun) == (["one", "tw"], "")
