"""`pace batch` with the bundled model: the answers equal the server's, and a second run has nothing to do."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")

from pace.assets import TINY
from pace.cli import main

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str, **body) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"temperature": 0, **body}}) + "\n"


def question(custom_id: str, country: str, **body) -> str:
    content = f"What is the capital of {country}?"
    return line(custom_id, CHAT, messages=[{"role": "user", "content": content}], **body)


def read(path: Path) -> dict[str | None, dict]:
    return {result["custom_id"]: result for result in map(json.loads, path.read_text().splitlines())}


def test_a_batch(tmp_path, capfd):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        question("france", "France", model="tiny")
        + question("italy", "Italy")
        + line("count", COMPLETIONS, prompt=["1, 2, 3, 4,", "1, 2, 3, 4,"], max_tokens=4, model="tiny")
        + "{bad\n"
        + question("other", "France", model="gpt-4o")
        + question("stream", "France", stream=True)
        + line("wrong", CHAT, messages=5)
        + line("nowhere", "/v1/embeddings", input="x")
    )
    assert main(["batch", str(source), str(target), "--kv-cache-bytes", "64MiB"]) == 1
    out, err = capfd.readouterr()
    assert out == "" and err == "pace: 3 requests answered, 5 failed\n"
    results = read(target)
    france = results["france"]["response"]["body"]
    assert france["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert france["object"] == "chat.completion" and france["model"] == "tiny"
    assert "Rome" in results["italy"]["response"]["body"]["choices"][0]["message"]["content"]
    counted = results["count"]["response"]["body"]
    assert [choice["text"] for choice in counted["choices"]] == [counted["choices"][0]["text"]] * 2
    assert counted["choices"][0]["text"].startswith(" 5") and counted["usage"]["completion_tokens"] == 8
    for name, status, word in [
        ("other", 404, "gpt-4o"),
        ("stream", 400, "stream"),
        ("wrong", 400, "messages"),
        ("nowhere", 404, "/v1/embeddings"),
    ]:
        response = results[name]["response"]
        assert response["status_code"] == status and word in response["body"]["error"]["message"], name
    assert results[None]["error"]["line"] == 4

    before = target.read_bytes()
    assert main(["batch", str(source), str(target)]) == 1
    told = "pace: nothing to do: 3 answered and 5 failed before\n"
    assert capfd.readouterr().err == told and target.read_bytes() == before
    target.write_bytes(b"".join(line for line in before.splitlines(True) if b'"status_code":200' in line))
    source.write_text(question("france", "France") + question("italy", "Italy") + question("spain", "Spain"))
    assert main(["batch", str(source), str(target), "--kv-cache-bytes", "64MiB"]) == 0
    assert capfd.readouterr().err == "pace: 1 request answered, 0 failed; 2 answered and 0 failed before\n"


def test_from_stdin_to_stdout_under_any_name(capfd, monkeypatch):
    stdin = io.TextIOWrapper(io.BytesIO(question("a", "France", model="gpt-4o").encode()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["batch", "-", "-", "--any-model-name", "--max-concurrency", "1", "--kv-cache-bytes", "64MiB"]) == 0
    out, err = capfd.readouterr()
    body = json.loads(out)["response"]["body"]
    assert body["model"] == "gpt-4o" and "Paris" in body["choices"][0]["message"]["content"]
    assert err == "pace: 1 request answered, 0 failed\n"


def test_what_cannot_be_run_is_refused_before_the_model_is_loaded(tmp_path, capsys):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(question("a", "France") * 2)
    model = ["--model", str(TINY / "is-not-there")]
    assert main(["batch", str(source), str(target), *model]) == 1
    assert "'a' in lines 1 and 2" in capsys.readouterr().err and not target.exists()
    assert main(["batch", str(tmp_path / "none"), str(target), *model]) == 1
    assert "none" in capsys.readouterr().err and not target.exists()
    source.write_text(question("a", "France"))
    with pytest.raises(SystemExit):
        main(["batch", str(source), str(source), *model])
    assert "this is the file of requests" in capsys.readouterr().err
    target.write_text("my diary\n")
    assert main(["batch", str(source), str(target), *model]) == 1
    assert "is not a result of a batch" in capsys.readouterr().err and target.read_text() == "my diary\n"


def test_fields_that_nobody_knows_are_named_once(tmp_path, caplog):
    source = tmp_path / "in.jsonl"
    fields = {"max_tokens": 1, "wat": 1, "priority": -5}
    source.write_text(question("1", "France", **fields) + question("2", "Italy", **fields))
    assert main(["batch", str(source), str(tmp_path / "out.jsonl"), "--kv-cache-bytes", "64MiB"]) == 0
    assert {result["response"]["status_code"] for result in read(tmp_path / "out.jsonl").values()} == {200}
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert told == ["unknown field 'wat' ignored"]
