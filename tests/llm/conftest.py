"""Checkpoints with tokenizers on disk, made by transformers once per session."""

from __future__ import annotations

import functools

import pytest

from tests.llm.models.variants import save_tiny
from tests.llm.text.tokenizer_zoo import ZOO


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Returns `checkpoint(model_type, kind of tokenizer) -> (folder, transformers' model in float32, tokenizer)`."""

    @functools.cache
    def make(model_type: str, kind: str = "byte_level"):
        folder = tmp_path_factory.mktemp(f"{model_type}-{kind}")
        tokenizer = ZOO[kind]()
        fields = {
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 256,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": 1,
        }
        if model_type == "phi3":
            fields["original_max_position_embeddings"] = 256
        if model_type.startswith("gemma4"):
            fields["vocab_size_per_layer_input"] = len(tokenizer)
        if model_type == "mpt":
            fields["max_seq_len"] = fields.pop("max_position_embeddings")
        model = save_tiny(folder, model_type, fields)
        tokenizer.save_pretrained(folder)
        return folder, model, tokenizer

    return make
