"""Entry point of the command `pace` and of `python -m pace`."""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

from pace.cli import EXIT_BROKEN_PIPE, main


def run() -> NoReturn:
    """Runs the command line and ends the process the way Python does: waits for threads and runs exit handlers.

    Skips only the teardown of modules, which takes 0.5 s with torch."""
    _replace_closed_streams()
    code = main()
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
