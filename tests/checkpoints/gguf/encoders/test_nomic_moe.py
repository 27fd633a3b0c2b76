"""GGUF files of nomic-embed-text-v2-moe, as llama.cpp's converter writes them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")

import gguf

from pace.llm import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from tests.checkpoints.gguf.files import finish, stored, tensor_names
from tests.llm.models.encoders.nomic_moe import (
    EPS,
    EXPERTS,
    HEADS,
    HIDDEN,
    INNER,
    LAYERS,
    THETA,
    TOP,
    random_tensors,
    save_nomic_moe,
)

ARCHITECTURE = "nomic-bert-moe"
TEXTS = [TextTokens(tuple(range(4, 4 + length))) for length in (1, 9, 44)]


def write_file(path, tensors, types="F32"):
    """Writes a file. The converter drops the vector after the experts."""
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_eps(EPS)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_rope_freq_base(THETA)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(TOP)
    writer.add_moe_every_n_layers(2)
    names = tensor_names(ARCHITECTURE, LAYERS)
    for name, tensor in tensors.items():
        if name.endswith("experts.bias"):
            continue
        if ".experts.mlp." in name:
            tensor, name = tensor.view(EXPERTS, INNER, HIDDEN), f"{name}.weight"
            tensor = tensor.transpose(1, 2) if ".w2" in name else tensor
        kind = gguf.GGMLQuantizationType[types if tensor.ndim > 1 and "embeddings" not in name else "F32"]
        kind = gguf.GGMLQuantizationType.F32 if tensor.shape[-1] % 32 else kind
        writer.add_tensor(names(name), stored(tensor.float().contiguous(), kind)[0], raw_dtype=kind)
    finish(writer)


def vectors(path, **options):
    with EmbeddingModel(path, dtype="float32", progress=False, **options) as model:
        return model.embed_tokens(TEXTS)


def test_vectors_are_those_of_the_checkpoint(tmp_path):
    """Without the vectors after the experts, which files do not have."""
    tensors = random_tensors(bias=0.0)
    save_nomic_moe(tmp_path / "hub", tensors)
    write_file(tmp_path / "model.gguf", tensors)
    # The file's vectors have length 1.
    expected = torch.nn.functional.normalize(vectors(tmp_path / "hub"), dim=1)
    assert (vectors(tmp_path / "model.gguf") - expected).abs().max() <= 2e-7
    write_file(tmp_path / "small.gguf", tensors, "Q8_0")
    assert torch.nn.functional.cosine_similarity(vectors(tmp_path / "small.gguf"), expected).min() > 0.98
