"""`/v1/embeddings`: forms of its input, vectors in the order of the texts, and refusals with places."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator

import pytest
import torch

from tests.server.embeddings.fake_model import BEGIN, END, VOCAB_SIZE, WIDTH, FakeModel, row_of
from tests.server.embeddings.serving import EncodingServing, vectors

TOO_LONG = "w5 " * 40


@pytest.fixture(scope="module")
def served() -> Iterator[EncodingServing]:
    with EncodingServing() as running:
        yield running


def vector(*tokens: int, dimensions: int = WIDTH) -> list[float]:
    row = row_of(tokens, WIDTH)[:dimensions]
    return torch.nn.functional.normalize(row, dim=0).tolist()


def as_float32(rows: list[list[float]]) -> list[list[float]]:
    return torch.tensor(rows, dtype=torch.float64).float().tolist()


A, B = (BEGIN, 4, 5, END), (BEGIN, 6, END)


@pytest.mark.parametrize(
    ("texts", "tokens"),
    [
        ("w4 w5", [A]),
        (["w4 w5", "w6"], [A, B]),
        ([*A], [A]),
        ([[*A], [6]], [A, (6,)]),
        (["w6", [*A]], [B, A]),
        ([BEGIN, "w4 w5", END], [A]),
        ({"prompt_string": "w6"}, [B]),
        ([{"text": "w6"}, "w4 w5"], [B, A]),
        (["w6", {"content": [{"type": "text", "text": "w4 "}, {"type": "text", "text": "w5"}]}], [B, A]),
        ("", [(BEGIN, END)]),
        ([""], [(BEGIN, END)]),
    ],
    ids=repr,
)
def test_forms_of_the_input(served, texts, tokens):
    reply = served.embed(texts)
    assert as_float32(vectors(reply)) == as_float32([vector(*ids) for ids in tokens])
    num_tokens = sum(map(len, tokens))
    assert reply.json["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert reply.json["object"] == "list" and reply.json["model"] == "fake"
    assert {entry["object"] for entry in reply.json["data"]} == {"embedding"}


def test_both_formats_have_the_same_values(served):
    plain = vectors(served.embed(["w4", "w5"], encoding_format="float"))
    packed = vectors(served.embed(["w4", "w5"], encoding_format="base64"))
    assert [list(struct.unpack(f"<{WIDTH}f", base64.b64decode(text))) for text in packed] == as_float32(plain)
    assert len(served.embed("w4").body) < 8 * 16 + 200  # no digits beyond float32's


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings"])
def test_paths(served, path):
    assert served.ask(path, {"input": "w4", "user": "me"}).headers.get("x-pace-ignored") is None


def test_settings(served):
    assert as_float32(vectors(served.embed("w4", dimensions=3))) == as_float32([vector(BEGIN, 4, END, dimensions=3)])
    assert vectors(served.embed("w4", prompt_name="query")) == vectors(served.embed("w9 w4"))
    plain, adapted = vectors(served.embed(["w8 w4", [1, 8, 4, 2]])), vectors(served.embed("w4", task="match"))
    assert plain[0] == plain[1] and as_float32(adapted) == [[-x for x in as_float32(plain)[0]]]
    assert vectors(served.embed([[1, 8, 4, 2]], task="match")) == adapted, "ids get the adapter, and no prompt"
    jinas = served.embed("w4", embedding_type="base64", normalized=True, late_chunking=False)
    assert vectors(jinas) == vectors(served.embed("w4", encoding_format="base64"))
    for fields in ({"normalize": False}, {"normalized": False}, {"embd_normalize": -1}):
        raw = as_float32(vectors(served.embed("w4", **fields)))
        assert raw == [row_of((BEGIN, 4, END), WIDTH).tolist()]
    assert vectors(served.embed("w4", embd_normalize=2)) == vectors(served.embed("w4"))
    tei = served.ask("/embed", {"inputs": ["w4", "w5"], "normalize": True, "truncate": True})
    assert served.ask("/", {"inputs": ["w4", "w5"], "normalize": True, "truncate": True}).json == tei.json
    assert tei.json == vectors(served.embed(["w4", "w5"]))


def test_default_dimensions():
    with EncodingServing(dimensions=4) as served:
        assert [len(row) for row in vectors(served.embed(["w4"]))] == [4]
        assert [len(row) for row in vectors(served.embed(["w4"], dimensions=2))] == [2]
        assert served.ask("/props").json["dimensions"] == 4
    with pytest.raises(ValueError, match="dimensions must be in"):
        EncodingServing(FakeModel(matryoshka=[4, 8]), dimensions=3)


def test_a_large_request_has_the_vectors_of_its_texts(served, monkeypatch):
    """It is tokenised and computed in several parts."""
    monkeypatch.setattr("pace.server.embeddings.running.PART_TOKENS", 50)
    texts = [f"w{3 + index % 60} " * (1 + index % 13) for index in range(500)]
    assert vectors(served.embed(texts)) == [vectors(served.embed(text))[0] for text in texts[:60]] + vectors(
        served.embed(texts[60:])
    )


def test_a_text_that_is_too_long(served):
    """The message has the words that clients of OpenAI and of llama.cpp look for."""
    error = refused(served, ["w4", TOO_LONG], "input[1]")
    assert "too large: 42 tokens" in error["message"] and error["code"] == "context_length_exceeded"
    assert "this model's maximum context length is 16 tokens" in error["message"].lower()
    assert refused(served, "a" * 5000, "input")["code"] == "context_length_exceeded"
    assert refused(served, [4] * 17, "input")["n_prompt_tokens"] == 17
    cut = vectors(served.embed([TOO_LONG, [5] * 40], truncate_prompt_tokens=-1))
    assert as_float32(cut) == as_float32([vector(BEGIN, *[5] * 14, END), vector(*[5] * 16)])
    assert vectors(served.embed([TOO_LONG, [5] * 40], truncate=True)) == cut, "the name in Jina's API"
    refused(served, TOO_LONG, "input", truncate=False)
    cut = vectors(served.embed([TOO_LONG, [5] * 40, "w4"], truncate_prompt_tokens=5))
    assert as_float32(cut) == as_float32([vector(BEGIN, 5, 5, 5, END), vector(*[5] * 5), vector(BEGIN, 4, END)])
    refused(served, "w4 w5", "truncate_prompt_tokens", truncate_prompt_tokens=1)


def refused(served: EncodingServing, texts: object, param: str | None, **fields: object) -> dict:
    reply = served.embed(texts, **fields)
    assert reply.status == 400, reply.body
    assert reply.error["param"] == param and reply.error["message"], reply.body
    return reply.error


@pytest.mark.parametrize(
    ("texts", "param"),
    [
        ([], "input"),
        ([[]], "input[0]"),
        (["a"] * 2049, "input"),
        (["a", 5.5], "input[1]"),
        ([4, -1], "input[1]"),
        ([4, True], "input[1]"),
        ([[4], [VOCAB_SIZE]], "input[1]"),
        ([2**40], "input"),
        (None, "input"),
        (5, "input"),
        ({"content": "a"}, "input"),
        ([{"text": 5}], "input[0].text"),
        ([{"text": "a", "image": "b"}], "input[0]"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "input"),
        (["a", {"content": [{"type": "unknown"}]}], "input[1].content[0]"),
        ({"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}, "input.content[0]"),
        ({"content": [{"type": "text"}]}, "input.content[0].text"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_a_wrong_input_is_refused_with_its_place(served, texts, param):
    refused(served, texts, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": WIDTH + 1}, "dimensions"),
        ({"dimensions": "4"}, "dimensions"),
        ({"prompt_name": "unknown"}, "prompt_name"),
        ({"task": "unknown"}, "task"),
        ({"task": 3}, "task"),
        ({"late_chunking": True}, "late_chunking"),
        ({"embedding_type": "ubinary"}, "embedding_type"),
        ({"normalized": True, "normalize": True}, "normalized"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"embd_normalize": 1}, "embd_normalize"),
        ({"embd_normalize": 2, "normalize": True}, "embd_normalize"),
        ({"priority": 5}, "priority"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ],
    ids=repr,
)
def test_a_wrong_field_is_refused_by_name(served, fields, param):
    refused(served, "a", param, **fields)


def test_ids_take_no_prompt_and_name_the_remedy(served):
    assert "prompt_name" in refused(served, [[4]], "input[0]", prompt_name="query")["message"]
    assert "check_embedding_ctx_length=False" in refused(served, [[VOCAB_SIZE]], "input[0]")["message"]


def test_dimensions_of_a_matryoshka_model():
    with EncodingServing(FakeModel(matryoshka=[4, 8])) as served:
        assert len(vectors(served.embed("a", dimensions=4))[0]) == 4
        refused(served, "a", "dimensions", dimensions=5)


def test_limits_of_a_request():
    with EncodingServing(inputs=3, input_tokens=20) as served:
        refused(served, ["a"] * 4, "input")
        assert "20 tokens" in refused(served, ["a " * 10] * 2, "input")["message"]
        assert served.embed(["a"] * 3).status == 200
