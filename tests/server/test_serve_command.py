"""`pace serve` up to the moment when it listens; tests/test_cli.py has what any command must do."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from types import ModuleType, SimpleNamespace

import pytest

from pace.cli import main, serve
from pace.llm.speculation.configs import PromptLookupConfig
from pace.server.limits import Limits
from pace.server.options import ServeOptions


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("PACE_API_KEY", raising=False)


def read(*arguments: str) -> ServeOptions:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.serve_options(parser.parse_args(arguments))


def test_what_is_not_given_is_the_default():
    options = read()
    assert options == ServeOptions(load=options.load) and options.model_names == ("tiny",)


def test_every_option_sets_its_field(tmp_path, monkeypatch):
    monkeypatch.setenv("PACE_API_KEY", "one")
    file = tmp_path / "keys"
    file.write_text("two")
    options = read(
        *("org/model", "--prompt-lookup", "--dtype", "float32", "--max-seq-len", "512"),
        *("--host", "0.0.0.0", "--port", "80", "--uds", "/tmp/s", "--api-key-file", str(file)),
        *("--served-model-name", "a", "--served-model-name", "b", "--any-model-name", "--strict", "--allow-priority"),
        *("--cors-origin", "https://a.example", "--allowed-host", "a.example", "--metrics-prefix", "vllm"),
        *("--max-body", "1MiB", "--max-queue", "0", "--max-wait", "1.5", "--max-per-key", "3"),
    )
    assert isinstance(options.load.spec_config, PromptLookupConfig)
    assert (options.load.model_name_or_path, options.load.max_seq_len) == ("org/model", 512)
    assert (options.host, options.port, options.uds) == ("0.0.0.0", 80, "/tmp/s") and options.keys == ("one", "two")
    assert options.model_names == ("a", "b")
    assert options.any_model_name and options.strict and options.allow_priority
    assert (options.cors_origins, options.allowed_hosts) == (("https://a.example",), ("a.example",))
    assert options.metrics_prefix == "vllm"
    assert options.limits == Limits(body_bytes=1 << 20, max_queue=0, max_wait=1.5, max_per_key=3)


def test_every_field_has_an_option():
    names = {field.name for field in fields(ServeOptions)}
    assert set(serve.SERVE_OPTIONS) == names - {"load", "keys", "limits"}
    assert set(serve.LIMIT_OPTIONS) < set(Limits.names())


def test_a_failure_to_listen_is_one_line_and_2(monkeypatch, capsys):
    run = pytest.importorskip("pace.server.network.run", exc_type=ImportError)
    app, service = ModuleType("pace.server.app"), ModuleType("pace.server.service")
    app.make_app = lambda service: None
    service.Service = lambda options: SimpleNamespace()
    monkeypatch.setitem(sys.modules, app.__name__, app)
    monkeypatch.setitem(sys.modules, service.__name__, service)
    with run.listening(ServeOptions(load=SimpleNamespace(model_name_or_path="tiny"), port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SystemExit) as stop:
            main(["serve", "--port", str(port)])
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"pace: error: --port={port} at 127.0.0.1 cannot be opened (Address already in use)")


@pytest.mark.parametrize("missing", ["uvicorn", "fastapi", "httptools"])
def test_a_missing_package_is_named(monkeypatch, capsys, missing):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "pace.server.app":
                raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.delitem(sys.modules, "pace.server.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == f"pace: error: pace serve needs {missing}: pip install pace-llm[serve]\n"
