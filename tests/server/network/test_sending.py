"""Short messages to clients: what the socket takes at once, what the transport sends later, and errors."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from pace.server.network import sending


class Transport:
    """A transport that keeps what it is to send."""

    def __init__(self, connection: socket.socket, buffered: int = 0, closing: bool = False, tls: Any = None) -> None:
        self.left = b""
        self._buffered, self._closing = buffered, closing
        self._info = {"socket": connection, "sslcontext": tls}

    def write(self, data: bytes) -> None:
        self.left += data

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return self._buffered

    def get_extra_info(self, name: str) -> Any:
        return self._info[name]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    near.setblocking(False)
    far.setblocking(False)
    with near, far:
        yield near, far


def received(far: socket.socket) -> bytes:
    data = b""
    try:
        while chunk := far.recv(1 << 20):
            data += chunk
    except (BlockingIOError, ConnectionResetError):
        pass
    return data


def write(transport: Transport, data: bytes) -> bytes:
    """Writes, and returns what is left to the transport."""
    sending.write(transport, sending.plain_socket(transport), data)
    left, transport.left = transport.left, b""
    return left


def test_a_short_message_goes_to_the_socket(pair):
    near, far = pair
    transport = Transport(near)
    for data in (b"data: 1\n\n", b"\0 and more", b""):
        assert write(transport, data) == b""
    assert received(far) == b"data: 1\n\n\0 and more"


def test_the_transport_sends_what_the_socket_does_not_take(pair):
    near, far = pair
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = bytes(range(256)) * 8
    transport, written, left = Transport(near), b"", b""
    while not left:
        written += data
        assert len(written) < 1 << 22, "a socket with a small buffer takes everything"
        left = write(transport, data)
    assert len(left) <= len(data)
    assert received(far) + left == written


@pytest.mark.parametrize("fields", [{"buffered": 1}, {"closing": True}, {"tls": object()}])
def test_a_transport_that_is_not_free_gets_the_message(pair, fields):
    assert write(Transport(pair[0], **fields), b"whole") == b"whole"
    assert received(pair[1]) == b""


def test_a_transport_gets_messages_that_are_long_or_no_bytes(pair):
    long = b"a" * (sending.SHORT_BYTES + 1)
    for data in (long, bytearray(b"b"), memoryview(b"c")):
        assert write(Transport(pair[0]), data) == data
    assert received(pair[1]) == b""


def test_a_transport_handles_errors(pair):
    near, far = pair
    far.close()
    assert write(Transport(near), b"to nobody") == b"to nobody"
    near.close()
    assert write(Transport(near), b"from nobody") == b"from nobody"


def test_a_client_that_reads_late_gets_all_bytes_in_order():
    messages = [b"%d " % number * (1 + number % 40) for number in range(20_000)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        connection = sending.plain_socket(writer.transport)
        for number, message in enumerate(messages):
            sending.write(writer.transport, connection, message)
            if number % 100 == 0:
                await asyncio.sleep(0)  # the transport sends some of what it holds
        writer.close()

    async def play() -> bytes:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            await asyncio.sleep(0.05)
            data = await reader.read(-1)
            writer.close()
        return data

    assert asyncio.run(asyncio.wait_for(play(), 30)) == b"".join(messages)


@pytest.mark.skipif(sending._send is None, reason="this system has no send function")
def test_other_threads_do_not_run_while_a_message_is_sent(pair):
    """With a switch interval of minutes a thread runs only once another releases the lock."""
    near, far = pair
    start, has_run, interval = threading.Lock(), [], sys.getswitchinterval()
    start.acquire()
    thread = threading.Thread(target=lambda: (start.acquire(), has_run.append(True)))
    thread.start()
    transport, connection = Transport(near), near
    try:
        sys.setswitchinterval(100)
        start.release()
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end:  # now the thread waits for the lock of the interpreter
            pass
        for _ in range(100):
            sending.write(transport, connection, b"a")
        assert not has_run
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert len(received(far)) + len(transport.left) == 100
