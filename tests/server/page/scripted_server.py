"""A server that gives the chat page scripted answers and records its requests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pace.server.page import page

MODEL = {"id": "scripted", "object": "model", "max_model_len": 1024}


@dataclass
class Answer:
    """One answer of the chat endpoint. A list of pieces is streamed; an error is a status and its object."""

    pieces: list[str] = field(default_factory=list)
    status: int = 200
    error: dict[str, Any] | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    """Seconds before each piece."""
    call: tuple[str, str] | None = None
    """The name and the arguments of a tool call. It follows the text, in pieces of three characters."""
    finish: str | None = "stop"
    """Finish reason; None closes the connection without one."""


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: deque[Answer] = deque()
        """The next answers; "Hello." if there is none."""
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        """The Authorization header of each request for an answer."""
        self.modalities = {"vision": False, "audio": False}
        """What the model takes, in `/props`."""
        self.client_gone = threading.Event()
        self.is_closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors: clients may disconnect at any time."""


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, page().headers, page().body)
        elif self.path == "/injected":
            self._send(200, page().headers, page().body + b"<script>window.wasRun = true</script>")
        elif self.path == "/v1/models":
            self._send_json(200, {"object": "list", "data": [MODEL]})
        elif self.path.startswith("/props"):
            self._send_json(200, {"modalities": self.server.modalities})
        else:
            self._send_json(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append(json.loads(body))
        self.server.keys.append(self.headers["Authorization"])
        answer = self.server.answers.popleft() if self.server.answers else Answer(["Hello."])
        if answer.status != 200:
            self._send_json(answer.status, {"error": answer.error}, answer.headers)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.end_headers()
        try:
            self._stream(answer)
        except OSError:
            self.server.client_gone.set()

    def _stream(self, answer: Answer) -> None:
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for piece in answer.pieces:
            self.server.is_closing.wait(answer.pause)
            self._event({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})
        for delta in _call(*answer.call) if answer.call else ():
            self.server.is_closing.wait(answer.pause)
            self._event({"choices": [{"index": 0, "delta": {"tool_calls": [delta]}, "finish_reason": None}]})
        if answer.error:
            self._event({"error": answer.error})
        elif answer.finish:
            self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": answer.finish}]})
            tokens = len(answer.pieces)
            self._event({"choices": [], "usage": {"completion_tokens": tokens, "total_tokens": 10 + tokens}})
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b": a comment\n\ndata: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _send_json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send(status, {"Content-Type": "application/json", **(headers or {})}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Logs nothing."""


def _call(name: str, arguments: str) -> Iterator[dict[str, Any]]:
    yield {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
    for start in range(0, len(arguments), 3):
        yield {"index": 0, "function": {"arguments": arguments[start : start + 3]}}


@contextlib.contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.is_closing.set()
            server.shutdown()
            thread.join()
