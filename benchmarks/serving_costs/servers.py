"""Servers in separate processes: `pace serve`, and llama-cpp-python's."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

ROOT = Path(__file__).resolve().parents[2]
INPUT = 16
"""Words of a prompt."""
START_SECONDS = 120


class Server:
    """A process that answers at `url`."""

    url: str
    process: subprocess.Popen[str]

    def get(self, path: str) -> bytes:
        with urlopen(self.url + path, timeout=30) as answer:
            return answer.read()

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Sends a request and returns the answer, to be read piece by piece."""
        return urlopen(
            Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}), timeout=600
        )

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), 30)

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all its threads since it started."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # utime, stime

    def stop(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=60)


class PaceServer(Server):
    """`pace serve` with a monitor of its event loop."""

    def __init__(self, arguments: list[str]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.serving_costs.watched", "serve", *arguments, "--port", str(port)]
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        _wait_for_answer(self, "/live")
        self.seconds_to_live = time.perf_counter() - begin
        self._wait_for("ready at")
        self.seconds_to_ready = time.perf_counter() - begin

    def _wait_for(self, pattern: str) -> str:
        for line in self.process.stderr:
            if found := re.search(pattern, line):
                return found[found.lastindex or 0]
        raise RuntimeError("the server ended before it was ready")

    @contextmanager
    def lags(self) -> Iterator[list[float]]:
        """Yields a list that after the block holds the delay in seconds of each tick of its event loop."""
        lags: list[float] = []
        self.process.send_signal(signal.SIGUSR1)
        yield lags
        self.process.send_signal(signal.SIGUSR2)
        lags += json.loads(self._wait_for("lag: (.*)"))

    def load(self, streams: int, generated: int, *more: str) -> dict[str, Any]:
        """Runs `pace bench --serve` and returns its results."""
        command = [sys.executable, "-m", "pace", "bench", "--serve", self.url, "--json", "--input-len", str(INPUT)]
        command += ["--output-len", str(generated), "--num-prompts", str(streams), "--ignore-eos", *more]
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return json.loads(output)


class LlamaServer(Server):
    """`python -m llama_cpp.server` with pace's number of threads."""

    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--port", str(port)]
        command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", "2048"]
        command += ["--interrupt_requests", "false"]  # otherwise a request ends the previous one
        quiet = subprocess.DEVNULL
        self.process = subprocess.Popen(command, stdout=quiet, stderr=quiet, text=True)
        _wait_for_answer(self, "/v1/models")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _wait_for_answer(server: Server, path: str) -> None:
    """Raises RuntimeError if the process ends or does not answer within START_SECONDS."""
    end = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < end:
        try:
            server.get(path)
            return
        except (URLError, ConnectionError):
            time.sleep(0.005)
    server.process.kill()
    raise RuntimeError(f"no answer of {server.process.args[2]} at {path}")
