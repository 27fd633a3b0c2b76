"""`GET /props`: the default settings of a request."""

from __future__ import annotations

import pytest

from pace.llm.configs import SamplingConfig
from pace.server.limits import Limits
from pace.server.schemas.chat import ChatRequest
from pace.server.wire.props import settings
from tests.server.serving import QUESTION


@pytest.mark.parametrize(
    "defaults",
    [SamplingConfig(), SamplingConfig(temperature=0.6, top_p=0.8, do_sample=True), SamplingConfig(temperature=0.0),
     SamplingConfig(do_sample=False), SamplingConfig(do_sample=True, top_k=20, min_p=0.1, repetition_penalty=1.1)],
    ids=str,
)  # fmt: skip
def test_they_are_those_of_a_chat_request_that_says_nothing(defaults):
    job = ChatRequest(messages=QUESTION).to_job(Limits(), defaults)
    shown = settings(Limits(), defaults, 1024)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}[name]
        expected = getattr(job.sampling, name) if job.sampling.do_sample else greedy
        assert shown[name] == shown["params"][name] == expected
    assert shown["n_ctx"] == 1024
    if "temperature" in defaults.explicit_fields:
        assert shown["temperature"] == defaults.temperature


def test_over_http(serving):
    props = serving.ask("/props").json
    shown = props["default_generation_settings"]
    assert 0 <= shown["temperature"] and 0 < shown["top_p"] <= 1 and shown["n_ctx"] == serving.service.max_length
    assert props["total_slots"] > 1 and props["model_alias"] == "tiny" and "<|user|>" not in props["eos_token"]
    assert "message" in props["chat_template"] and "/" not in props["model_alias"]
    serving.service.status = "loading"
    try:
        assert serving.ask("/props").status == 503
    finally:
        serving.service.status = "ready"
