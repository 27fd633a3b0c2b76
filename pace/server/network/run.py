"""Life cycle of the server: open the port, make a service, load its model, serve, drain, stop.

    run(options, make)

The port answers immediately, before torch is imported, and reports that the model is loading. At SIGTERM or Ctrl-C new
requests are refused, running ones get `drain_seconds`, and `run` returns 0. A second signal ends the process at once.
There is one process, since an engine and its threads do not survive a fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import uvicorn

from pace.server.network.protocol import Connection
from pace.server.network.security import Application, Gate
from pace.server.network.starting import Starting
from pace.server.network.threads import in_thread
from pace.server.options import ServeOptions

Result = TypeVar("Result")

SWITCH_SECONDS = 5e-4
"""Interval after which Python's threads release the GIL, a tenth of the default. The engine's thread waits that long
for a busy event loop after every step."""
KEEP_ALIVE_SECONDS = 65
"""Time that an idle connection is kept. It is longer than in proxies (60 s is common): they must not send into a closed
connection."""
STOP_SECONDS = 2
"""Time after the drain for the last bytes; everything still running is then cancelled."""
SPARE_FILES = 256
"""File descriptors in addition to those of connections: weights, the interpreter's own."""


class Service(Protocol):
    """Loads models and answers requests."""

    max_body_bytes: int
    """Maximum size of a body, now."""
    is_loading: bool
    """True while a thread loads a model, which cannot be stopped."""

    async def load(self) -> None:
        """Loads the models. Raises the error of loading, if there is nothing to serve."""

    async def drain(self, seconds: float) -> None:
        """Takes no more requests. Returns when the running ones are done, or cancels them after `seconds`."""

    def close(self) -> None:
        """Frees the models. Not called while one is loaded."""


class CannotListen(ValueError):
    """The port or the unix socket cannot be opened. The message contains the reason and a remedy."""


class WrongOptions(ValueError):
    """The options are invalid for any model. Raised by `make` of `run`."""


def run(options: ServeOptions, make: Callable[[], tuple[Service, Application]]) -> int:
    """Serves until a signal comes, and returns 0. Must be called on the main thread, because of the signals.

    `make` is called on another thread once the port answers; it does the slow imports. Raises CannotListen before that.
    Raises the errors of `make` and `service.load`, after the port is closed.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    _allow_files(2 * options.limits.connections + SPARE_FILES)
    with listening(options) as listener:
        return asyncio.run(_serve(options, make, listener))


async def _serve(
    options: ServeOptions, make: Callable[[], tuple[Service, Application]], listener: socket.socket
) -> int:
    starting = Starting()
    service: Service | None = None

    def max_body_bytes() -> int:
        return options.limits.body_bytes if service is None else service.max_body_bytes

    server = _Server(uvicorn_config(options, Gate(starting, options), max_body_bytes))
    url = _url(options, listener)
    with _first_signal(options) as stop:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await _first_of(server.is_listening.wait(), serving)

        async def result_of(work: Awaitable[Result]) -> Result:
            """Returns the result of `work`. A signal, or the end of the server, takes precedence."""
            result = asyncio.ensure_future(work)
            await _first_of(result, stop.wait(), serving)
            if stop.is_set() and not result.done():
                _exit(options, 0)  # a loading thread cannot be stopped, and no client waits for an answer
            return await result

        try:
            service, starting.app = await result_of(in_thread(make))
            names = [entry.names[0] for entry in options.entries]
            _say(f"serving {', '.join(names)} at {url}, and loading {'it' if len(names) == 1 else 'them'}")
            if not options.is_local and options.tls_certificate is None:
                _say(
                    "keys and prompts cross the network in the clear: use --tls-cert and --tls-key, or a proxy with TLS"
                )
            await result_of(service.load())
            _say(f"ready at {url}")
            await _first_of(stop.wait(), serving)
            _say(f"stopping: requests have {options.limits.drain_seconds:g} s to finish; a second signal ends them now")
            await service.drain(options.limits.drain_seconds)
        finally:
            server.should_exit = True
            await serving
        if service.is_loading:
            _exit(options, 0)  # as above: its client has got 503
        service.close()
    return 0


# -- uvicorn -----------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """Leaves signals to `run`, and sets an event when the port answers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()


def uvicorn_config(
    options: ServeOptions, app: Application, max_body: Callable[[], int] | None = None
) -> uvicorn.Config:
    """Returns uvicorn's options. `max_body` is as in `Connection`."""
    tls = options.tls_context()
    return uvicorn.Config(
        app,
        http=functools.partial(
            Connection, limits=options.limits, refused=set(), logs_access=options.access_log, max_body=max_body
        ),
        ws="none",
        interface="asgi3",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )


# -- the port ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Opens the socket of the options, and closes it after the block; also removes a unix socket. Raises
    CannotListen."""
    listener = _open_port(options.host, options.port) if options.uds is None else _open_unix(Path(options.uds))
    try:
        yield listener
    finally:
        listener.close()
        _remove_unix(options)


def _open_port(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Clients of `localhost` try both kinds of address; all try IPv4.
        family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise CannotListen(f"host={host} is not an address of this machine ({error.strerror})") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise CannotListen(
            f"port={port} at {host} cannot be opened ({error.strerror}); choose another, or 0 for any free port"
        ) from None
    return listener


def _open_unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # only for this user, from the start
    try:
        _remove_stale(path)
        listener.bind(str(path))
        listener.listen()
    except OSError as error:
        listener.close()
        raise CannotListen(f"uds={path} cannot be opened ({error.strerror or error})") from None
    finally:
        os.umask(before)
    return listener


def _remove_stale(path: Path) -> None:
    """Removes a socket whose server has died. Raises OSError if a server listens, or if the path is no socket."""
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise OSError("a file with that name exists")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError("another server is listening there")


def _remove_unix(options: ServeOptions) -> None:
    if options.uds is not None:
        Path(options.uds).unlink(missing_ok=True)


def _url(options: ServeOptions, listener: socket.socket) -> str:
    if options.uds is not None:
        return f"unix:{options.uds}"
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{options.scheme}://{host}:{listener.getsockname()[1]}"


# -- the process -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _first_signal(options: ServeOptions) -> Iterator[asyncio.Event]:
    """Yields an event that the first SIGTERM or SIGINT sets. The second ends the process, even if the loop is busy."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    count = 0

    def handle(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            _exit(options, 128 + number)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(options: ServeOptions, code: int) -> None:
    """Ends the process without waiting for its threads."""
    _remove_unix(options)
    sys.stderr.flush()
    os._exit(code)


async def _first_of(*waited: Any) -> None:
    """Returns when one is done, and raises its error. Does not cancel futures and tasks."""
    tasks = [asyncio.ensure_future(one) for one in waited]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task, one in zip(tasks, waited):
            if task is not one:
                task.cancel()


def _allow_files(wanted: int) -> None:
    """Raises the soft limit of open files, which is often 1024, as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < maximum:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, hard))


def _say(line: str) -> None:
    print(f"pace: {line}", file=sys.stderr, flush=True)
