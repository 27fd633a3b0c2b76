"""Adapters for tasks inside of a checkpoint, as in jina-embeddings-v3, against transformers with merged matrices."""

from __future__ import annotations

import copy
import json
import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.calibrate import quantize_checkpoint
from pace.integrations.sentence_transformers import SentenceEncoder
from pace.llm import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from pace.llm.operators import OperatorConfig
from tests.llm.encoding.checkpoints import save_bert, write_json

QUERY, PASSAGE, MATCH = TASKS = ("retrieval.query", "retrieval.passage", "text-matching")
INSTRUCTIONS = {QUERY: "the query: ", PASSAGE: "a document. ", MATCH: ""}
RANK, ALPHA = 3, 2.0
TEXTS = ["it rains.", "a", "foxes eat mice, and some eat berries"]
PARAMETRISED = r"(Wqkv|out_proj|fc1|fc2|word_embeddings|token_type_embeddings)\.weight$"
LORA = ".parametrizations.weight.0.lora_"


@pytest.fixture(scope="module")
def jina(tmp_path_factory) -> tuple[Path, dict]:
    """A checkpoint in the spelling of the Hub, and for each task transformers' model with its merged matrices."""
    folder = tmp_path_factory.mktemp("jina")
    oracle = save_bert(folder, "JinaEmbeddingsV3Model", type_vocab_size=1)
    saved, own = load_file(folder / "model.safetensors"), {}
    for name, tensor in saved.items():
        own["roberta." + re.sub(PARAMETRISED, r"\1.parametrizations.weight.original", name)] = tensor
    merged = {task: dict(saved) for task in TASKS}
    for name in [name for name in saved if re.search(PARAMETRISED, name)]:
        rows, columns = saved[name].shape
        is_table = "_embeddings" in name
        a = torch.randn(len(TASKS), *((rows, RANK) if is_table else (RANK, columns))) * 0.2
        b = torch.randn(len(TASKS), *((RANK, columns) if is_table else (rows, RANK))) * 0.2
        module = "roberta." + name.removesuffix(".weight")
        own |= {f"{module}{LORA}A": a, f"{module}{LORA}B": b}
        for index, task in enumerate(TASKS):
            change = a[index] @ b[index] if is_table else b[index] @ a[index]
            merged[task][name] = saved[name] + change * (ALPHA / RANK)
    own |= {f"roberta.pooler.dense{LORA}{part}": torch.randn(3, 4, 4) for part in "AB"}
    fields = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["XLMRobertaLoRA"], "model_type": "xlm-roberta", "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0, "lora_adaptations": list(TASKS), "task_instructions": INSTRUCTIONS,
        "lora_alpha": ALPHA, "lora_rank": RANK, "lora_dropout_p": 0.0, "lora_main_params_trainable": False,
    }  # fmt: skip
    fields.pop("rope_parameters")
    save_file(own, folder / "model.safetensors")
    write_json(folder / "config.json", fields)
    models = {None: oracle}
    for task in TASKS:
        path = folder / task
        oracle.save_pretrained(path)
        save_file(merged[task], path / "model.safetensors", {"format": "pt"})
        models[task] = type(oracle).from_pretrained(path, attn_implementation="eager").eval()
    return folder, models


@pytest.fixture(scope="module")
def model(jina) -> EmbeddingModel:
    return EmbeddingModel(jina[0], dtype="float32", progress=False)


@torch.no_grad()
def expected(jina, model, task, prefix: str) -> torch.Tensor:
    rows = []
    for text in TEXTS:
        ids = torch.tensor([model.tokenizer(prefix + text)["input_ids"]])
        rows.append(jina[1][task](input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0].mean(0))
    return torch.nn.functional.normalize(torch.stack(rows))


def unit(vectors: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vectors)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """The bound of encoders without adapters (2e-6), times two for matrices that were rounded once more."""
    return bool((unit(ours) - theirs).abs().max() <= 4e-6)


def test_vectors_of_each_task(jina, model):
    assert model.tasks == TASKS and model.prompts == INSTRUCTIONS
    plain = expected(jina, model, None, "")
    assert close(model.embed(TEXTS), plain)
    for task in TASKS:
        theirs = expected(jina, model, task, INSTRUCTIONS[task])
        assert (theirs - plain).abs().max() > 0.01
        vectors = model.embed(TEXTS, task=task)
        assert close(vectors, theirs), task
        assert torch.equal(model.embed(TEXTS, prompt=task), vectors), "a prompt brings the task of its name"
    assert close(model.embed(TEXTS, prompt=QUERY, task=MATCH), expected(jina, model, MATCH, INSTRUCTIONS[QUERY]))


def test_as_sentence_transformers(jina, model):
    """There, a prompt brings no task, and a task no prompt."""
    encoder = SentenceEncoder(model)
    for prompt_name, task in ((QUERY, None), (None, QUERY), (QUERY, QUERY), (PASSAGE, MATCH)):
        vectors = encoder.encode(TEXTS, prompt_name=prompt_name, task=task, convert_to_tensor=True)
        assert close(vectors, expected(jina, model, task, INSTRUCTIONS.get(prompt_name, ""))), (prompt_name, task)
    assert close(encoder.encode(TEXTS, prompt="x: ", convert_to_tensor=True), expected(jina, model, None, "x: "))
    for encode, task in ((encoder.encode_query, QUERY), (encoder.encode_document, PASSAGE)):
        assert torch.equal(encode(TEXTS, convert_to_tensor=True), model.embed(TEXTS, task=task))
    assert encoder.encode([]).shape == (0, 32)
    with pytest.raises(ValueError, match="prompt_name must be one of"):
        encoder.encode(TEXTS, prompt_name="query")


def test_tasks_share_steps_with_the_same_bits(jina, model):
    """Texts of several tasks, and of none, next to each other."""
    texts = [text for task in (None, *TASKS) for text in model.tokenize(TEXTS, task=task)]
    texts += [TextTokens(text.tokens, task=MATCH) for text in texts[:3]]
    alone = torch.cat([model.embed_tokens([text]) for text in texts])
    assert torch.equal(model.embed_tokens(texts), alone)
    assert torch.equal(model.embed_tokens(texts[::-1]), alone.flip(0))
    plain = json.loads((jina[0] / "config.json").read_text())
    del plain["lora_adaptations"], plain["task_instructions"]
    with EmbeddingModel(beside(jina[0], "plain", plain), dtype="float32", progress=False) as other:
        assert torch.equal(other.embed(TEXTS), alone[:3])


@pytest.mark.parametrize("backend", ["torch", "mixed"])
def test_backends(jina, model, backend):
    mixed = OperatorConfig(mlp="torch") if backend == "mixed" else backend
    with EmbeddingModel(jina[0], dtype="float32", backend=mixed, progress=False) as other:
        for task in (None, PASSAGE):
            assert close(other.embed(TEXTS, task=task), unit(model.embed(TEXTS, task=task)))


def beside(folder: Path, name: str, config: dict, tensors: dict | None = None) -> Path:
    """Makes a folder in another one, with its weights and a config of its own."""
    path = folder / name
    path.mkdir(exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (path / file).unlink(missing_ok=True)
        (path / file).symlink_to(folder / file)
    write_json(path / "config.json", config)
    if tensors is not None:
        (path / "model.safetensors").unlink()
        save_file(tensors, path / "model.safetensors")
    return path


def test_default_task_and_wrong_names(jina, model):
    for name in ("query", "separation"):
        with pytest.raises(ValueError, match=f"one of this model's tasks, 'retrieval.query', .*; got '{name}'"):
            model.embed(TEXTS, task=name)
        with pytest.raises(ValueError, match="has no adapter for"):
            model.embed_tokens([TextTokens((3, 4), task=name)])
    config = json.loads((jina[0] / "config.json").read_text())
    folder = beside(jina[0], "default", config)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 64, "model_args": {"default_task": MATCH}})
    with EmbeddingModel(folder, dtype="float32", progress=False) as other:
        assert torch.equal(other.embed(TEXTS), model.embed(TEXTS, task=MATCH))
        assert torch.equal(other.embed(TEXTS, task=QUERY), model.embed(TEXTS, task=QUERY))
    write_json(folder / "sentence_bert_config.json", {"model_args": {"default_task": "other"}})
    with pytest.raises(ValueError, match="'other' is none of the tasks"):
        EmbeddingModel(folder, dtype="float32", progress=False)


def test_quantised_checkpoints_keep_their_tasks(jina, tmp_path):
    quantize_checkpoint(jina[0], tmp_path / "int8", "int8", progress=False)
    with EmbeddingModel(tmp_path / "int8", dtype="float32", progress=False) as found:
        with EmbeddingModel(jina[0], dtype="float32", quantization="int8", progress=False) as at_load:
            assert found.tasks == TASKS
            for task in (None, QUERY):
                assert torch.equal(found.embed(TEXTS, task=task), at_load.embed(TEXTS, task=task))


CONFIGS = {
    "must be names of tasks": {"lora_adaptations": ["a", 3]},
    "names a task twice": {"lora_adaptations": ["a", "a"]},
    "must map tasks to texts": {"task_instructions": ["a"]},
    "'other', which is not a task": {"task_instructions": {"other": "x"}},
    "lora_rank is 4 in config.json": {"lora_rank": 4},
    r"must be floats \[2, ...\]": {"lora_adaptations": ["a", "b"], "task_instructions": {}},
}


def test_damaged_checkpoints(jina, caplog):
    config, tensors = json.loads((jina[0] / "config.json").read_text()), load_file(jina[0] / "model.safetensors")
    for message, fields in CONFIGS.items():
        with pytest.raises(ValueError, match=message):
            EmbeddingModel(beside(jina[0], "damaged", config | fields), dtype="float32", progress=False)
    name = f"roberta.encoder.layers.0.mixer.Wqkv{LORA}"
    with_nan = copy.deepcopy(tensors)
    with_nan[name + "B"][0, 0, 0] = torch.nan
    without = {key: tensor for key, tensor in tensors.items() if key != name + "A"}
    for changed, message in ((with_nan, "not finite"), (without, "lora_A is missing")):
        with pytest.raises(ValueError, match=message):
            EmbeddingModel(beside(jina[0], "damaged", config, changed), dtype="float32", progress=False)
    none = {key: tensor for key, tensor in tensors.items() if LORA not in key}
    with caplog.at_level(logging.WARNING, "pace"):
        with EmbeddingModel(beside(jina[0], "damaged", config, none), dtype="float32", progress=False) as other:
            assert other.tasks == () and "without a task" in caplog.text
