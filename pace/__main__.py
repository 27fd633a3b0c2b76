"""The process of the command `pace`, which is also `python -m pace`."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from pace.cli import EXIT_BROKEN_PIPE, main


def run() -> NoReturn:
    """Runs the command line of this process and ends it, as Python does: threads are waited for, exit handlers run.

    Only the modules are not taken apart, which takes 0.5 s with torch."""
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
