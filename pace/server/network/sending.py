"""Short messages to a client, sent while the thread keeps the interpreter's lock.

`socket.send` releases the lock, and a thread of an engine that waits for it takes it. The event loop would get it back
up to `SWITCH_SECONDS` later, after each piece of text of each stream. The call itself takes a few microseconds, because
these sockets never block.
"""

from __future__ import annotations

import asyncio
import ctypes
import socket

SHORT_BYTES = 16 << 10
"""Size of the largest message that is sent this way."""

try:
    _send = ctypes.PyDLL(None).send  # unlike those of CDLL, its functions keep the lock
    _send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
    _send.restype = ctypes.c_ssize_t
except (AttributeError, OSError, TypeError):  # a system without that function
    _send = None


def plain_socket(transport: asyncio.Transport) -> socket.socket | None:
    """Returns the socket that `write` may use; None if the transport encrypts."""
    return None if transport.get_extra_info("sslcontext") else transport.get_extra_info("socket")


def write(transport: asyncio.Transport, connection: socket.socket | None, data: bytes) -> None:
    """Does what `transport.write(data)` does. `connection` is its `plain_socket`. The transport sends what the socket
    does not take at once, and handles errors."""
    is_next = connection is not None and not transport.is_closing() and not transport.get_write_buffer_size()
    if _send is not None and is_next and type(data) is bytes and len(data) <= SHORT_BYTES:
        num_sent = _send(connection.fileno(), data, len(data), 0)
        if num_sent == len(data):
            return
        data = data[max(0, num_sent) :]
    transport.write(data)
