"""Replicas that follow the load, and an application deployed to a running Ray."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray import serve

from tests.integrations.ray.cluster import App, free_port, wait_until

pytestmark = pytest.mark.thorough

ANSWER = {"max_tokens": 200, "ignore_eos": True}


def test_replicas_come_with_the_load_and_go_with_it(cluster):
    scaling = ["min_replicas=1", "max_replicas=2", "target_ongoing_requests=2"]
    delays = ["upscale_delay_s=1", "downscale_delay_s=2"]
    with cluster.serving(*scaling, *delays, "num_threads=1", "kv_cache_bytes=64MiB") as app:
        stopped, texts = threading.Event(), set()

        def load(_: int) -> None:
            while not stopped.is_set():
                texts.add(app.complete("Once upon a time", **ANSWER)["choices"][0]["text"])

        assert len(app.replicas) == 1
        with ThreadPoolExecutor(12) as threads:
            loads = threads.map(load, range(12))
            try:
                wait_until(lambda: len(app.replicas) == 2)
            finally:
                stopped.set()
            list(loads)  # raises the error of any load
        wait_until(lambda: len(app.replicas) == 1)
        assert texts == {app.complete("Once upon a time", **ANSWER)["choices"][0]["text"]}


def test_an_application_is_deployed(cluster, tmp_path):
    """`serve deploy FILE` sends it to the running Ray, and exits."""
    port, file = free_port(), tmp_path / "pace.yaml"
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    args = "{model: pace/assets/tiny, num_threads: 1, kv_cache_bytes: 64MiB}"
    text = f"http_options: {{host: 127.0.0.1, port: {port}}}\n"
    text += f"applications: [{{name: pace, import_path: 'pace.integrations.ray:app', args: {args}}}]\n"
    file.write_text(text)
    command = [Path(sys.executable).with_name("serve"), "deploy", "--address", cluster.dashboard, file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    app = App(port)
    wait_until(app.is_ready)
    assert "Paris" in app.complete("The capital of France is", max_tokens=8)["choices"][0]["text"]
    serve.shutdown()
