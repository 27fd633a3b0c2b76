"""Connections whose client sends no more. It may wait for its answer (`shutdown`) or have gone (`close`): both look
alike, until something that is written to it comes back as a reset."""

from __future__ import annotations

import asyncio
import socket

LOOK_SECONDS = 0.02
"""asyncio does not read from such a connection any more, and so does not hear of a reset: it is looked for."""


def close_when_gone(loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
    """Has the transport closed once its client turns out to have gone. To be called after something was written, or
    with something about to be."""
    if transport.is_closing():
        return
    if transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        transport.abort()
    else:
        loop.call_later(LOOK_SECONDS, close_when_gone, loop, transport)
