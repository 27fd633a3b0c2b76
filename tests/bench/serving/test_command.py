"""`pace bench --serve URL` as a command: its table, its JSON, its files, and the options that it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pace.cli import main
from tests.bench.serving.scripted_server import serving, stream, whole

KEYS = """date backend model_id num_prompts request_rate burstiness max_concurrency duration completed failed
total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput"""


@contextmanager
def in_a_thread(answer) -> Iterator:
    """A ScriptedServer in a thread of the test process."""
    loop, ready, ended, found = asyncio.new_event_loop(), threading.Event(), asyncio.Event(), []

    async def serve():
        async with serving(answer) as server:
            found.append(server)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def answer(index, body):
    if not body:
        return [(0, whole(200, {"data": [{"id": "the-model"}]}))]
    return [(0, whole(429, {"error": {"message": "too many"}}))] if index == 4 else stream(3, first=0.01, gap=0.01)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    saved = tmp_path / "result.json"
    with in_a_thread(answer) as server:
        options = ["--num-prompts", "6", "--max-concurrency", "2", "--goodput", "ttft:500000", "tpot:100000"]
        files = ["--seed", "5", "--save-result", str(saved), "--save-detailed"]
        assert main(["bench", "--serve", server.url + "/v1", *options, *files, "--json"]) == 0
    out, err = capsys.readouterr()
    numbers = json.loads(out)
    assert set(KEYS.split()) <= set(numbers) and err == "" and "secret" not in out
    for metric in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{name}_{metric}_ms" for name in ("mean", "median", "std", "p90", "p99")} <= set(numbers)
    assert (numbers["model_id"], numbers["backend"], numbers["request_rate"]) == ("the-model", "openai", "inf")
    assert (numbers["completed"], numbers["failures"]) == (5, {"HTTP 429": 1}) and numbers["total_output_tokens"] == 15
    assert numbers["request_goodput"] == pytest.approx(numbers["request_throughput"])
    full = json.loads(saved.read_text())
    assert set(full) - set(numbers) == {"input_lens", "output_lens", "ttfts", "itls", "start_times", "errors"}
    assert sorted(full["output_lens"]) == [0, 3, 3, 3, 3, 3]
    # One request for the model's name, one to warm up, and the load.
    assert len(server.bodies) == 8 and all(b"Authorization: Bearer secret" in head for head in server.heads)
    assert {body["model"] for body in server.bodies[1:]} == {"the-model"}


def test_a_picture_and_a_choice_of_numbers(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    with in_a_thread(answer) as server:
        chosen = ["--percentile-metrics", "ttft", "--metric-percentiles", "50,99.9", "--num-warmups", "0"]
        shape = ["--endpoint", "/v1/chat/completions", "--request-rate", "200", "--num-prompts", "4"]
        picture = tmp_path / "load.png"
        assert (
            main(["bench", "my-model", "--serve", server.url, *chosen, *shape, "--json", "--plot", str(picture)]) == 0
        )
    numbers = json.loads(capsys.readouterr().out)
    assert {key for key in numbers if key.endswith("ttft_ms")} == {
        f"{name}_ttft_ms" for name in ("mean", "median", "std", "p50", "p99.9")
    }
    assert "mean_itl_ms" not in numbers and numbers["backend"] == "openai-chat" and numbers["model_id"] == "my-model"
    assert [len(body["messages"]) for body in server.bodies] == [1] * 4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table(capsys):
    with in_a_thread(answer) as server:
        assert main(["bench", "--serve", server.url, "--num-prompts", "6"]) == 0
    table = capsys.readouterr().out
    assert "too many" in table and "TTFT" in table and "{" not in table


def test_a_load_of_which_nothing_is_answered_fails(capsys):
    with in_a_thread(lambda index, body: answer(4, body)) as server:
        command = ["bench", "--serve", server.url, "--num-prompts", "2", "--num-warmups", "0"]
        assert main(command) == 1
    assert "too many" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["tiny", "--request-rate", "3"], "--request-rate needs --serve URL"),
        (["--serve", "http://a", "--profile"], "--profile only applies to a model in this process"),
        (["--serve", "http://a", "--dtype", "float32"], "--dtype only applies to a model in this process"),
        (["--serve", "a:8000"], "'a:8000' is not the URL of a server"),
        (["--serve", "http://a", "--request-rate", "0"], "--request-rate must be more than 0"),
        (["--serve", "http://a", "--range-ratio", "1"], "--range-ratio must be at least 0 and less than 1"),
        (["--serve", "http://a", "--goodput", "itl:5"], "'itl:5' must be ttft, tpot, e2el with milliseconds"),
        (["--serve", "http://a", "--metric-percentiles", "101"], "'101' must be numbers from 0 to 100"),
        (["--serve", "http://a", "--percentile-metrics", "ttft,x"], "'x' must be one of ttft, tpot, itl, e2el"),
        (["--serve", "http://a", "--extra-body", "[]"], "'[]' must be a JSON object"),
        (["--serve", "http://a", "--save-detailed"], "--save-detailed needs --save-result"),
        (["--serve", "http://a", "--timeout", "0"], "must be a number more than 0"),
    ],
)
def test_what_cannot_be_asked_for(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["bench", "--serve", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("pace: error: http://127.0.0.1:1: no answer")
    assert main(["bench", "--serve", "http://127.0.0.1:1", "--save-result", str(tmp_path / "no" / "file")]) == 1
    assert "--save-result" in capsys.readouterr().err
