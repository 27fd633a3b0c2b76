"""`/v1/rerank`, `/v1/score`, `/v1/classify` and `/predict`: order, names, activations, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.server.embeddings.fake_model import BEGIN, END, FakeModel, row_of
from tests.server.embeddings.serving import EncodingServing

DOCUMENTS = ["w4", "w5", "w6", "w7 w8"]
LABELS = ["anger", "joy", "fear"]


@pytest.fixture(scope="module")
def ranker() -> Iterator[EncodingServing]:
    with EncodingServing(FakeModel(labels=["LABEL_0"])) as running:
        yield running


@pytest.fixture(scope="module")
def classifier() -> Iterator[EncodingServing]:
    with EncodingServing(FakeModel(labels=LABELS)) as running:
        yield running


def logit(query: str, document: str) -> float:
    ids = lambda text: [int(word[1:]) for word in text.split()]
    return row_of((BEGIN, *ids(query), END, *ids(document), END), 1).item()


def sigmoid(value: float) -> float:
    return torch.sigmoid(torch.tensor(value)).item()


LOGITS = [logit("w9", document) for document in DOCUMENTS]
ORDER = sorted(range(4), key=lambda index: -LOGITS[index])


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank", "/v1/reranking", "/reranking"])
def test_documents_come_best_first(ranker, path):
    reply = ranker.ask(path, {"query": "w9", "documents": DOCUMENTS})
    results = reply.json["results"]
    assert [result["index"] for result in results] == ORDER
    scores = [result["relevance_score"] for result in results]
    assert scores == pytest.approx([sigmoid(LOGITS[index]) for index in ORDER]) and scores == sorted(scores)[::-1]
    assert reply.json["usage"] == {"prompt_tokens": 21, "total_tokens": 21} and reply.json["model"] == "fake"
    assert all(set(result) == {"index", "relevance_score"} for result in results)


def test_settings_of_a_ranking(ranker):
    body = {"query": "w9", "documents": [DOCUMENTS[0], *({"text": text} for text in DOCUMENTS[1:])]}
    found = ranker.ask("/rerank", {**body, "return_documents": True, "top_n": 2}).json["results"]
    assert [result["document"] for result in found] == [{"text": DOCUMENTS[index]} for index in ORDER[:2]]
    assert found == ranker.ask("/rerank", {**body, "return_text": True, "top_n": 2}).json["results"]
    assert len(ranker.ask("/rerank", {**body, "top_n": 99}).json["results"]) == 4
    assert ranker.ask("/rerank", {**body, "truncation_direction": "Left"}).error["param"] == "truncation_direction"
    for raw in ({"use_activation": False}, {"raw_scores": True}):
        found = ranker.ask("/rerank", {**body, **raw}).json["results"]
        assert [result["relevance_score"] for result in found] == pytest.approx([LOGITS[index] for index in ORDER])


def test_texts_have_the_form_of_tei(ranker):
    found = ranker.ask("/rerank", {"query": "w9", "texts": DOCUMENTS, "return_text": True, "top_n": 3}).json
    assert [(entry["index"], entry["text"]) for entry in found] == [(index, DOCUMENTS[index]) for index in ORDER[:3]]
    assert [entry["score"] for entry in found] == pytest.approx([sigmoid(LOGITS[index]) for index in ORDER[:3]])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": 123}, "documents"),
        ({"documents": "w4"}, "documents"),
        ({"documents": ["w4", 2]}, "documents[1]"),
        ({"documents": ["w4", {"image": "x"}]}, "documents[1]"),
        ({"documents": ["w4", {"text": 5}]}, "documents[1].text"),
        ({"documents": ["w4"], "texts": ["w4"]}, "documents"),
        ({"documents": ["w4", "w5 " * 20]}, "documents[1]"),
        ({"query": None}, "query"),
        ({"query": 5}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"use_activation": True, "raw_scores": True}, "raw_scores"),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc"),
        ({"instruction": "Find proofs."}, "instruction"),
    ],
    ids=repr,
)
def test_a_wrong_ranking_is_refused_with_its_place(ranker, fields, param):
    reply = ranker.ask("/rerank", {"query": "w9", "documents": DOCUMENTS, **fields})
    assert reply.status == 400 and reply.error["param"] == param, reply.body


def test_long_documents_are_cut_if_asked(ranker):
    body = {"query": "w9", "documents": ["w5 " * 40]}
    for cut in ({"truncate": True}, {"truncate_prompt_tokens": -1}):
        assert ranker.ask("/rerank", {**body, **cut}).json["usage"]["prompt_tokens"] == 16


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")], ids=repr)
def test_scores_of_pairs(ranker, path, names):
    def scores(first: object, second: object) -> list[float]:
        data = ranker.ask(path, {names[0]: first, names[1]: second}).json["data"]
        assert [(entry["index"], entry["object"]) for entry in data] == [(i, "score") for i in range(len(data))]
        return [entry["score"] for entry in data]

    assert scores("w9", "w4") == pytest.approx([sigmoid(LOGITS[0])])
    assert scores("w9", DOCUMENTS) == pytest.approx([sigmoid(value) for value in LOGITS])
    pairs = [sigmoid(logit("w9", "w4")), sigmoid(logit("w8", "w5"))]
    assert scores(["w9", "w8"], ["w4", "w5"]) == pytest.approx(pairs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text_1"),
        ({"text_1": "a"}, "text_2"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": "a", "text_2": "b", "queries": "c"}, "text_1"),
    ],
    ids=repr,
)
def test_wrong_pairs_are_refused(ranker, fields, param):
    reply = ranker.ask("/score", fields)
    assert reply.status == 400 and reply.error["param"] == param, reply.body


def test_classes_have_labels_and_probabilities(classifier):
    data = classifier.ask("/v1/classify", {"input": ["w4", "w5 w6"]}).json["data"]
    for entry, ids in zip(data, [(4,), (5, 6)], strict=True):
        probabilities = torch.softmax(row_of((BEGIN, *ids, END), 3), 0)
        assert entry["probs"] == pytest.approx(probabilities.tolist()) and entry["num_classes"] == 3
        assert entry["label"] == LABELS[int(probabilities.argmax())]
    raw = classifier.ask("/classify", {"input": "w4", "use_activation": False}).json["data"][0]["probs"]
    assert raw == pytest.approx(row_of((BEGIN, 4, END), 3).tolist())


def test_predictions_have_the_form_of_tei(classifier):
    one = classifier.ask("/predict", {"inputs": "w4"}).json
    assert {entry["label"] for entry in one} == set(LABELS) and one[0]["score"] == max(entry["score"] for entry in one)
    pair = classifier.ask("/predict", {"inputs": ["w4", "w5"], "raw_scores": True}).json
    assert sorted(entry["score"] for entry in pair) == pytest.approx(sorted(row_of((1, 4, 2, 5, 2), 3).tolist()))
    assert classifier.ask("/predict", {"inputs": [["w4"], ["w4", "w5"]]}).json[0] == one
    for inputs in ([], [["a", "b", "c"]], ["a", "b", "c"], [["a"], 5], 5):
        assert classifier.ask("/predict", {"inputs": inputs}).status == 400


def test_what_a_model_lacks_is_refused(ranker, classifier):
    with EncodingServing() as plain:
        for path, body in (("/rerank", {"query": "a", "documents": ["b"]}), ("/classify", {"input": "a"})):
            reply = plain.ask(path, body)
            assert reply.status == 400 and "/v1/embeddings" in reply.error["message"]
    reply = classifier.ask("/rerank", {"query": "a", "documents": ["b"]})
    assert reply.status == 400 and "/v1/classify" in reply.error["message"]
