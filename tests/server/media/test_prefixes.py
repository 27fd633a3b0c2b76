"""Kept prefixes with images: a later server answers from them, and its tower does not run."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")

from tests.llm.media.talking import load, num_encoded, page, save_talking
from tests.server.schemas.test_media import data_url
from tests.server.serving import Serving

RULES = "Answer in one word, and say what you see. Do not add anything that is not on the page, or that is not asked."
QUESTIONS = ("How much is it?", "Who wrote it?")


def document(number: int, question: str = "") -> list[dict]:
    file = io.BytesIO()
    page(number).save(file, "PNG")
    image = {"type": "image_url", "image_url": {"url": data_url(file.getvalue())}}
    return [{"role": "user", "content": [image, {"type": "text", "text": RULES + question}]}]


def ask(serving: Serving, number: int, question: str) -> tuple[int, str]:
    """Number of cached tokens, and the answer."""
    body = {"model": "tiny", "messages": document(number, question), "max_tokens": 6, "temperature": 0}
    reply = serving.ask("/v1/chat/completions", body)
    assert reply.status == 200, reply.json
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"], reply.json["choices"][0]["message"]["content"]


@pytest.mark.thorough
def test_a_later_server_answers_about_a_kept_page(tmp_path: Path) -> None:
    save_talking(tmp_path / "model")
    folder = tmp_path / "prefixes"
    with load(tmp_path / "model", prefix_cache_bytes=0) as fresh, Serving(fresh.generator) as serving:
        expected = {(number, text): ask(serving, number, text)[1] for number in (0, 1) for text in QUESTIONS}
    with load(tmp_path / "model") as model, Serving(model.generator, prefix_dir=folder) as serving:
        kept = serving.ask("/prefixes", {"name": "page", "messages": document(0)}).json
        assert kept["tokens"] % 16 == 0 and kept["tokens"] > 60 and num_encoded(model) == 1
        image = [{"role": "user", "content": document(0)[0]["content"][:1]}]
        cut = serving.ask("/prefixes", {"name": "short", "messages": image})
        assert cut.status == 400 and "must have more than 16 tokens" in cut.json["error"]["message"], (
            "cut before the image"
        )
        broken = [{"type": "image_url", "image_url": {"url": data_url(b"\x89PNG\r\n\x1a\n")}}]
        bad = serving.ask("/prefixes", {"name": "x", "messages": [{"role": "user", "content": broken}]})
        assert bad.status == 400 and "content[0]" in bad.json["error"]["message"]
    with load(tmp_path / "model") as model, Serving(model.generator, prefix_dir=folder) as serving:
        assert serving.ask("/prefixes").json["data"] == [kept]
        for question in QUESTIONS:
            assert ask(serving, 0, question) == (kept["tokens"], expected[0, question])
        assert num_encoded(model) == 0
        assert ask(serving, 1, QUESTIONS[0]) == (0, expected[1, QUESTIONS[0]]) and num_encoded(model) == 1
        model.generator.driver.call(lambda engine: engine._start_afresh()).result()
        assert ask(serving, 0, QUESTIONS[1]) == (kept["tokens"], expected[0, QUESTIONS[1]])
        assert num_encoded(model) == 1
