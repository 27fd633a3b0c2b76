"""Every environment variable that pace reads, and a check for a person watching stderr. No other Python file reads the
environment; `pace env` prints the table."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pace.memory import parse_bytes

MAX_THREADS = 4096
"""Limit of `ThreadPool` (csrc/include/pace/threading.h)."""


@dataclass(frozen=True)
class Variable:
    """One environment variable."""

    name: str
    default: str
    """Description of the behaviour if the variable is not set."""
    meaning: str
    is_secret: bool = False
    """True if the value must not be shown."""

    @property
    def shown(self) -> str | None:
        """The value as it may be printed; None if the variable is not set."""
        text = value(self.name)
        return "set, and not shown" if text and self.is_secret else text


VARIABLES = (
    Variable("PACE_ISA", "the best that the CPU has",
             "the instruction set of the kernels, by its name in `pace env`; read by the C++ extension"),
    Variable("PACE_NUM_THREADS", "the physical cores within the affinity mask and the cgroup quota",
             "threads of the kernels if a program does not set num_threads="),
    Variable("PACE_PIN_THREADS", "0",
             "1 gives each of these threads a CPU of its own, if a program does not set pin_threads="),
    Variable("PACE_API_KEY", "none", "keys that clients of `pace serve` need, separated by commas", is_secret=True),
    Variable("XDG_STATE_HOME", "~/.local/state", "the directory where `pace chat` keeps inputs, in pace/chat_history"),
    Variable("PACE_CACHE", "pace below XDG_CACHE_HOME, or ~/.cache/pace",
             "the folder of packed copies of weights (`pace cache`)"),
    Variable("PACE_CACHE_SIZE", "20GiB", "the maximum size of these copies together; 0 for none"),
    Variable("XDG_CACHE_HOME", "~/.cache", "the directory of PACE_CACHE, if that is not set"),
    Variable("OPENAI_API_KEY", "none", "the key that `pace bench --serve` sends", is_secret=True),
)  # fmt: skip


def value(name: str) -> str | None:
    """The text of a variable of the table; None if it is not set or empty. Raises KeyError for a name that is not in
    the table."""
    if name not in {variable.name for variable in VARIABLES}:
        raise KeyError(f"{name} is not in pace.env.VARIABLES; every variable that pace reads has a line there")
    return os.environ.get(name) or None


def num_threads() -> int | None:
    """PACE_NUM_THREADS as a number; None if it is not set. Raises ValueError unless it is a whole number in
    1..`MAX_THREADS`."""
    text = value("PACE_NUM_THREADS")
    if text is None:
        return None
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_THREADS:
        raise ValueError(f"PACE_NUM_THREADS must be a whole number in 1..{MAX_THREADS}; got {text!r}")
    return int(text)


def pin_threads() -> bool:
    """PACE_PIN_THREADS as a bool; False if it is not set. Raises ValueError unless it is 0 or 1."""
    text = value("PACE_PIN_THREADS") or "0"
    if text not in ("0", "1"):
        raise ValueError(f"PACE_PIN_THREADS must be 0 or 1; got {text!r}")
    return text == "1"


def state_directory() -> Path | None:
    """Directory of the user's state such as chat history: below XDG_STATE_HOME, if that is an absolute path. None for a
    user without a home directory."""
    return _user_directory("XDG_STATE_HOME", "~/.local/state")


def cache_directory() -> Path | None:
    """Directory of packed copies of weights. None for a user without a home directory, and if PACE_CACHE_SIZE is 0.
    Raises ValueError for a relative PACE_CACHE, and the errors of `cache_bytes`."""
    if not cache_bytes():
        return None
    if own := value("PACE_CACHE"):
        if not os.path.isabs(own):
            raise ValueError(f"PACE_CACHE must be an absolute path; got {own!r}")
        return Path(own)
    return _user_directory("XDG_CACHE_HOME", "~/.cache")


def cache_bytes() -> int:
    """PACE_CACHE_SIZE in bytes. Raises ValueError unless it is a size such as 4096 or "20GiB"."""
    text = value("PACE_CACHE_SIZE") or "20GiB"
    try:
        return parse_bytes(text) if text.strip("0") else 0
    except ValueError as error:
        raise ValueError(f"PACE_CACHE_SIZE: {error}") from None


def _user_directory(variable: str, default: str) -> Path | None:
    """`pace` below the path in a variable, if that is absolute, else below the default. None for a user without a home
    directory."""
    places = value(variable) or "", os.path.expanduser(default)
    return next((Path(place) / "pace" for place in places if os.path.isabs(place)), None)


def shows_bars() -> bool:
    """True if a person can see stderr: on a terminal, or in a notebook, which shows bars as text."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules
