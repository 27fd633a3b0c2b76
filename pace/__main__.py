"""Entry point of the command `pace` and of `python -m pace`."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from pace.cli import EXIT_BROKEN_PIPE, main


def run() -> NoReturn:
    """Runs the command line and ends the process the way Python does: waits for threads and runs exit handlers.

    Skips only the teardown of modules, which takes 0.5 s with torch."""
    code = main()
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = EXIT_BROKEN_PIPE
    os._exit(code)


if __name__ == "__main__":
    run()
