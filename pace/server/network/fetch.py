"""Files at addresses in the network, from the hosts that the operator names (`--allow-media-host`)."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httptools

from pace.server.errors import ApiError, invalid
from pace.server.options import HOST

SECONDS = 10.0
"""Maximum time to fetch the files of one request."""
AT_ONCE = 4
"""Files that are fetched at once, and threads that look up names."""
HEADER_BYTES = 32 << 10
PORTS = {"http": 80, "https": 443}
_URL = re.compile(rf"(https?)://{HOST}(?::([0-9]{{1,5}}))?((?:[/?][!-~]{{0,8000}})?)", re.IGNORECASE | re.ASCII)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Address:
    """A URL of an allowed host."""

    scheme: str
    host: str
    """A name or an address; one of IPv6 without brackets."""
    port: int
    authority: str
    """Host and port as in `Host`."""
    target: str
    """Path and query."""


class Fetcher:
    """Fetches files from allowed hosts. It follows no redirect and uses no proxy. Used on the event loop only."""

    def __init__(self, hosts: Iterable[str], max_bytes: int, max_request_bytes: int) -> None:
        """`hosts` are names or addresses, with a port unless it is that of the scheme. `max_bytes` is the maximum of a
        file, and `max_request_bytes` that of all files of a request together."""
        self._hosts = frozenset(host.lower() for host in hosts)
        self._max_bytes = max_bytes
        self._max_request_bytes = max_request_bytes
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._resolver = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pace-names")
        self.tls = ssl.create_default_context()

    def close(self) -> None:
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def find(self, url: str) -> Address | None:
        """Returns the address of a URL; None unless its host and port are allowed."""
        found = _URL.fullmatch(url)
        if found is None:
            return None
        scheme, name = found[1].lower(), found[2].lower()
        port = int(found[3] or PORTS[scheme])
        is_usual = port == PORTS[scheme]
        if f"{name}:{port}" not in self._hosts and not (is_usual and name in self._hosts):
            return None
        target = found[4].partition("#")[0]
        target = target if target.startswith("/") else f"/{target}"
        return Address(scheme, name.strip("[]"), port, name if is_usual else f"{name}:{port}", target)

    async def fetch(self, files: Sequence[tuple[str, Address]], check: Callable[[int], None]) -> list[bytes]:
        """Returns the files of a request, given as places in the request and addresses. Raises ApiError that names the
        place, and what `check` raises for the bytes of all files so far."""
        deadline = asyncio.get_running_loop().time() + SECONDS
        total = 0

        def count(place: str, num_bytes: int) -> None:
            nonlocal total
            total += num_bytes
            if total > self._max_request_bytes:
                raise invalid(place, f"exceeds {self._max_request_bytes} bytes, with the other images of the request")
            check(total)

        tasks = [asyncio.ensure_future(self._fetch(place, address, deadline, count)) for place, address in files]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _fetch(self, place: str, address: Address, deadline: float, count: Callable[[str, int], None]) -> bytes:
        def failed(problem: str) -> ApiError:
            return invalid(place, f"was not fetched from {address.authority}: {problem}")

        try:
            async with asyncio.timeout_at(deadline), self._slots:
                reader, writer = await self._connect(address)
                try:
                    writer.write(_request(address))
                    return await self._read(reader, lambda num_bytes: count(place, num_bytes))
                finally:
                    writer.transport.abort()
        except _FetchError as error:
            raise failed(str(error)) from None
        except TimeoutError:
            raise failed(f"the images of the request took more than {SECONDS:g} s") from None
        except ssl.SSLCertVerificationError:
            raise failed("its certificate is not valid") from None
        except (OSError, UnicodeError):
            raise failed("there is no connection to it") from None
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            raise failed("its answer is not HTTP/1.1") from None

    async def _connect(self, address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connects to one of the checked addresses of a name, which is not looked up again."""
        tls = (self.tls, address.host) if address.scheme == "https" else (None, None)
        problem: OSError = OSError("the name has no address")
        for found in await self._resolve(address):
            try:
                return await asyncio.open_connection(found, address.port, ssl=tls[0], server_hostname=tls[1])
            except OSError as error:
                problem = error
        raise problem

    async def _resolve(self, address: Address) -> list[str]:
        """Returns the addresses of a name. Raises _FetchError if one of them is not public."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._resolver, lambda: socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        )
        addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
        if not all(is_allowed(one, address.host) for one in addresses):
            raise _FetchError("it is not a public address")
        return addresses

    async def _read(self, reader: asyncio.StreamReader, count: Callable[[int], None]) -> bytes:
        answer = _Answer()
        parser = httptools.HttpResponseParser(answer)
        num_read = 0
        while not answer.is_complete and (data := await reader.read(1 << 16)):
            num_read += len(data)
            num_before = len(answer.body)
            try:
                parser.feed_data(data)
            except (httptools.HttpParserError, httptools.HttpParserUpgrade):
                if not answer.is_complete:
                    raise
            if answer.has_headers and (status := parser.get_status_code()) != 200:
                raise _FetchError(f"it answered {status}" + (", and redirects are not followed" * (status // 100 == 3)))
            if not answer.has_headers and num_read > HEADER_BYTES:
                raise _FetchError(f"the headers of its answer exceed {HEADER_BYTES} bytes")
            if len(answer.body) > self._max_bytes or num_read > 2 * self._max_bytes + HEADER_BYTES:
                raise _FetchError(f"it has more than {self._max_bytes} bytes")
            count(len(answer.body) - num_before)
        if not answer.is_complete and (answer.has_end or not answer.has_headers):
            raise _FetchError("its answer ended early")
        return bytes(answer.body)


class _FetchError(Exception):
    """A file that is not fetched. The message is for the client."""


class _Answer:
    """What httptools reports of an answer."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.has_headers = False
        self.is_complete = False
        self.has_end = False
        """True if the headers say where the body ends; else the end of the connection does."""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.has_end |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.has_headers = True

    def on_body(self, data: bytes) -> None:
        if not self.is_complete:
            self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


def is_allowed(address: str, host: str) -> bool:
    """True if `host` is this address itself, or a name and the address is public."""
    found = ipaddress.ip_address(address)
    try:
        return found == ipaddress.ip_address(host)
    except ValueError:
        return _is_public(found)


def _is_public(address: IPAddress) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        inner: IPAddress | None = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return _is_public(inner)
    return address.is_global and not (address.is_multicast or address.is_reserved)


def _request(address: Address) -> bytes:
    lines = (
        f"GET {address.target} HTTP/1.1",
        f"Host: {address.authority}",
        "User-Agent: pace",
        "Accept: image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")
