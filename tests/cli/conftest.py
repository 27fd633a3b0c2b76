"""The command `pace`, called in this process."""

from __future__ import annotations

import io
import sys

import pytest

from pace.cli import main


@pytest.fixture
def command(capsys, monkeypatch):
    """`command(*arguments, stdin="") -> (exit code, stdout, stderr)`, in this process."""

    def run(*arguments: str, stdin: str | bytes = ""):
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        try:
            code = main(list(arguments))
        except SystemExit as stop:
            code = stop.code
        return (code, *capsys.readouterr())

    return run
