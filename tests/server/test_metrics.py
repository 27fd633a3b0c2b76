"""The page of `/metrics`, compared with the requests that were sent."""

from __future__ import annotations

import pytest

from tests.server.serving import LONG, Serving


def values(serving: Serving) -> dict[str, float]:
    lines = serving.ask("/metrics").body.decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_counts_grow_by_what_was_answered(serving):
    before = values(serving)
    usage = serving.chat(LONG, max_tokens=20, ignore_eos=True).json["usage"]
    serving.check_idle()
    after = values(serving)

    def grown(name: str) -> float:
        return after[f"pace:{name}"] - before.get(f"pace:{name}", 0.0)

    assert grown("prompt_tokens_total") == usage["prompt_tokens"]
    assert grown("generation_tokens_total") == usage["completion_tokens"] == 20
    assert grown('request_success_total{finished_reason="length"}') == 1
    assert grown('http_requests_total{route="/v1/chat/completions",status="200"}') == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == 1 and grown(f"{name}_sum") > 0
    assert grown('request_generation_tokens_bucket{le="20.0"}') == 1
    assert after["pace:num_requests_running"] == after["pace:num_requests_waiting"] == 0


def test_refusals_are_counted_by_status(serving):
    before = values(serving)
    serving.chat(temperature=-1)
    name = 'pace:http_requests_total{route="/v1/chat/completions",status="400"}'
    assert values(serving)[name] == before.get(name, 0) + 1


def test_all_requests_are_counted(serving):
    before = values(serving)
    serving.ask("/v1/models")
    serving.ask("/v1/models/none")
    serving.ask("/nowhere")
    after = values(serving)
    for route, status in (("/v1/models", 200), ("/v1/models/{name:path}", 404), ("other", 404), ("/metrics", 200)):
        name = f'pace:http_requests_total{{route="{route}",status="{status}"}}'
        assert after[name] == before.get(name, 0) + 1, name


def test_another_prefix():
    with Serving(metrics_prefix="vllm") as serving:
        serving.check_well()
        assert "vllm:generation_tokens_total" in values(serving)
        assert not any(name.startswith("pace:") for name in values(serving))


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/v1/models/tiny", "/limits", "/version", "/props", "/live",
"/health", "/ready", "/openapi.json"])  # fmt: skip
def test_information_is_json(serving, path):
    reply = serving.ask(path)
    assert reply.status == 200 and reply.json
