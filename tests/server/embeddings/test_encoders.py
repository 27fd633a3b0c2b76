"""Real encoders, and a causal model, through the server: the values are those of `EmbeddingModel`, bit by bit."""

from __future__ import annotations

import argparse

import pytest
import torch

from pace.assets import TINY
from pace.cli.serve import add_arguments, make_service, serve_options
from pace.llm.embedding_model import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from pace.server.embeddings.tasks import find_task
from pace.server.network.run import WrongOptions
from pace.server.options import ServeOptions
from tests.server.embeddings.checkpoints import make_checkpoint
from tests.server.embeddings.serving import EncodingServing, vectors

TEXTS = ["the cat sat on the mat", "dog", "the dog ran in the hat and the cat ran", "zebra"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns the folder of a variant."""
    made = {}

    def folder(name: str):
        if name not in made:
            made[name] = make_checkpoint(tmp_path_factory.mktemp(name), name)
        return made[name]

    return folder


def as_tensor(rows: list) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).float()


def test_vectors(folders):
    model = EmbeddingModel(folders("bert"), progress=False)
    with EncodingServing(model) as served:
        expected = model.embed(TEXTS)
        assert torch.equal(as_tensor(vectors(served.embed(TEXTS))), expected)
        for text, row in zip(TEXTS, expected):
            assert torch.equal(as_tensor(vectors(served.embed(text)))[0], row)
        tokens = [list(text.tokens) for text in model.tokenize(TEXTS)]
        assert torch.equal(as_tensor(vectors(served.embed(tokens))), expected)
        cut = as_tensor(vectors(served.embed("the cat " * 90, truncate_prompt_tokens=-1)))
        assert torch.equal(cut, model.embed("the cat " * 90))
        assert served.embed("the cat " * 90).error["n_prompt_tokens"] == 182
        assert torch.equal(as_tensor(vectors(served.embed(TEXTS, dimensions=5))), model.embed(TEXTS, dimensions=5))
    model.close()


def test_ranks_and_scores(folders):
    model = EmbeddingModel(folders("bert-1-label"), progress=False)
    with EncodingServing(model) as served:
        results = served.ask("/rerank", {"query": "the cat", "documents": TEXTS}).json["results"]
        found = [(result["index"], result["relevance_score"]) for result in results]
        expected = model.rank("the cat", TEXTS)
        assert [index for index, _ in found] == [index for index, _ in expected]
        assert torch.equal(as_tensor([score for _, score in found]), as_tensor([score for _, score in expected]))
        data = served.ask("/v1/score", {"text_1": TEXTS, "text_2": TEXTS[::-1]}).json["data"]
        assert torch.equal(as_tensor([entry["score"] for entry in data]), model.score(list(zip(TEXTS, TEXTS[::-1]))))
    model.close()


def test_labels(folders):
    model = EmbeddingModel(folders("bert-classifier"), progress=False)
    with EncodingServing(model) as served:
        data = served.ask("/v1/classify", {"input": TEXTS}).json["data"]
        expected = model.classify(TEXTS)
        assert torch.equal(as_tensor([entry["probs"] for entry in data]), expected)
        assert [entry["label"] for entry in data] == [model.id2label[best] for best in expected.argmax(1).tolist()]
        pairs = [list(pair) for pair in zip(TEXTS, TEXTS[::-1])]
        rows = served.ask("/predict", {"inputs": pairs}).json
        best = model.classify([tuple(pair) for pair in pairs]).max(1).values
        assert torch.equal(as_tensor([row[0]["score"] for row in rows]), best)
    model.close()


def test_a_model_that_generates_makes_vectors_if_asked():
    model = EmbeddingModel(TINY, progress=False, kv_cache_bytes="64MiB")
    with EncodingServing(model) as served:
        texts = ["The capital of France is Paris.", "Once upon a time"]
        assert torch.equal(as_tensor(vectors(served.embed(texts))), model.embed(texts))
    model.close()


@pytest.mark.parametrize(
    ("name", "options", "task"),
    [("bert", {}, "embed"), ("bert-classifier", {}, "embed"), ("bert-masked", {"task": "generate"}, "generate")],
    ids=repr,
)
def test_the_task_of_an_encoder(folders, name, options, task):
    arguments = {"model_name_or_path": folders(name), "spec_config": None}
    assert find_task(ServeOptions("x", **options), arguments) == task


@pytest.mark.parametrize(
    ("model", "options", "task"), [(TINY, {}, "generate"), (TINY, {"task": "embed"}, "embed"), ("/no", {}, "generate")]
)
def test_the_task_of_other_models(model, options, task):
    assert find_task(ServeOptions("x", **options), {"model_name_or_path": model}) == task


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def test_the_command_serves_an_encoder_next_to_a_model_of_text(folders):
    arguments = parsed("--model", f"chat={TINY}", "--model", f"vectors={folders('bert')}")
    pool, _ = make_service(serve_options(arguments), arguments)
    assert [model.task for model in pool.models] == ["generate", "embed"]
    vectors_model = pool.models[1]
    for _ in range(2):
        vectors_model.load()
        assert vectors_model.status == "ready" and vectors_model.described["dimensions"] == 32
        vectors_model.unload()
    pool.close()


def test_options_of_models_of_text(folders, tmp_path):
    encoder, common = str(folders("bert")), ["--max-adapters", "3", "--prompt-lookup", "--prefix-dir", str(tmp_path)]
    common += ["--lora-dir", str(tmp_path), "--dimensions", "8"]
    arguments = parsed("--model", f"chat={TINY}", "--model", f"vectors={encoder}", *common)
    pool, _ = make_service(serve_options(arguments), arguments)
    chat, vectors_model = pool.models
    vectors_model.load()
    assert vectors_model.described["dimensions"] == 8 and chat.options.dimensions is None
    assert vectors_model.options.prefix_dir is None and chat.options.prefix_dir == tmp_path / "model-chat"
    assert chat.load_options.max_adapters == 3 and chat.load_options.spec_config is not None
    pool.close()
    file = tmp_path / "models.toml"
    file.write_text(f'[vectors]\nmodel = "{encoder}"\nmax-adapters = 3\n[chat]\nmodel = "{TINY}"')
    wrong = [[encoder, *words] for words in (common[:2], common[2:3], common[3:5], common[5:7])]
    wrong += [["--models", str(file)], [str(TINY), *common[7:]]]
    for words, name in zip(
        wrong, ("max_adapters", "drafts are", "prefix_dir", "lora_dir", "max_adapters", "dimensions")
    ):
        arguments = parsed(*words)
        with pytest.raises(WrongOptions, match=name):
            make_service(serve_options(arguments), arguments)


def test_ids_are_cut_without_a_tokenizer(folders):
    model = EmbeddingModel(folders("bert"), progress=False)
    expected = model.embed_tokens([TextTokens((5, 6))])
    model.tokenizer = None
    with EncodingServing(model) as served:
        assert torch.equal(as_tensor(vectors(served.embed([5, 6, 7], truncate_prompt_tokens=2))), expected)
    model.close()


@pytest.mark.parametrize(
    "options",
    [{"task": "rank"}, {"dimensions": 0}, {"dimensions": 5, "task": "generate"}, {"dimensions": "5"}],
    ids=repr,
)
def test_wrong_options_are_refused_by_name(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        ServeOptions("x", **options)
