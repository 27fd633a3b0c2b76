"""Ray on this machine, applications in it, and the processes of their replicas."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

ROOT = Path(__file__).parents[3]
SECONDS = 120


class Cluster:
    """A Ray cluster for a `with` block, in which applications can be started and stopped."""

    def __enter__(self) -> Cluster:
        context = ray.init(
            "local", num_cpus=4, include_dashboard=True, dashboard_port=free_port(), object_store_memory=80 << 20,
            log_to_driver=False,
        )  # fmt: skip
        self.address = context.address_info["gcs_address"]
        self.dashboard = f"http://{context.dashboard_url}"
        return self

    def __exit__(self, *exception: object) -> None:
        ray.shutdown()

    @contextmanager
    def serving(self, *arguments: str) -> Iterator[App]:
        """Runs `serve run pace.integrations.ray:app ARGUMENTS`, and ends it with Ctrl-C."""
        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        with self.running(port, "pace.integrations.ray:app", *arguments) as app:
            yield app

    @contextmanager
    def running(self, port: int, *arguments: str) -> Iterator[App]:
        """Runs `serve run ARGUMENTS` at a port, and ends it with Ctrl-C."""
        command = [Path(sys.executable).with_name("serve"), "run", "--address", self.address, *arguments]
        process = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        app = App(port)
        try:
            wait_until(lambda: process.poll() is not None or app.is_ready())
            assert process.poll() is None, process.stdout.read()[-3000:]
            yield app
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=SECONDS)


class App:
    """Client of the application at a port."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer. Raises OSError or HTTPException if the connection closes early."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        fields = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None:
            fields = {"content-type": "application/json", **fields}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request("GET" if body is None else "POST", path, data, fields)
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return self.ask("/ready")[0] == 200
        except OSError:
            return False

    def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        status, _, body = self.ask("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, body
        return json.loads(body)

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        status, _, body = self.ask("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
        assert status == 200, body
        return json.loads(body)

    def metric(self, name: str) -> dict[str, float]:
        """A metric of each replica, by the replica's name."""
        families = text_string_to_metric_families(self.ask("/metrics")[2].decode())
        found: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples if sample.name == name):
            found[sample.labels["replica"]] = found.get(sample.labels["replica"], 0) + sample.value
        return found

    @property
    def replicas(self) -> set[str]:
        """Names of the replicas that answer."""
        return set(self.metric("pace:prompt_tokens_total"))


def processes(title: str) -> list[int]:
    """Descendants of this process with `title` in their command line."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return [pid for pid in parents if is_ours(pid) and title in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds"
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
