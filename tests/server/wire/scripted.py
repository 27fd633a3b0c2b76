"""Answers by script, and a server that gives real clients what a form makes of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from pace.server.answers import Finish, Piece, Usage
from pace.server.errors import ApiError
from pace.server.wire.form import WireForm, dumps

PROMPT, CACHED = 11, 4
SLICE = 5
"""Bytes that the server writes at a time: events, lines and characters are cut."""

Answer = Callable[[str, dict[str, Any]], tuple[int, bytes]]
"""(path, body) -> status and the bytes of the answer: events where they are no JSON object."""


def cut(text: str, places: list[int], finish: Finish) -> list[Piece]:
    """The text in pieces, of which the last one has the finish, and maybe nothing else."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    pieces = [Piece(0, text[start:end]) for start, end in zip(edges, edges[1:])]
    pieces[-1].finish = finish
    return pieces


def whole(pieces: list[Piece]) -> Piece:
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(0, "".join(piece.text for piece in pieces), tokens, pieces[-1].finish)


def usage(num_pieces: int) -> Usage:
    return Usage(PROMPT, num_pieces, CACHED)


def stream(form: WireForm, pieces: list[Piece], error: ApiError | None = None) -> bytes:
    """All bytes of a stream, with the error at its end where there is one."""
    data = form.begin(Usage(PROMPT, 0, 0))
    for count, piece in enumerate(pieces, 1):
        data += form.piece(piece, usage(count))
    return data + (form.end(usage(len(pieces))) if error is None else form.error(error))


def answer(form: WireForm, pieces: list[Piece], is_stream: bool, error: ApiError | None = None) -> bytes:
    return stream(form, pieces, error) if is_stream else dumps(form.whole([whole(pieces)], usage(len(pieces))))


def events(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The name and the object of each event. Lines end wherever Python's `splitlines` says."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, value = event.splitlines()
        assert name.startswith("event: ") and value.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(value.removeprefix("data: "))))
    assert data.endswith(b"\n\n")
    return found


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """The address of a server on loopback. An ApiError of `answer` becomes its status, in OpenAI's form."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            try:
                status, data = answer(self.path, body)
            except ApiError as error:
                status, data = error.status, dumps(error.openai())
            self.send_response(status)
            kind = "application/json" if data.startswith(b"{") else "text/event-stream; charset=utf-8"
            self.send_header("Content-Type", kind)
            self.end_headers()
            for start in range(0, len(data), SLICE):
                self.wfile.write(data[start : start + SLICE])

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
