"""`pace serve` with several models, as a process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pace.assets import TINY, TINY_DRAFT
from tests.waiting import PATIENCE

FILE = """
[chat]
model = "{TINY}"
aliases = ["gpt-4o"]
idle-unload = 0.2

[small]
model = "{TINY_DRAFT}"
dtype = "float32"
load-on-startup = false

[broken]
model = "/nowhere/model.gguf"
"""


def ask(port: int, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.thorough
def test_models_of_a_file_and_a_signal(tmp_path: Path):
    file = tmp_path / "models.toml"
    file.write_text(FILE.format(TINY=TINY, TINY_DRAFT=TINY_DRAFT))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "pace",
        "serve",
        "--models",
        str(file),
        "--port",
        str(port),
        "--kv-cache-bytes",
        "5%",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        while "ready at" not in (line := process.stderr.readline()):
            assert line, lines
            lines.append(line)
        assert f"pace: serving chat, small, broken at http://127.0.0.1:{port}, and loading them\n" in lines
        assert any("the model 'broken' could not be loaded" in line for line in lines)
        _, models = ask(port, "/v1/models")
        assert [entry["id"] for entry in models["data"]] == ["chat", "gpt-4o", "small", "broken"]
        body = {"prompt": "1, 2, 3,", "max_tokens": 5, "temperature": 0}
        for _ in range(2):
            for name in ("gpt-4o", "small"):
                status, answer = ask(port, "/v1/completions", body | {"model": name})
                assert status == 200 and answer["model"] == name and answer["choices"][0]["text"], answer
            status, answer = ask(port, "/v1/completions", body | {"model": "broken"})
            assert status == 503 and "/nowhere" not in answer["error"]["message"]
            time.sleep(0.5)
        _, models = ask(port, "/v1/models")
        assert [entry["loaded"] for entry in models["data"]] == [False, False, True, False]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
