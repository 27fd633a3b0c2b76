"""What HTTP costs: `pace serve` beside `generate` of the same engine, and what the server does under a load.

    python benchmarks/serving.py [MODEL] [--tokenizer PATH] [--into benchmarks/RESULTS.md]

`generate` and the server are two processes, which keep their model and take turns. The load comes from a third, on the
same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from pace.assets import TINY  # noqa: E402

SCRIPT = "benchmarks/serving.py"
PROMPT = "Once upon a time there was a"
INPUT = 16
"""Words of a prompt."""

WORKER = """
import json, sys, time
from pace.llm import LLMModel, SamplingConfig
path, tokenizer, streams, generated = json.loads(sys.argv[1])
model = LLMModel(path, tokenizer, progress=False)
prompts = ["Once upon a time there was a"] + [f"{number} " + "and so on " * 5 for number in range(1, streams)]
config = SamplingConfig(max_new_tokens=generated, ignore_eos=True)
for line in sys.stdin:
    asked = prompts[:int(line)]
    begin = time.perf_counter()
    output = model.generate(asked, config)
    seconds = time.perf_counter() - begin
    print(json.dumps([len(asked) * generated / seconds, output.metrics.seconds_to_first_token]), flush=True)
"""
"""Answers each line, a number of prompts, with tokens a second and the seconds to the first one."""


class Server:
    """`pace serve` in a process of its own."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "pace", "serve", *arguments, "--port", "0"]
        self.begin = time.perf_counter()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        self.url = self._wait_for("serving .* at (http://[^ ,]+)")
        self.seconds_to_port = time.perf_counter() - self.begin
        self._wait_for("ready at")

    def _wait_for(self, pattern: str) -> str:
        for line in self.process.stderr:
            if found := re.search(pattern, line):
                return found[found.lastindex or 0]
        raise RuntimeError("the server ended before it was ready")

    def get(self, path: str) -> bytes:
        with urlopen(self.url + path, timeout=30) as answer:
            return answer.read()

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return socket.create_connection((host, int(port)), 30)

    @property
    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def load(self, streams: int, generated: int, *more: str) -> dict[str, Any]:
        """What `pace bench --serve` measured."""
        command = [sys.executable, "-m", "pace", "bench", "--serve", self.url, "--input-len", str(INPUT)]
        command += ["--output-len", str(generated), "--num-prompts", str(streams), "--ignore-eos", *more]
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return json.loads(output.splitlines()[-1])


def post(server: Server, connection: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines.append(f"Content-Length: {len(data)}")
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


def seconds_to_first_token(server: Server) -> float:
    """Of one client, on a connection that is open."""
    with server.connect() as connection:
        begin = time.perf_counter()
        post(server, connection, {"prompt": PROMPT, "max_tokens": 8, "stream": True, "temperature": 0})
        connection.recv(4096)
        return time.perf_counter() - begin


def seconds_to_let_go(server: Server) -> float:
    """From the close of a connection whose answer is under way until the engine has no sequence."""
    with server.connect() as connection:
        post(server, connection, {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True})
        connection.recv(4096)
    begin = time.perf_counter()
    while b"pace:num_requests_running 0.0" not in server.get("/metrics"):
        pass
    return time.perf_counter() - begin


def bytes_of_a_connection(server: Server, count: int = 500) -> float:
    """Of one that has asked once and keeps its connection."""
    before, connections = server.resident_bytes, []
    for _ in range(count):
        connections.append(server.connect())
        connections[-1].sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        connections[-1].recv(4096)
    grown = server.resident_bytes - before
    for connection in connections:
        connection.close()
    return grown / count


@contextmanager
def health_times(server: Server) -> Iterator[list[float]]:
    """Seconds that `/health` took, asked again and again within the block."""
    times: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.wait(0.02):
            begin = time.perf_counter()
            server.get("/health")
            times.append(time.perf_counter() - begin)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield times
    finally:
        done.set()
        thread.join()


def measure(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(what, value) of every figure."""
    streams, generated = options.streams, options.generate
    tokenizer = ["--tokenizer", options.tokenizer] if options.tokenizer else []
    server = Server([options.model, *tokenizer, "--max-wait", "1.5"])
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps([options.model, options.tokenizer, streams, generated])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )

    def generate(number: int) -> list[float]:
        worker.stdin.write(f"{number}\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    try:
        both: dict[int, list[tuple[float, float]]] = {1: [], 8: [], streams: []}
        first: list[float] = []
        for round in range(options.rounds + 1):  # the first one warms up
            for number, pairs in both.items():
                rate, seconds = generate(number)
                load = server.load(max(number, 4), generated, "--max-concurrency", str(number))
                if round:
                    pairs.append((rate, load["output_throughput"]))
                    first += [1e3 * (seconds_to_first_token(server) - seconds)] if number == 1 else []
        rows = [
            (
                f"tokens a second, {number} streams: `generate`, `pace serve`, ratio",
                f"{statistics.median(a for a, _ in pairs):,.0f}, {statistics.median(b for _, b in pairs):,.0f}, "
                f"**{statistics.median(b / a for a, b in pairs):.2f}**",
            )
            for number, pairs in both.items()
        ]
        rows.append(("first token, one client, beyond `generate`'s", f"{statistics.median(first):.1f} ms"))
        with health_times(server) as health:
            server.load(8 * streams, generated, "--max-concurrency", str(streams))
        health.sort()
        rows.append(
            (f"`/health` under {streams} streams, 99th percentile", f"{1e3 * health[int(0.99 * len(health))]:.1f} ms")
        )
        cancels = [seconds_to_let_go(server) for _ in range(10)]
        rows.append(("a client leaves: until its blocks are free", f"{1e3 * statistics.median(cancels):.1f} ms"))
        rows.append(("memory of an idle connection", f"{bytes_of_a_connection(server) / 1024:.0f} KiB"))
        rows += overload(server, streams, generated)
        rows.append(("start to an open port", f"{server.seconds_to_port:.1f} s"))
    finally:
        worker.terminate()
        server.process.terminate()
        server.process.communicate(timeout=60)
    return rows


def overload(server: Server, streams: int, generated: int) -> list[tuple[str, str]]:
    """Requests answered in time, at the rate that the server can do and at three times that."""
    rate = server.load(3 * streams, generated, "--max-concurrency", str(streams))["request_throughput"]
    good = {}
    for times in (1, 3):
        number = max(3 * streams, int(8 * rate * times))
        goals = ["--goodput", "ttft:2000", "tpot:100"]
        load = server.load(number, generated, "--request-rate", f"{rate * times:.2f}", *goals)
        good[times] = load["request_goodput"]
    return [
        (
            "requests a second with the first token in 2 s, then 100 ms each: at full load, at three times that",
            f"{good[1]:.1f}, {good[3]:.1f} (**{good[3] / max(good[1], 1e-9):.2f}**)",
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY), help="default: the bundled model")
    parser.add_argument("--tokenizer", help="where the model has none")
    parser.add_argument("--streams", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--generate", type=int, default=200, metavar="N", help="tokens of an answer (default: 200)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="medians are over so many (default: 5)")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    rows = measure(options)
    lines = [
        f"`{page.command(SCRIPT)}`: {Path(options.model).name}, {options.generate} tokens an answer, "
        f"{options.rounds} rounds.\n",
        "| what | |",
        "|---|---|",
        *(f"| {what} | {value} |" for what, value in rows),
    ]
    page.publish(options.into, SCRIPT, "\n".join(lines) + "\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
