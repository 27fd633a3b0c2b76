"""`pace serve` until it listens; tests/cli/test_command.py has the tests for all commands."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from dataclasses import fields

import pytest

from pace.assets import TINY
from pace.cli import main, serve
from pace.llm.speculation.configs import PromptLookupConfig
from pace.server.limits import Limits
from pace.server.options import ServeOptions
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("PACE_API_KEY", raising=False)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(arguments)


def read(*arguments: str) -> ServeOptions:
    return serve.serve_options(parse(*arguments))


def test_what_is_not_given_is_the_default():
    assert read() == ServeOptions(str(TINY)) and read().model_names == ("tiny",)


def test_every_option_sets_its_field(tmp_path, monkeypatch):
    monkeypatch.setenv("PACE_API_KEY", "one")
    file = tmp_path / "keys"
    file.write_text("two")
    options = read(
        "org/model",
        *("--host", "0.0.0.0", "--port", "80", "--uds", "/tmp/s", "--api-key-file", str(file)),
        *("--served-model-name", "a", "--served-model-name", "b", "--any-model-name", "--strict", "--allow-priority"),
        "--access-log",
        *("--cors-origin", "https://a.example", "--allowed-host", "a.example", "--allow-media-host", "b.example"),
        *("--metrics-prefix", "vllm"),
        *("--max-body", "1MiB", "--max-queue", "0", "--max-wait", "1.5", "--max-per-key", "3"),
    )
    assert (options.model, options.host, options.port, options.uds) == ("org/model", "0.0.0.0", 80, "/tmp/s")
    assert options.keys == ("one", "two")
    assert options.model_names == ("a", "b")
    assert options.any_model_name and options.strict and options.allow_priority and options.access_log
    assert (options.cors_origins, options.allowed_hosts) == (("https://a.example",), ("a.example",))
    assert options.media_hosts == ("b.example",)
    assert options.metrics_prefix == "vllm"
    assert options.limits == Limits(body_bytes=1 << 20, max_queue=0, max_wait=1.5, max_per_key=3)


def test_every_field_has_an_option():
    names = {field.name for field in fields(ServeOptions)}
    assert set(serve.SERVE_OPTIONS) == names - {"model", "models", "keys", "limits"}
    assert set(serve.LIMIT_OPTIONS) < set(Limits.names())


def test_how_the_model_is_loaded():
    pytest.importorskip("starlette")
    arguments = parse("org/model", "--prompt-lookup", "--max-seq-len", "512", "--quantization", '{"format": "int4"}')
    pool, _ = serve.make_service(serve.serve_options(arguments), arguments)
    load = pool.models[0].load_options
    assert (load.model_name_or_path, load.max_seq_len) == ("org/model", 512)
    assert isinstance(load.spec_config, PromptLookupConfig) and str(load.quantization_config.format.name) == "int4"


LOOK = """
import http.client, sys
from pace.cli import main, serve
from pace.server.network.run import WrongOptions

def look(options, arguments):
    for method, path in (
        *(("GET", "/live"), ("HEAD", "/live"), ("GET", "/health"), ("HEAD", "/health"), ("GET", "/ready")),
        ("POST", "/v1/completions"),
    ):
        client = http.client.HTTPConnection("localhost", options.port)
        client.request(method, path)
        answer = client.getresponse()
        print(method, path, answer.status, answer.getheader("retry-after"), answer.read().decode())
    print(sorted({"torch", "numpy", "transformers", "starlette", "pydantic", "pace._C"} & set(sys.modules)))
    raise WrongOptions("seen")

serve.make_service = look
main(["serve", "--port", sys.argv[1], "--quantization", "int8", "--backend", "native", "--prompt-lookup"])
"""


def test_the_port_answers_before_torch_is_imported():
    run = pytest.importorskip("pace.server.network.run", exc_type=ImportError)
    with run.listening(ServeOptions("tiny", port=0)) as free:
        port = str(free.getsockname()[1])
    done = subprocess.run([sys.executable, "-c", LOOK, port], capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (2, "pace: error: seen (see: pace serve --help)\n")
    live, live_head, health, health_head, *later, modules = done.stdout.splitlines()
    assert (live, live_head) == ('GET /live 200 None {"status":"alive"}', "HEAD /live 200 None ")
    assert health.startswith('GET /health 503 5 {"status":"loading","error":{') and health_head == "HEAD /health 503 5 "
    assert [line.split(" {")[0] for line in later] == ["GET /ready 503 5", "POST /v1/completions 503 5"]
    assert all("the model is loading" in line for line in later)
    assert modules == "[]"


def test_a_failure_to_listen_is_one_line_and_2(capsys):
    run = pytest.importorskip("pace.server.network.run", exc_type=ImportError)
    with run.listening(ServeOptions("tiny", port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            main(["serve", "--port", str(port)])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"pace: error: --port={port} at 127.0.0.1 cannot be opened (Address already in use)")


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "httptools"])
def test_a_missing_package_is_named(monkeypatch, capsys, missing):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find_spec(name))
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == f'pace: error: pace serve needs {missing}: pip install "pace-llm[serve]"\n'
