"""Input and output files of a batch: valid and refused lines, and the state after a run was killed."""

from __future__ import annotations

import asyncio
import io
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from pace.server.batch.lines import BatchInput, Line, read_line
from pace.server.batch.results import Results, answered, refused
from pace.server.batch.run import BatchStopped, Counts, run
from tests.waiting import wait_until


def request(custom_id: str, **body) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body})


def lines_of(text: str | bytes) -> BatchInput:
    return BatchInput(io.BytesIO(text.encode() if isinstance(text, str) else text), "in")


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


async def echo(url: str, body: dict) -> tuple[int, dict]:
    await asyncio.sleep(0)
    return 200, {"url": url, "echo": body}


def run_all(lines: BatchInput, path: Path, answer=echo, max_concurrency: int = 4) -> Counts:
    with Results.open(path) as results:
        return asyncio.run(run(lines, answer, results, max_concurrency, lambda done: None))


# -- input -------------------------------------------------------------------------------------------------------------


def test_lines_are_read():
    lines = lines_of(b"\xef\xbb\xbf" + request("a", n=1).encode() + b"\r\n\n" + request("\u00e9", n=2).encode())
    assert list(lines) == [Line(1, "a", "/v1/completions", {"n": 1}), Line(3, "\u00e9", "/v1/completions", {"n": 2})]
    assert lines.check() == 2


@pytest.mark.parametrize(
    "line, custom_id, code, words",
    [
        ('{"custom_id": "a", ', None, "invalid_json_line", "the line is not JSON"),
        ("[1]", None, "invalid_json_line", "not a JSON object"),
        ('{"custom_id": "a", "custom_id": "b"}', None, "invalid_json_line", "duplicate"),
        ("[" * 10_000, None, "invalid_json_line", "128 levels"),
        (b'{"custom_id": "\xff"}', None, "invalid_json_line", "not UTF-8"),
        ('{"method": "POST"}', None, "missing_required_parameter", "custom_id"),
        ('{"custom_id": 5}', None, "missing_required_parameter", "custom_id"),
        ('{"custom_id": "a", "method": "GET", "url": "/", "body": {}}', "a", "invalid_method", "POST"),
        ('{"custom_id": "a", "method": "POST", "url": 3, "body": {}}', "a", "invalid_url", "/v1/chat"),
        ('{"custom_id": "a", "method": "POST", "url": "/", "body": "x"}', "a", "invalid_request", "body"),
    ],
)
def test_a_line_that_is_no_request_has_its_reason(line, custom_id, code, words):
    found = read_line(line if isinstance(line, bytes) else line.encode(), 7)
    assert (found.number, found.custom_id, found.error.code) == (7, custom_id, code) and words in found.error.message


def test_duplicates_are_named_by_their_lines():
    text = "\n".join([request("a"), request("b"), "{bad", request("a"), request("b"), request("c")])
    with pytest.raises(
        ValueError, match=r"in: each custom_id must be unique: 'a' in lines 1 and 4; 'b' in lines 2 and 5$"
    ):
        lines_of(text).check()
    with pytest.raises(ValueError, match=r"lines 1 and 6, and 3 more$"):
        lines_of("\n".join([request("a")] * 9)).check()


def test_a_stream_can_be_read_twice():
    with BatchInput.spool(io.BytesIO(request("a").encode())) as lines:
        assert [line.custom_id for line in lines] == [line.custom_id for line in lines] == ["a"]


# -- output ------------------------------------------------------------------------------------------------------------


def test_results_have_openais_form(tmp_path):
    lines = lines_of("\n".join([request("a", n=1), "{bad", request("b")]))

    async def answer(url, body):
        return (200, {"ok": 1}) if body else (400, {"error": {"message": "empty"}})

    assert run_all(lines, tmp_path / "out", answer) == Counts(answered=1, failed=2)
    results = {result["custom_id"]: result for result in read(tmp_path / "out")}
    assert all(set(result) == {"id", "custom_id", "response", "error"} for result in results.values())
    assert len({result["id"] for result in results.values()}) == 3
    assert results["a"]["response"].pop("request_id") != results["b"]["response"].pop("request_id")
    assert results["a"]["response"] == {"status_code": 200, "body": {"ok": 1}} and results["a"]["error"] is None
    assert results["b"]["response"] == {"status_code": 400, "body": {"error": {"message": "empty"}}}
    assert results[None]["response"] is None
    assert results[None]["error"] | {"message": ""} == {
        "code": "invalid_json_line",
        "message": "",
        "param": None,
        "line": 2,
    }


def test_what_is_done_is_not_done_again(tmp_path):
    lines = lines_of("\n".join(["{bad", *(request(str(i)) for i in range(6)), "{}"]))
    run_all(lines_of("\n".join(["{bad", request("2"), request("4")])), tmp_path / "out")
    asked = []

    async def answer(url, body):
        asked.append(body)
        return 200, {}

    assert run_all(lines, tmp_path / "out", answer) == Counts(answered=4, failed=1)
    assert len(asked) == 4
    ids = [result["custom_id"] for result in read(tmp_path / "out")]
    assert sorted(ids, key=str) == ["0", "1", "2", "3", "4", "5", None, None]
    assert run_all(lines, tmp_path / "out", answer) == Counts()


def test_a_last_line_that_was_not_finished_is_cut_off(tmp_path):
    path = tmp_path / "out"
    run_all(lines_of("\n".join(request(str(i)) for i in range(3))), path, max_concurrency=1)
    whole = path.read_bytes()
    second = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for end in (second + 1, second + 30, len(whole) - 1):
        path.write_bytes(whole[:end])
        with Results.open(path) as results:
            assert path.read_bytes() == whole[:second]
            assert [results.has(Line(9, str(i))) for i in range(3)] == [True, True, False]


@pytest.mark.parametrize(
    "content", [b"my diary", b'{"a": 1}\n', b"[]\n", b'{"id":"batch_req_1"}\n', b'{"custom_id": null, "error": null}\n']
)
def test_a_file_of_anything_else_is_left_alone(tmp_path, content):
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="line 1 is not a result of a batch"):
        Results.open(path)
    assert path.read_bytes() == content


def test_one_process_at_a_time_writes(tmp_path):
    with Results.open(tmp_path / "out"):
        with pytest.raises(ValueError, match="another process"):
            Results.open(tmp_path / "out")
    Results.open(tmp_path / "out").close()


def test_results_go_to_the_disk_now_and_then(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(now))
    monkeypatch.setattr(time, "monotonic", lambda: now)
    now = 0.0
    results = Results.open(tmp_path / "out")
    for step in range(30):
        now = step / 10
        results.append(answered(Line(step, str(step)), 200, {}))
    assert synced == [1.0, 2.0]
    results.close()
    assert synced == [1.0, 2.0, 2.9]


def test_a_stream_gets_the_same_lines():
    reader, writer = os.pipe()
    with Results.to(writer) as results:
        results.append(refused(read_line(b"{", 3)))
    with open(reader, "rb") as stream:
        assert json.loads(stream.read())["error"]["line"] == 3


# -- runs --------------------------------------------------------------------------------------------------------------


def test_many_are_under_way_and_no_more_than_asked_for(tmp_path):
    now = most = 0

    async def answer(url, body):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.002)
        now -= 1
        return 200, {}

    run_all(lines_of("\n".join(request(str(i)) for i in range(50))), tmp_path / "out", answer, max_concurrency=7)
    assert most == 7 and len(read(tmp_path / "out")) == 50


def test_a_model_that_is_gone_ends_the_run_without_results(tmp_path):
    async def answer(url, body):
        await asyncio.sleep(0)
        return (200, {}) if body["i"] < 5 else (503, {"error": {"message": "the engine has ended"}})

    lines = lines_of("\n".join(request(str(i), i=i) for i in range(20)))
    with pytest.raises(BatchStopped, match="the engine has ended"):
        run_all(lines, tmp_path / "out", answer, max_concurrency=2)
    assert {result["response"]["status_code"] for result in read(tmp_path / "out")} == {200}
    assert run_all(lines, tmp_path / "out") == Counts(answered=20 - 5)


async def slowly(url: str, body: dict) -> tuple[int, dict]:
    await asyncio.sleep(0.005)
    return 200, {"echo": body, "filler": "x" * 2000}


def test_ctrl_c_loses_nothing(tmp_path):
    lines = lines_of("\n".join(request(str(i)) for i in range(40)))
    num_asked = 0

    async def answer(url, body):
        nonlocal num_asked
        num_asked += 1
        if num_asked == 21:
            os.kill(os.getpid(), signal.SIGINT)
        return await slowly(url, body)

    with pytest.raises(KeyboardInterrupt):
        run_all(lines, tmp_path / "out", answer)
    num_done = len(read(tmp_path / "out"))
    assert num_asked - 4 <= num_done < 40
    assert run_all(lines, tmp_path / "out") == Counts(answered=40 - num_done)


def test_a_run_that_is_killed_again_and_again_has_the_same_results(tmp_path):
    path, lines = tmp_path / "out", lines_of("\n".join(["{bad", *(request(str(i), i=i) for i in range(60))]))
    fork = multiprocessing.get_context("fork")
    for num_wanted in (10, 30, 45):

        async def some(url: str, body: dict, num_wanted: int = num_wanted) -> tuple[int, dict]:
            """Answers no more once the file has the wanted lines: only the four that are under way may still come."""
            while path.read_bytes().count(b"\n") >= num_wanted:
                await asyncio.sleep(0.001)
            return await slowly(url, body)

        process = fork.Process(target=run_all, args=(lines, path, some))
        process.start()
        wait_until(lambda num_wanted=num_wanted: path.exists() and path.read_bytes().count(b"\n") >= num_wanted)
        process.kill()
        process.join()
        with path.open("ab") as file:  # as if the run was killed in the middle of a write
            file.write(b'{"id":"batch_req_12')
    assert process.exitcode == -signal.SIGKILL and 45 <= path.read_bytes().count(b"\n") < 61
    run_all(lines, path, slowly)
    results = read(path)
    answers = sorted(result["response"]["body"]["echo"]["i"] for result in results if result["response"])
    assert answers == list(range(60)) and len(results) == 61
