"""Entry point of the command `pace` and of `python -m pace`."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

EXIT_INTERRUPTED = 128 + signal.SIGINT


def _end_at_ctrl_c(is_wanted: bool) -> None:
    """Lets Ctrl-C end the process at once and silently, or raise KeyboardInterrupt again. A process that ignores Ctrl-C
    continues to ignore it."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        end = lambda number, frame: os._exit(EXIT_INTERRUPTED)
        signal.signal(signal.SIGINT, end if is_wanted else signal.default_int_handler)


def run() -> NoReturn:
    """Runs the command line and ends the process the way Python does: waits for threads and runs exit handlers.

    Skips only the teardown of modules, which takes 0.5 s with torch."""
    _end_at_ctrl_c(True)
    from pace.cli import EXIT_BROKEN_PIPE, main

    _replace_closed_streams()
    try:
        _end_at_ctrl_c(False)
        code = main()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    _end_at_ctrl_c(True)
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = EXIT_BROKEN_PIPE
    except OSError as error:  # a full disk, for example
        code = 1
        with contextlib.suppress(OSError):
            print(f"pace: error: the output could not be written: {error}", file=sys.stderr, flush=True)
    os._exit(code)


def _replace_closed_streams() -> None:
    """Python has None for a standard stream that was closed by the caller (`>&-`). The null device stands in for it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


if __name__ == "__main__":
    run()
