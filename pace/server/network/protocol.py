"""One connection: uvicorn's HTTP/1.1, with limits on size and time of requests.

uvicorn parses with llhttp, which refuses what proxies could understand differently (two lengths, or a length with
chunks). uvicorn has no limits: on headers, on a body, on the time for either, or on a client that does not read.

    idle --first byte--> head --headers complete--> body --message complete--> idle
         header_seconds                body_seconds

A client that exceeds a limit gets an error in JSON, unless an answer has begun, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pace.server.errors import ApiError
from pace.server.limits import Limits
from pace.server.network.access_log import Access
from pace.server.network.half_closed import close_when_gone
from pace.server.network.refusals import answer, id_headers, request_id
from pace.server.network.sending import plain_socket, write

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""Interim response that HTTP/1.1 clients ignore. The system of a client that has gone answers it with a reset."""
SLICE_BYTES = 64 << 10
"""Bytes passed to the parser at once: the maximum that is held of a request that is then refused."""
LINGER_SECONDS = 1.0
"""Time in which a refused client may still send. Closing at once would reset the connection before it reads the
answer."""
PROBE_SECONDS, PROBE_INTERVAL, PROBES = 30, 10, 3
"""A peer that vanished silently is detected after a minute."""


class AnswerTransport:
    """The transport of a connection, as an answer uses it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._socket = plain_socket(connection.transport)
        self.close = connection.close_after_answer

    def write(self, data: bytes) -> None:
        write(self._connection.transport, self._socket, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)


class Connection(HttpToolsProtocol):
    """Protocol of an accepted socket in uvicorn. `limits` are those of the server. `refused` holds the server's
    connections that got an error and are about to close. `max_body` returns the maximum size of a body, which depends
    on the model; None for the limit of text.

    The scope of a request has `pace_request_id`. It has `pace_refused`, an error's status, if the request was refused
    here while its body arrived."""

    def __init__(
        self,
        *arguments: Any,
        limits: Limits,
        refused: set[Connection],
        logs_access: bool = False,
        max_body: Callable[[], int] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self.limits = limits
        self.refused = refused
        self.logs_access = logs_access
        self.max_body = max_body or (lambda: limits.body_bytes)
        self.phase = "idle"
        self.url = b""
        self.headers = []
        self.head_bytes = self.body_bytes = 0
        self.held_bytes = 0
        """Bytes since the parser's last callback: those it holds of an incomplete header."""
        self.is_heard = False
        self.ignores_input = False
        self.read_timer: asyncio.TimerHandle | None = None
        self.write_timer: asyncio.TimerHandle | None = None

    # -- the connection ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        _set_options(transport.get_extra_info("socket"), self.limits.write_seconds)
        if len(self.connections) > self.limits.connections:
            self._refuse(
                ApiError(
                    503, "all connections of this server are in use; try again later", headers={"retry-after": "1"}
                )
            )
        else:
            self._allow_reading(self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self.refused.discard(self)
        self._stop_read_timer()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        for start in range(0, len(data), SLICE_BYTES):
            if self.ignores_input or self.transport.is_closing():
                return
            self._parse(data[start : start + SLICE_BYTES])

    def eof_received(self) -> bool:
        """Returns True if the connection stays open, for a client that sends no more and waits for its answer. Over
        HTTP/1.0 and TLS such a client cannot be distinguished from a lost one."""
        is_asked = self._is_answering() and self.phase == "idle"
        if not is_asked or self.scope["http_version"] == "1.0" or self.transport.get_extra_info("sslcontext"):
            return False
        self.cycle.keep_alive = False
        if not self.cycle.response_started:
            self.transport.write(CONTINUE)
        close_when_gone(self.loop, self.transport)
        return True

    def _parse(self, data: bytes) -> None:
        self.is_heard = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # answered as if no upgrade was requested
        except httptools.HttpParserError as error:
            if not self.ignores_input:
                cause = error.__context__  # raised by a callback below
                self._refuse(cause if isinstance(cause, ApiError) else ApiError(400, "this is not valid HTTP/1.1"))
            return
        self.held_bytes = 0 if self.is_heard else self.held_bytes + len(data)
        if self.held_bytes > self.limits.header_bytes:
            self._refuse(self._headers_too_large())
        elif self.phase == "idle" and self.read_timer is None and not self._is_answering():
            self._allow_reading(self.limits.header_seconds)  # empty lines have ended the wait for the next request

    # -- parser callbacks: `_parse` answers an ApiError raised here ----------------------------------------------------

    def on_message_begin(self) -> None:
        if self._is_answering():
            # A client may send its next request early, and must repeat it if the connection closes. To delay it we
            # would have to stop reading, and then we would not notice that the client has gone.
            self.ignores_input = True
            self.cycle.keep_alive = False
            raise ApiError(400, "pipelining is not supported: wait for the answer before the next request")
        self.phase, self.is_heard = "head", True
        self.head_bytes = self.body_bytes = 0
        self._allow_reading(self.limits.header_seconds)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Handles a header, or a trailer after a chunked body. Trailers are counted, but not passed to the
        application."""
        self._count_head(len(name) + len(value) + 4)
        if self.phase == "head":
            super().on_header(name, value)
            if len(self.headers) > self.limits.header_lines:
                raise self._headers_too_large()

    def on_headers_complete(self) -> None:
        self.is_heard = True
        self._check_head()
        super().on_headers_complete()
        self.cycle.transport = AnswerTransport(self)
        self.scope["pace_request_id"] = request_id(self.headers)
        self.phase = "body"
        self._allow_reading(self.limits.body_seconds)

    def on_body(self, body: bytes) -> None:
        self.is_heard = True
        self.body_bytes += len(body)
        if self.body_bytes > self.max_body():
            raise self._body_too_large()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.is_heard = True
        self.phase = "idle"
        self._stop_read_timer()
        super().on_message_complete()

    def _count_head(self, size: int) -> None:
        self.is_heard = True
        self.head_bytes += size
        if self.head_bytes > self.limits.header_bytes:
            raise self._headers_too_large()

    def _check_head(self) -> None:
        version, fields = self.parser.get_http_version(), dict(self.headers)
        if version not in ("1.0", "1.1"):
            raise ApiError(400, "only HTTP/1.1 and HTTP/1.0 are supported")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and version == "1.1"):
            raise ApiError(400, "a request must have one Host header")
        length = int(fields.get(b"content-length", 0))
        has_body = length > 0 or b"transfer-encoding" in fields
        if self.parser.get_method() == b"CONNECT" or (self.parser.should_upgrade() and has_body):
            # The parser treats such a body as another protocol, and would read a request in it.
            raise ApiError(400, "only HTTP/1.1 is supported: send no Upgrade header with a body")
        if length > self.max_body():
            raise self._body_too_large()

    def _headers_too_large(self) -> ApiError:
        return ApiError(
            431, f"headers may have at most {self.limits.header_bytes} bytes and {self.limits.header_lines} lines"
        )

    def _body_too_large(self) -> ApiError:
        return ApiError(413, f"the body may have at most {self.max_body()} bytes")

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: ApiError) -> None:
        """Answers with the error, unless an answer has begun, and closes. Further input is ignored."""
        if self.ignores_input or self.transport.is_closing():
            return
        self.ignores_input = True
        self._stop_read_timer()
        self.connections.discard(self)
        if self.phase == "body":
            can_answer = not self.cycle.response_started
            self.cycle.disconnected = True  # seen by the application
            self.cycle.message_event.set()
        else:
            can_answer = not self._is_answering()
        if len(self.refused) >= self.limits.connections:
            self.transport.abort()
        elif can_answer:
            self._write_error(error)
            self._linger()
        else:
            self.transport.close()
            self._watch_writes()

    def close_after_answer(self) -> None:
        """Closes the connection after a whole answer, which may come before the whole request."""
        if self.phase != "body" or len(self.refused) >= self.limits.connections:
            self.transport.close()
        elif not self.ignores_input:
            self.ignores_input = True
            self._stop_read_timer()
            self.connections.discard(self)
            self._linger()

    def _linger(self) -> None:
        """Sends no more, and closes once the client has sent all or its time is over."""
        self.refused.add(self)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self.read_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def _write_error(self, error: ApiError) -> None:
        path = self.url.partition(b"?")[0].decode("latin-1")
        headers, body = answer(error, path)
        own_id = self._note_refusal(path, error.status)
        headers += [*id_headers(own_id, path), (b"connection", b"close")]
        fields = [*self.server_state.default_headers, *headers]
        status = STATUS_LINE.get(error.status, b"HTTP/1.1 %d \r\n" % error.status)
        head = b"".join(b"%s: %s\r\n" % (name, value) for name, value in fields)
        self.transport.write(b"".join([status, head, b"\r\n", body]))

    def _note_refusal(self, path: str, status: int) -> str:
        """Returns the id of the request, and logs it. If the application has seen the request, the gate writes its line
        of the access log."""
        if self.phase == "body":
            self.scope["pace_refused"] = status
            return self.scope["pace_request_id"]
        own_id = request_id(self.headers)
        if self.logs_access:
            method = self.parser.get_method().decode() if path else None
            Access(own_id, method, path or None, status=status).write()
        return own_id

    # -- time ----------------------------------------------------------------------------------------------------------

    def _allow_reading(self, seconds: float) -> None:
        self._stop_read_timer()
        self.read_timer = self.loop.call_later(seconds, self._reading_took_too_long)

    def _stop_read_timer(self) -> None:
        if self.read_timer is not None:
            self.read_timer.cancel()
            self.read_timer = None

    def _reading_took_too_long(self) -> None:
        self.read_timer = None
        if self.phase == "idle":
            self.transport.close()  # nothing was requested
        elif self.phase == "head":
            self._refuse(ApiError(408, f"the headers did not arrive within {self.limits.header_seconds:g} seconds"))
        else:
            self._refuse(ApiError(408, f"the body did not arrive within {self.limits.body_seconds:g} seconds"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writes()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_write_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_writes()

    def _watch_writes(self) -> None:
        """Aborts if the client reads nothing of the pending output for `write_seconds`. Starts again whenever it
        reads."""
        self._stop_write_timer()
        waiting = self.transport.get_write_buffer_size()
        if waiting:
            self.write_timer = self.loop.call_later(self.limits.write_seconds, self._check_reader, waiting)

    def _stop_write_timer(self) -> None:
        if self.write_timer is not None:
            self.write_timer.cancel()
            self.write_timer = None

    def _check_reader(self, waiting: int) -> None:
        if self.transport.get_write_buffer_size() < waiting:
            self._watch_writes()
        else:
            self.transport.abort()


def _set_options(connection: Any, seconds: float) -> None:
    """Lets the system send each write at once, probe a silent peer, and drop one that acknowledges nothing.

    asyncio does not ask for the first, as the listener was opened without naming TCP. Then a body waits for the
    acknowledgement of its headers, which many clients delay by 40 ms."""
    if connection is None or connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    values = {
        "TCP_KEEPIDLE": PROBE_SECONDS,
        "TCP_KEEPINTVL": PROBE_INTERVAL,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": int(seconds * 1000),
    }
    for name, value in values.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
