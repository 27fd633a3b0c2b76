"""Models for llama.cpp's tests of embeddings and ranks, made of all-MiniLM-L6-v2, whose folder is PACE_MINILM.

Its tokenizer is the one of the tests' own model. The tests only check the order of four documents, so a ranker is that
model with a head that is fitted to these.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

DOCUMENTS = {"A machine is a": 0.0, "Learning is the": 0.0, "Machine learning is": 2.0, "Paris, capitale de": -2.0}
"""Begin of each document of the tests -> logit for their query."""
QUERY = "Machine learning is"
MAX_LENGTH = 512


def encoding_model(ranks: bool, pooling: str | None) -> Path:
    """The folder of a ranker, or of a model of vectors with another pooling."""
    source, home = Path(os.environ["PACE_MINILM"]), Path(tempfile.mkdtemp(prefix="pace-llama-"))
    kept = ("config.json", "vocab.txt", "tokenizer", "special_tokens_map")
    for file in source.iterdir():
        if file.is_file() and (not ranks or file.name.startswith(kept)):
            (home / file.name).symlink_to(file)
    if ranks:
        _make_ranker(source, home)
        return home
    _write(home / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    settings = json.loads((source / "1_Pooling" / "config.json").read_text())
    modes = {name: value for name, value in settings.items() if not name.startswith("pooling_mode")}
    name = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}.get(pooling or "mean", "mean_tokens")
    (home / "1_Pooling").mkdir()
    _write(home / "1_Pooling" / "config.json", {**modes, f"pooling_mode_{name}": True})
    return home


def _make_ranker(source: Path, home: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, BertModel

    model, tokenizer = BertModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    begins = list(DOCUMENTS)
    with torch.no_grad():
        rows = model(**tokenizer([QUERY] * len(begins), begins, padding=True, return_tensors="pt")).pooler_output
    weight = torch.linalg.pinv(rows) @ torch.tensor(list(DOCUMENTS.values()))
    head = {"classifier.weight": weight[None], "classifier.bias": torch.zeros(1)}
    tensors = load_file(source / "model.safetensors")
    tensors = {f"bert.{name.removeprefix('bert.')}": tensor for name, tensor in tensors.items()}
    save_file({**tensors, **head}, home / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    labels = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
    }
    _write(home / "config.json", {**config, **labels})


def _write(file: Path, value: object) -> None:
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(value))
