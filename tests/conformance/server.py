"""`pace serve` in a separate process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.conformance.environments import Unavailable

ROOT = Path(__file__).parents[2]
SECONDS_TO_START = 120


@contextmanager
def serving(log: Path, script: dict[str, str] | None = None, options: Sequence[str] = ()) -> Iterator[str]:
    """The URL of a ready server of the bundled model; its output goes to `log`.

    `script` has answers by text in the prompt, `options` are further options of `pace serve`. Raises Unavailable if the
    server does not start, or does not end with exit code 0."""
    port = _free_port()
    program = ["pace", "serve"] if script is None else ["tests.conformance.scripted_server", json.dumps(script)]
    with log.open("w") as output:
        command = [sys.executable, "-m", *program, "--port", str(port), *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", log)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        code = process.wait(60)
    if code:
        raise Unavailable(f"the server ended with exit code {code}", log.read_text()[-2000:])


def _wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + SECONDS_TO_START
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/ready").close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise Unavailable("the server did not start", log.read_text()[-2000:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
