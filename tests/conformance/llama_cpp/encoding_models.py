"""Models for llama.cpp's tests of embeddings and ranks, made of all-MiniLM-L6-v2, whose folder is PACE_MINILM.

Its tokenizer is the one of the tests' own model. The tests only check the order of four documents, so a ranker is that
model with a head that is fitted to these.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

DOCUMENTS = {
    "A machine is a physical system that uses power to apply forces and control movement to perform an action. The "
    "term is commonly applied to artificial devices, such as those employing engines or motors, but also to natural "
    "biological macromolecules, such as molecular machines.": 0.0,
    "Learning is the process of acquiring new understanding, knowledge, behaviors, skills, values, attitudes, and "
    "preferences. The ability to learn is possessed by humans, non-human animals, and some machines; there is also "
    "evidence for some kind of learning in certain plants.": 0.0,
    "Machine learning is a field of study in artificial intelligence concerned with the development and study of "
    "statistical algorithms that can learn from data and generalize to unseen data, and thus perform tasks without "
    "explicit instructions.": 2.0,
    "Paris, capitale de la France, est une grande ville européenne et un centre mondial de l'art, de la mode, de la "
    "gastronomie et de la culture. Son paysage urbain du XIXe siècle est traversé par de larges boulevards et la "
    "Seine.": -2.0,
}
"""Document of the tests -> logit for their query."""
QUERY = "Machine learning is"
MAX_LENGTH = 512


def model_of_vectors(pooling: str | None) -> Path:
    """Makes the folder of a model with another pooling. PACE_MINILM is the folder of the model itself."""
    source, home = Path(os.environ["PACE_MINILM"]), Path(tempfile.mkdtemp(prefix="pace-llama-"))
    for file in source.iterdir():
        if file.is_file():
            (home / file.name).symlink_to(file)
    _write(home / "sentence_bert_config.json", {"max_seq_length": MAX_LENGTH, "do_lower_case": False})
    settings = json.loads((source / "1_Pooling" / "config.json").read_text())
    settings = {name: value for name, value in settings.items() if not name.startswith("pooling_mode")}
    name = {"last": "lasttoken", "cls": "cls_token"}.get(pooling or "mean", "mean_tokens")
    (home / "1_Pooling").mkdir()
    _write(home / "1_Pooling" / "config.json", {**settings, f"pooling_mode_{name}": True})
    return home


def make_ranker(source: Path, home: Path) -> None:
    """Makes the folder of a ranker once. `source` is the folder of the model."""
    if (home / "config.json").exists():
        return
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer, BertModel

    home.mkdir(exist_ok=True)
    model, tokenizer = BertModel.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(home)
    with torch.no_grad():
        pairs = tokenizer([QUERY] * len(DOCUMENTS), list(DOCUMENTS), padding=True, return_tensors="pt")
        rows = model(**pairs).pooler_output
    weight = torch.linalg.pinv(rows) @ torch.tensor(list(DOCUMENTS.values()))
    head = {"classifier.weight": weight[None], "classifier.bias": torch.zeros(1)}
    tensors = load_file(source / "model.safetensors")
    tensors = {f"bert.{name.removeprefix('bert.')}": tensor for name, tensor in tensors.items()}
    save_file({**tensors, **head}, home / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    names = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    _write(home / "config.json", {**config, **names, "architectures": ["BertForSequenceClassification"]})


def _write(file: Path, value: object) -> None:
    file.unlink(missing_ok=True)
    file.write_text(json.dumps(value))
