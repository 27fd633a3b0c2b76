"""The command `pace` in a separate process, with pipes or at a terminal."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any
from unittest import mock

import pace
from tests.waiting import PATIENCE

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(pace.__file__).parents[1])}


def process(*arguments: str, **more) -> subprocess.Popen:
    more = {
        "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True,
        "env": ENVIRONMENT, **more,
    }  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", "pace", *arguments], **more)


@functools.cache
def _ready_to_fork() -> multiprocessing.context.ForkServerContext:
    """Fork server that has imported the modules of every command with a model, but run nothing from them. The imports
    take seconds of processor time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pace.llm.loading.load", "pace.llm.generator", "transformers.models.auto", __name__]
    )
    with mock.patch.dict(os.environ, ENVIRONMENT):
        multiprocessing.forkserver.ensure_running()
    return context


def _run_at_terminal(terminal: str, *command: Any) -> None:
    """Runs the command in this process, with `terminal` as its standard streams and controlling terminal."""
    os.login_tty(os.open(terminal, os.O_RDWR | os.O_NOCTTY))
    _run(*command)


def _run_with_streams(streams: list[Connection], *command: Any) -> None:
    """Runs the command in this process, with these standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    _run(*command)


def _run(arguments: tuple[str, ...], environment: dict[str, str], package: str, hurry: Event | None) -> None:
    """Until `hurry` is set, steps of the engine take at least 50 ms: the test acts before an answer is over."""
    assert pace.__file__ == package
    if hurry is not None:
        from pace.llm.engine.engine import Engine

        step = Engine.step
        Engine.step = lambda engine: (hurry.wait(0.05), step(engine))[1]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["pace", *arguments]
    from pace.cli import main

    try:
        sys.exit(main())
    finally:
        atexit._run_exitfuncs()  # an ending interpreter runs these, but a forked process does not


class PipedProcess:
    """Like `process`, but forked from a process that has imported the libraries.

    `streams` replaces some of stdin (empty by default), stdout and stderr (pipes by default). Steps of a `slow` one
    take at least 50 ms."""

    def __init__(
        self, *arguments: str, environment: dict[str, str] | None = None, slow: bool = False, **streams: int
    ) -> None:
        self.args = arguments
        self._hurry = _ready_to_fork().Event() if slow else None
        with open(os.devnull) as nothing:
            streams = {"stdin": nothing.fileno(), **streams}
            pipes = {name: Pipe(duplex=False) for name in ("stdout", "stderr") if name not in streams}
            given = [
                pipes[name][1] if name in pipes else Connection(os.dup(streams[name]))
                for name in ("stdin", "stdout", "stderr")
            ]
            self._forked = _ready_to_fork().Process(
                target=_run_with_streams,
                args=(given, arguments, {**ENVIRONMENT, **(environment or {})}, pace.__file__, self._hurry),
            )
            self._forked.start()
            for end in given:
                end.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(pipes[name][0].fileno()), encoding="utf-8") if name in pipes else None
            for name in ("stdout", "stderr")
        )

    def send_signal(self, number: int) -> None:
        os.kill(self._forked.pid, number)

    def kill(self) -> None:
        self._forked.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Like `Popen.communicate`, if the unread output fits in the pipes, 64 KiB."""
        self._forked.join(timeout)
        if self._forked.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return tuple("" if stream is None or stream.closed else stream.read() for stream in (self.stdout, self.stderr))

    @property
    def returncode(self) -> int | None:
        return self._forked.exitcode


class TerminalProcess:
    """`pace` at its own controlling terminal, so that a typed Ctrl-C is a signal.

    Unless it is `whole`, it is forked from a process that has imported the libraries. Steps of a `slow` one take at
    least 50 ms, until `hurry` is called."""

    def __init__(
        self,
        *arguments: str,
        environment: dict[str, str] | None = None,
        whole: bool = False,
        slow: bool = False,
    ) -> None:
        environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "200", **(environment or {})}
        self._forked: multiprocessing.process.BaseProcess | None = None
        self._other_side: int | None = None
        """Our descriptor of the process's side, open until the process has opened it: else reads would find the end."""
        if whole:
            self.pid, self.terminal = pty.fork()
            if not self.pid:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.execve(sys.executable, [sys.executable, "-m", "pace", *arguments], environment)
        else:
            self.terminal, self._other_side = pty.openpty()
            name = os.ttyname(self._other_side)
            self._hurry = _ready_to_fork().Event() if slow else None
            self._forked = _ready_to_fork().Process(
                target=_run_at_terminal, args=(name, arguments, environment, pace.__file__, self._hurry)
            )
            self._forked.start()
            self.pid = self._forked.pid
        self.code: int | None = None
        self.seen = ""
        """All output so far."""
        self._position = 0

    def hurry(self) -> None:
        self._hurry.set()

    def type(self, keys: str) -> None:
        os.write(self.terminal, keys.encode())

    def paste(self, text: str) -> None:
        """Pastes text as a terminal with bracketed paste does."""
        self.type(f"\x1b[200~{text}\x1b[201~".replace("\n", "\r"))

    def read_until(self, *texts: str) -> str:
        """Reads until all of `texts` have come, in this order, after those of the previous call.

        Returns the output since that call. Fails if the texts do not come in time."""
        begin, deadline = self._position, time.monotonic() + PATIENCE
        for text in texts:
            while (found := self.seen.find(text, self._position)) < 0:
                is_ready = select.select([self.terminal], [], [], max(0, deadline - time.monotonic()))[0]
                assert is_ready and self._read(), f"waited for {text!r} after {self.seen[begin:]!r}"
            self._position = found + len(text)
        return self.seen[begin : self._position]

    def shows_keys(self) -> bool:
        """True if the terminal echoes."""
        return bool(termios.tcgetattr(self.terminal)[3] & termios.ECHO)

    def wait(self) -> int:
        """Reads to the end and returns the exit code."""
        while self._read():
            pass
        if self.code is None:
            self._reap()
        return self.code

    def __enter__(self) -> TerminalProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()
        self._close_other_side()
        os.close(self.terminal)

    def _close_other_side(self) -> None:
        if self._other_side is not None:
            os.close(self._other_side)
            self._other_side = None

    def _reap(self) -> None:
        if self._forked is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            self._forked.join()
            self.code = self._forked.exitcode

    def _read(self) -> bool:
        try:
            data = os.read(self.terminal, 4096)
        except OSError:  # the process has closed its side
            return False
        self._close_other_side()
        self.seen += data.decode(errors="replace")
        return bool(data)
