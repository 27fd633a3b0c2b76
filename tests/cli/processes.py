"""The command `pace` in a process of its own, with pipes or at a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pace

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(pace.__file__).parents[1])}


def process(*arguments: str, **more) -> subprocess.Popen:
    more = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "env": ENVIRONMENT,
        **more,
    }
    return subprocess.Popen([sys.executable, "-m", "pace", *arguments], **more)


class TerminalProcess:
    """`pace` at a terminal that is its own, so that a typed Ctrl-C is a signal."""

    def __init__(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "200", **(environment or {})}
            os.execve(sys.executable, [sys.executable, "-m", "pace", *arguments], environment)
        self.code: int | None = None
        self.seen = ""
        """All that was written so far."""
        self._position = 0

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def paste(self, text: str) -> None:
        """As a terminal does that knows bracketed paste."""
        self.type(f"\x1b[200~{text}\x1b[201~".replace("\n", "\r"))

    def read_until(self, *texts: str) -> str:
        """Reads until all of `texts` have come, one behind the other and behind those of the call before. Returns what
        was written from there on. Fails where they do not come within a minute."""
        begin, deadline = self._position, time.monotonic() + 60
        for text in texts:
            while (found := self.seen.find(text, self._position)) < 0:
                is_ready = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))[0]
                assert is_ready and self._read(), f"waited for {text!r} after {self.seen[begin:]!r}"
            self._position = found + len(text)
        return self.seen[begin : self._position]

    def shows_keys(self) -> bool:
        """Whether the terminal echoes."""
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    def wait(self) -> int:
        """Reads to the end; the exit code."""
        while self._read():
            pass
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def __enter__(self) -> TerminalProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.terminal)

    def _read(self) -> bool:
        try:
            data = os.read(self.terminal, 4096)
        except OSError:  # the process has closed its side
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
