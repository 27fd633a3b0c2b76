"""Sources of messages: a terminal with line editing, history and pastes, or a pipe."""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import NamedTuple

from pace.cli.chat.ahead import TypedAhead
from pace.cli.chat.history import History

QUOTES = '"""'
"""Delimiter of a text of several lines."""
COMMAND = re.compile(r"/(\w+|\?)(\s|$)")
"""Matches the beginning of a command, but not a path or comment."""
LOADING = "loading..."
LOCAL_FLAGS, CONTROL_CHARACTERS = 3, 6
"""Indices into the result of `termios.tcgetattr`."""
MARK_PASTES, LEAVE_PASTES = "\x1b[?2004h", "\x1b[?2004l"
"""Sequences that switch a terminal's bracketed paste on and off, as readline does while it reads a line."""
TICK_SECONDS = 0.1
"""Interval of the timer that makes Ctrl-C take effect between the prompt and readline's wait for keys. Without it,
Ctrl-C would wait for the next key."""


class Said(NamedTuple):
    """A message or command of the user."""

    text: str
    is_command: bool


class Pipe:
    """Reads messages from the lines of a file or pipe."""

    is_interactive = False

    def line(self, prompt: str) -> str:
        """Returns the next line without its newline. Raises EOFError at the end."""
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    def remember(self, text: str) -> None:
        pass

    def loading(self, name: str) -> AbstractContextManager:
        return nullcontext()

    def answering(self) -> AbstractContextManager:
        return nullcontext()

    def __enter__(self) -> Pipe:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


class Terminal:
    """Reads lines that a user types; with the readline module, they can be edited, recalled and pasted.

    A context manager: it restores the terminal at the end of the `with` block.
    """

    is_interactive = True

    def __init__(self, keep_history: bool = True) -> None:
        """`keep_history`: load the lines of earlier runs and save those of this one."""
        self._history = History.of_user() if keep_history else None
        self._ahead = TypedAhead()

    def __enter__(self) -> Terminal:
        self._settings = termios.tcgetattr(sys.stdin)
        # The timer's signal lets Python handle pending ones.
        self._before = signal.signal(signal.SIGALRM, lambda number, frame: None)
        try:
            import readline
        except ImportError:
            self._readline = None
            return self
        self._readline = readline
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)
        for text in self._history.read() if self._history else ():
            readline.add_history(text)
        return self

    def __exit__(self, *exception: object) -> None:
        self._set(termios.TCSADRAIN, self._settings)
        signal.signal(signal.SIGALRM, self._before)

    def line(self, prompt: str) -> str:
        """Returns the next line, or a paste of several. Lines typed during an answer come first.
        Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        if self._ahead.lines:
            line = self._ahead.lines.popleft()
            print(prompt + (line or ""), file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
            if line is None:
                raise EOFError
            return line
        begun, self._ahead.begun = self._ahead.begun, ""
        if self._readline is None:
            return begun + self._read_line(prompt + begun)
        self._readline.set_startup_hook((lambda: self._readline.insert_text(begun)) if begun else None)
        return self._read_line(prompt)

    def _read_line(self, prompt: str) -> str:
        signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
        try:
            if not sys.stdout.isatty():  # then stdout holds only answers
                print(prompt, end="", file=sys.stderr, flush=True)
                prompt = ""
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def remember(self, text: str) -> None:
        """Adds a text to the history, which the up arrow recalls here and in later runs."""
        if self._readline is None or not text.strip():
            return
        self._readline.add_history(text)
        if self._history:
            self._history.add(text)

    @contextmanager
    def loading(self, name: str) -> Iterator[None]:
        """Prints that the model is being loaded, then its name."""
        print(LOADING, end="\r", file=sys.stderr, flush=True)  # later output overwrites this line
        try:
            yield
        finally:
            print(" " * len(LOADING), end="\r", file=sys.stderr, flush=True)
        print(f"{name}: /help for the commands", file=sys.stderr)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Hides keys pressed while an answer is written and keeps them for `line`; Ctrl-C discards them."""
        silent = [*self._settings]
        silent[LOCAL_FLAGS] &= ~(termios.ECHO | termios.ECHONL | termios.ICANON)
        silent[CONTROL_CHARACTERS] = [*silent[CONTROL_CHARACTERS]]
        silent[CONTROL_CHARACTERS][termios.VMIN], silent[CONTROL_CHARACTERS][termios.VTIME] = 1, 0
        is_whole = False
        try:
            self._set(termios.TCSADRAIN, silent)
            self._mark_pastes(MARK_PASTES)
            yield
            is_whole = True
        finally:
            self._mark_pastes(LEAVE_PASTES)
            if is_whole:
                self._ahead.add(_pending_keys())
            else:
                self._ahead.clear()
            self._set(termios.TCSADRAIN if is_whole else termios.TCSAFLUSH, self._settings)

    def _mark_pastes(self, how: str) -> None:
        if self._readline is not None and sys.stderr.isatty():
            print(how, end="", file=sys.stderr, flush=True)

    def _set(self, when: int, settings: list) -> None:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(sys.stdin, when, settings)


def _pending_keys() -> str:
    """Keys that were typed and not yet read."""
    keys, number = b"", sys.stdin.fileno()
    with suppress(OSError):  # the terminal may be gone
        while select.select([number], [], [], 0)[0] and (more := os.read(number, 4096)):
            keys += more
    return keys.decode(errors="ignore")


def read_said(source: Terminal | Pipe) -> Said:
    """Returns the next line that is not blank, or the text between triple quotes. A paste is taken whole, even if it
    begins with a command or with quotes that it does not close. Raises EOFError at the end of the input, ValueError
    if the input ends before the closing quotes."""
    while not (text := source.line("> ")).strip():
        pass
    is_paste = "\n" in text
    if not text.startswith(QUOTES) or (is_paste and not text.rstrip().endswith(QUOTES)):
        source.remember(text)
        return Said(text.strip(), COMMAND.match(text) is not None)
    text = text.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES):
        try:
            text += "\n" + source.line("... ")
        except EOFError:
            raise ValueError(f"the input ends without the closing {QUOTES}") from None
    source.remember(QUOTES + text)
    return Said(text.rstrip().removesuffix(QUOTES).strip(), is_command=False)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is closed, end the block like `sys.exit`: what it holds is still saved.
    Ignored signals stay ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def once() -> Iterator[None]:
    """Shows each warning of the library only once within the block, not with every answer."""
    seen = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return message not in seen and not seen.add(message)

    logger = logging.getLogger("pace")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)
