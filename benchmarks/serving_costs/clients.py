"""Clients of `generate` in a separate process, and of a server."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from benchmarks.serving_costs.servers import INPUT, ROOT, PaceServer, Server
from pace.bench.serving.workload import Load

PROMPT = "Once upon a time there was a"

WORKER = """
import json, sys, time
from pace.llm import LLMModel, SamplingConfig
path, tokenizer, quantization, prompts, generated = json.loads(sys.argv[1])
model = LLMModel(path, tokenizer, quantization=quantization, progress=False)
config = SamplingConfig(max_new_tokens=generated, ignore_eos=True)
for line in sys.stdin:
    asked = prompts[:int(line)]
    begin = time.perf_counter()
    output = model.generate(asked, config)
    seconds = time.perf_counter() - begin
    print(json.dumps([len(asked) * generated / seconds, output.metrics.seconds_to_first_token]), flush=True)
"""
"""Answers each line, a number of prompts, with tokens per second and the seconds to the first token."""


class Generate:
    """`generate` in a process that keeps its model. A call takes a number of prompts, and returns tokens per second and
    the seconds to the first token. All prompts except the first are those of a load."""

    def __init__(self, model: str, tokenizer: str | None, quantization: str | None, streams: int, generated: int):
        prompts = [json.loads(body)["prompt"] for body in Load(streams, INPUT).bodies("")]
        arguments = json.dumps([model, tokenizer, quantization, [PROMPT, *prompts[1:]], generated])
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, arguments], stdin=pipe, stdout=pipe, text=True, cwd=ROOT
        )

    def __call__(self, number: int) -> list[float]:
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.terminate()


def send(server: Server, connection: Any, body: dict[str, Any]) -> None:
    """Sends a request to complete a prompt, on an open connection."""
    data = json.dumps(body).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json"]
    lines.append(f"Content-Length: {len(data)}")
    connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


def seconds_to_first_token(server: Server) -> float:
    """Returns the time to first token of a client with an open connection."""
    with server.connect() as connection:
        begin = time.perf_counter()
        send(server, connection, {"prompt": PROMPT, "max_tokens": 8, "stream": True, "temperature": 0})
        connection.recv(4096)
        return time.perf_counter() - begin


def seconds_to_let_go(server: Server) -> float:
    """Returns the seconds from closing a connection with a running answer until the engine has no sequence."""
    with server.connect() as connection:
        send(server, connection, {"prompt": PROMPT, "max_tokens": 900, "ignore_eos": True, "stream": True})
        connection.recv(4096)
    begin = time.perf_counter()
    while b"pace:num_requests_running 0.0" not in server.get("/metrics"):
        pass
    return time.perf_counter() - begin


def bytes_of_a_connection(server: Server, count: int = 500) -> float:
    """Returns the memory per client that has sent a request and keeps its connection open."""
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
def times_of(ask: Any, pause: float) -> Iterator[list[float]]:
    """Calls `ask()` repeatedly within the block; yields a list of the seconds that it took, or returned."""
    times: list[float] = []
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(pause):
            begin = time.perf_counter()
            found = ask()
            times.append(found if isinstance(found, float) else time.perf_counter() - begin)

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield times
    finally:
        done.set()
        thread.join()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def stream_at_once(server: Server, clients: int, generated: int, word: str) -> tuple[float, float]:
    """Returns the tokens per second of `clients` concurrent clients, and the median of their times to first token.
    Prompts begin with `word`, so that no cache holds them."""

    def ask(index: int) -> float:
        body = {"prompt": f"{word} {index}: {PROMPT}", "max_tokens": generated, "stream": True, "temperature": 0}
        body |= {"ignore_eos": True} if isinstance(server, PaceServer) else {}
        with server.post("/v1/completions", body) as answer:
            answer.readline()
            first = time.perf_counter() - begin
            reason = json.loads([line for line in answer if line.startswith(b"data: {")][-1][6:])["choices"][0]
        if reason["finish_reason"] != "length":
            raise RuntimeError(f"an answer ended before {generated} tokens: {reason}")
        return first

    begin = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        first = list(pool.map(ask, range(clients)))
    return clients * generated / (time.perf_counter() - begin), statistics.median(first)
