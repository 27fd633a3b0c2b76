"""Connections whose client sends no more. It may wait for its answer (`shutdown`) or have gone (`close`). Both look the
same, until a write is answered with a reset."""

from __future__ import annotations

import asyncio
import socket

LOOK_SECONDS = 0.02
"""Interval of checks for a reset. asyncio no longer reads from such a connection, so it does not notice a reset."""


def close_when_gone(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Closes the transport once its client has gone. To be called after a write, or shortly before one."""
    if transport.is_closing():
        return
    if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        transport.abort()
    else:
        loop.call_later(LOOK_SECONDS, close_when_gone, loop, transport)
