"""A host of files whose answers are any bytes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.waiting import PATIENCE

OK = b"HTTP/1.1 200 OK\r\n"


def sized(data: bytes, head: bytes = OK) -> bytes:
    return head + b"Content-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(data) + data


class ImageHost:
    """Answers each connection after the headers of its request, for a `with` block. Records requests."""

    def __init__(self, answer: bytes | Callable[[socket.socket], None], wrap: Callable | None = None) -> None:
        """`answer` is sent, or called with the connection. `wrap` makes TLS of a connection."""
        self.answer, self._wrap = answer, wrap
        self.requests: list[bytes] = []
        self.num_accepted = self.num_open = self.most_open = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def url(self, target: str = "/a.png") -> str:
        return f"http://{self.name}{target}"

    def __enter__(self) -> ImageHost:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self.num_accepted += 1
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        with suppress(OSError):
            connection.settimeout(PATIENCE)
            connection = self._wrap(connection) if self._wrap else connection
            said = b""
            while b"\r\n\r\n" not in said and (more := connection.recv(4096)):
                said += more
            self.requests.append(said)
            if callable(self.answer):
                self.answer(connection)
            else:
                connection.sendall(self.answer)
        with self._lock:
            self.num_open -= 1
        connection.close()
