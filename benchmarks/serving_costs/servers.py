"""Servers in separate processes: `pace serve`, vLLM's, llama.cpp's, and llama-cpp-python's."""

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

from benchmarks.comparison.runtimes import vllm_runtime

ROOT = Path(__file__).resolve().parents[2]
INPUT = 16
"""Words of a prompt."""
START_SECONDS = 900
"""vLLM compiles the model before it answers."""


class Server:
    """A process that answers at `url`. It leads a process group, in which its own processes are."""

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

    def freeze(self) -> None:
        """Stops all its threads: those of OpenMP may spin while they wait."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        self.thaw()
        self.process.terminate()
        self.process.communicate(timeout=60)


class PaceServer(Server):
    """`pace serve` with a monitor of its event loop."""

    def __init__(self, arguments: list[str]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.serving_costs.watched", "serve", *arguments, "--port", str(port)]
        begin = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
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


class PeerServer(Server):
    """A server of another project. Its output goes to a log."""

    def __init__(self, command: list[str], health: str, log: Path, environment: dict[str, str]) -> None:
        """`command` lacks the port. `health`: a path that the server answers once it is ready."""
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdout=output,
                stderr=output,
                text=True,
                env=kept | environment,
                start_new_session=True,
            )
        _wait_for_answer(self, health, pause=0.2)


class VllmServer(PeerServer):
    """vLLM's server with a checkpoint of safetensors."""

    def __init__(self, python: str, checkpoint: Path, dtype: str, threads: int, slots: int, length: int, log: Path):
        """`slots`: sequences that run at once, each of up to `length` tokens."""
        cpus = sorted(os.sched_getaffinity(0))[:threads]
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint), "--dtype", dtype]
        command += ["--host", "127.0.0.1", "--max-num-seqs", str(slots), "--max-model-len", str(length)]
        bound = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus))}  # by default it leaves a CPU to others
        super().__init__(command, "/health", log, vllm_runtime.ENVIRONMENT | bound)


class LlamaCppServer(PeerServer):
    """llama.cpp's `llama-server` with a GGUF file. `slots` and `length` are those of VllmServer."""

    def __init__(self, program: str, gguf: Path, threads: int, slots: int, length: int, log: Path) -> None:
        command = [program, "--model", str(gguf), "--threads", str(threads), "--threads-batch", str(threads)]
        command += ["--host", "127.0.0.1", "--parallel", str(slots), "--ctx-size", str(slots * length)]
        super().__init__([*command, "--flash-attn", "on"], "/health", log, {})


class LlamaServer(PeerServer):
    """`python -m llama_cpp.server`, which answers one request at a time."""

    def __init__(self, python: str, gguf: Path, threads: int) -> None:
        command = [python, "-m", "llama_cpp.server", "--model", str(gguf), "--n_ctx", "2048"]
        command += ["--n_threads", str(threads), "--n_threads_batch", str(threads)]
        command += ["--interrupt_requests", "false"]  # otherwise a request ends the previous one
        super().__init__(command, "/v1/models", Path(os.devnull), {})


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _wait_for_answer(server: Server, path: str, pause: float = 0.005) -> None:
    """Asks every `pause` seconds. Raises RuntimeError if the process ends or does not answer within START_SECONDS."""
    end = time.monotonic() + START_SECONDS
    while server.process.poll() is None and time.monotonic() < end:
        try:
            server.get(path)
            return
        except (URLError, ConnectionError):
            time.sleep(pause)
    if server.process.poll() is None:
        os.killpg(server.process.pid, signal.SIGKILL)
    raise RuntimeError(f"no answer of {' '.join(server.process.args[:3])} at {path}")
