"""The life of a server in a separate process: the port, loading, signals, TLS, a unix socket."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from pace.server.network.run import CannotListen, listening
from tests.server.network.connections import serve_options
from tests.server.test_options import certificates  # noqa: F401
from tests.waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]


class Process:
    """An example server: `lines` has what it printed on stderr."""

    def __init__(self, options: dict | None = None, **service) -> None:
        command = [sys.executable, "-m", "tests.server.network.example_server"]
        arguments = [json.dumps({"port": 0, **(options or {})}), json.dumps(service)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*command, *arguments], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")))
        self.reader.start()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stderr.close()

    def waits_for(self, text: str) -> str:
        wait_until(lambda: any(text in line for line in list(self.lines)) or not self.reader.is_alive())
        found = [line for line in self.lines if text in line]
        assert found, f"{text!r} is not in {self.lines}"
        return found[0]

    @property
    def port(self) -> int:
        return int(re.search(r":(\d+)", self.waits_for("serving"))[1])

    def get(self, path: str) -> tuple[int, str]:
        client = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        client.request("GET", path)
        answer = client.getresponse()
        text = answer.read().decode()
        client.close()
        return answer.status, text

    def get_later(self, path: str) -> tuple[threading.Thread, list]:
        found: list = []
        thread = threading.Thread(target=lambda: found.append(self.get(path)))
        thread.start()
        return thread, found

    def sleeps(self) -> bool:
        """True if the process has handled its signals and waits. Two signals that it has not handled yet are one."""
        fields = Path(f"/proc/{self.process.pid}/status").read_text()
        pending = re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", fields)
        return not any(int(mask, 16) for mask in pending) and re.search(r"State:\s*S", fields) is not None

    def ends(self) -> int:
        code = self.process.wait(PATIENCE)
        self.reader.join()
        return code


def test_the_port_answers_while_the_model_loads(tmp_path):
    with Process(load_until=str(tmp_path / "loaded")) as server:
        assert re.fullmatch(
            r"pace: serving example at http://127\.0\.0\.1:\d+, and loading it\n", server.waits_for("ing")
        )
        assert server.get("/ready") == (503, "loading")
        (tmp_path / "loaded").touch()
        assert server.waits_for("ready at http://127.0.0.1:") and server.get("/ready") == (200, "ready")
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0 and server.lines[-1] == "closed\n"
        assert len(server.lines) == 4


def test_a_model_that_does_not_load_ends_it():
    with Process(fails=True) as server:
        assert server.ends() == 1
        assert server.lines[-1] == "FileNotFoundError: there is no such model\n"
        assert not any("Traceback" in line for line in server.lines)


def test_a_signal_while_loading_ends_it():
    with Process(load_until="/never") as server:
        server.waits_for("serving")
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_requests_finish_and_takes_no_more(number, tmp_path):
    with Process(work_until=str(tmp_path / "done")) as server:
        server.waits_for("ready")
        thread, found = server.get_later("/work")
        server.waits_for("at work")
        server.process.send_signal(number)
        server.waits_for("stopping")
        assert server.get("/work") == (503, "draining")
        (tmp_path / "done").touch()
        thread.join()
        assert found == [(200, "done")] and server.ends() == 0


def test_the_drain_ends():
    with Process({"limits": {"drain_seconds": 0.2}}, work_until="/never") as server:
        server.waits_for("ready")
        thread, found = server.get_later("/work")
        server.waits_for("at work")
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0
        thread.join()
        assert found == [(500, "cut short")]


@pytest.mark.parametrize("hangs", [False, True], ids=["drain", "stuck loop"])
def test_a_second_signal_ends_it_at_once(tmp_path, hangs):
    path = tmp_path / "socket"
    with Process({"uds": str(path)}, work_until="/never", hangs=hangs) as server:
        server.waits_for("ready")
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(path))
        client.sendall(b"GET /work HTTP/1.1\r\nHost: x\r\n\r\n")
        server.waits_for("at work")
        server.process.send_signal(signal.SIGTERM)
        if not hangs:
            server.waits_for("stopping")
        wait_until(server.sleeps)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 128 + signal.SIGTERM, "its work never ends"
        assert not path.exists()
        client.close()


def test_a_unix_socket(tmp_path):
    path = tmp_path / "socket"
    with Process({"uds": str(path)}) as server:
        server.waits_for(f"ready at unix:{path}")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /ready HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in client.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0 and not path.exists()


def test_tls(certificates):  # noqa: F811
    files = {"tls_certificate": str(certificates["one.pem"]), "tls_key": str(certificates["one.key"])}
    with Process(files) as server:
        server.waits_for("ready at https://")
        context = ssl.create_default_context(cafile=str(certificates["one.pem"]))
        client = http.client.HTTPSConnection("localhost", server.port, context=context, timeout=PATIENCE)
        for _ in range(2):
            client.request("GET", "/ready")
            assert client.getresponse().read() == b"ready"
        client.request("POST", "/ready", headers={"content-length": "999999999"})
        assert client.getresponse().status == 413
        client.close()
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as plain:
            plain.sendall(b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"ready" not in plain.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        assert server.ends() == 0


# -- ports -------------------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_refused_before_anything_loads():
    with listening(serve_options()) as taken:
        port = taken.getsockname()[1]
        with Process({"port": port}, load_until="/never") as server:
            assert server.ends() == 2
            assert len(server.lines) == 1 and f"port={port}" in server.lines[0] and "in use" in server.lines[0]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"host": "203.0.113.1", "keys": ("k",)}, "port=0 at 203.0.113.1"),
        ({"host": "no.such.invalid", "keys": ("k",)}, "host="),
    ],
    ids=["foreign", "unknown"],
)
def test_an_address_of_another_machine_is_refused(fields, message):
    with pytest.raises(CannotListen, match=message), listening(serve_options(**fields)):
        pass


def test_a_unix_socket_takes_nobodys_place(tmp_path):
    path = tmp_path / "socket"
    with listening(serve_options(uds=path)):
        with pytest.raises(CannotListen, match="another server"), listening(serve_options(uds=path)):
            pass
        assert path.exists()
    assert not path.exists()

    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with listening(serve_options(uds=path)):
        pass

    path.write_text("mine")
    with pytest.raises(CannotListen, match="a file with that name exists"), listening(serve_options(uds=path)):
        pass
    assert path.read_text() == "mine"
    for wrong in (tmp_path / "absent" / "socket", tmp_path / ("a" * 200)):
        with pytest.raises(CannotListen, match="uds="), listening(serve_options(uds=wrong)):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_addresses_of_this_machine(host):
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        with listening(serve_options(host=host)) as listener:
            socket.create_connection(listener.getsockname()[:2], timeout=PATIENCE).close()
    except CannotListen as error:
        if host == "::1":
            pytest.skip(str(error))
        raise
