"""Scripted answers, and a server that sends them to real clients in a wire form."""

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
"""Bytes per write of the server, so few that events, lines and characters are cut."""

Answer = Callable[[str, dict[str, Any]], tuple[int, bytes]]
"""(path, body) -> status and the bytes of the answer: a JSON object, or else events."""


def cut(text: str, places: list[int], finish: Finish) -> list[Piece]:
    """Cuts the text into pieces. The last piece has the finish, and possibly no text."""
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
    """All bytes of a stream, with the error at its end if there is one."""
    data = form.begin(Usage(PROMPT, 0, 0))
    for count, piece in enumerate(pieces, 1):
        data += form.piece(piece, usage(count))
    return data + (form.end(usage(len(pieces))) if error is None else form.error(error))


def answer(form: WireForm, pieces: list[Piece], is_stream: bool, error: ApiError | None = None) -> bytes:
    return stream(form, pieces, error) if is_stream else dumps(form.whole([whole(pieces)], usage(len(pieces))))


def events(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The name and the object of each event. Lines are split by Python's `splitlines`."""
    found = []
    for event in data.decode().split("\n\n")[:-1]:
        name, value = event.splitlines()
        assert name.startswith("event: ") and value.startswith("data: ")
        found.append((name.removeprefix("event: "), json.loads(value.removeprefix("data: "))))
    assert data.endswith(b"\n\n")
    return found


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Runs a server on loopback and gives its address. An ApiError raised by `answer` is sent in OpenAI's form."""

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
