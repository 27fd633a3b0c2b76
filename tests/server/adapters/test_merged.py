"""`pace serve --merge-adapter`."""

from __future__ import annotations

import argparse

import pytest

from pace.assets import TINY
from pace.cli import serve
from pace.llm import LLMModel
from tests.llm.adapters.saved import save_adapter

pytest.importorskip("starlette")


def test_an_adapter_is_merged_when_the_model_is_loaded(tmp_path) -> None:
    save_adapter(tmp_path / "poet", 1)
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    arguments = parser.parse_args([str(TINY), "--merge-adapter", str(tmp_path / "poet"), "--kv-cache-bytes", "32MiB"])
    pool, _ = serve.make_service(serve.serve_options(arguments), arguments)
    [service] = pool.models
    service.load()
    try:
        ask = dict(max_new_tokens=12, ignore_eos=True)
        served = service.generator.generate("Once upon a time", **ask).texts
    finally:
        service.unload()
    with LLMModel(TINY, kv_cache_bytes="32MiB") as base:
        assert served != base.generate("Once upon a time", **ask).texts
    with LLMModel(TINY, kv_cache_bytes="32MiB", adapter=tmp_path / "poet", merge=True) as merged:
        assert served == merged.generate("Once upon a time", **ask).texts
