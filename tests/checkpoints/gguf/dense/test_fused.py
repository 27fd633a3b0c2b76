"""Files of `convert_hf_to_gguf.py --fuse-qkv` have the bits of those whose queries, keys and values are apart."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

import gguf

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from tests.checkpoints.gguf.dense.dense_files import write_dense
from tests.checkpoints.gguf.files import finish, load, write_gguf
from tests.checkpoints.gguf.gemma4.gemma4_files import write_gemma4
from tests.checkpoints.gguf.hybrids.hybrid_files import write_hybrid
from tests.llm.models.variants import IDS, VARIANTS, save_tiny
from tests.support import prefill

IDS_OF_TOKENS = torch.randint(2, 99, (20,), generator=torch.Generator().manual_seed(1))


def fuse(path: Path, target: Path, missing: str = "-") -> int:
    """Writes a file with fused tensors, and without the key `missing`. Returns the number of fused tensors."""
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", missing):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
    fused = 0
    for name, tensor in tensors.items():
        parts = [re.sub(r"attn_[qkv]\.", f"attn_{part}.", name) for part in "qkv"]
        joins = len(set(parts)) == 3 and all(part in tensors for part in parts)
        if joins and name == parts[0]:
            data = np.concatenate([tensors[part].data for part in parts])
            writer.add_tensor(re.sub(r"attn_q\.", "attn_qkv.", name), data, raw_dtype=tensor.tensor_type)
            fused += 1
        elif not joins:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return fused


def written(tmp_path: Path, name: str, write=write_gguf, **options) -> Path:
    model_type, _, fields = VARIANTS[IDS.index(name)]
    save_tiny(tmp_path / "hub", model_type, fields)
    write(tmp_path / "hub", tmp_path / "model.gguf", **options)
    return tmp_path / "model.gguf"


@pytest.mark.parametrize(
    ("name", "write", "fused"),
    [
        ("llama-attention_bias", write_gguf, 4),
        ("qwen3-default", write_gguf, 2),
        ("granite_swa-default", write_dense, 5),
        ("qwen3_5_text-default", write_hybrid, 1),
        ("falcon_h1-default", write_hybrid, 2),
        ("granitemoehybrid-default", write_hybrid, 1),
        ("gemma4_text-default", write_gemma4, 4),
    ],
)
def test_logits(tmp_path, name, write, fused):
    apart = written(tmp_path, name, write)
    assert fuse(apart, tmp_path / "fused.gguf") == fused
    expected, found = (prefill(load(path), IDS_OF_TOKENS) for path in (apart, tmp_path / "fused.gguf"))
    assert torch.equal(found, expected)


def test_blocks(tmp_path):
    apart = written(tmp_path, "llama-gqa", types=lambda name: "Q8_0" if "self_attn" in name else "F32")
    fuse(apart, tmp_path / "fused.gguf")
    with GgufCheckpoint(apart) as one, GgufCheckpoint(tmp_path / "fused.gguf") as other:
        assert other.tensors == one.tensors and other.total_bytes == one.total_bytes
        for part in "qkv":
            name = f"model.layers.1.self_attn.{part}_proj.weight"
            assert torch.equal(other.read(name, 3, 7).data, one.read(name, 3, 7).data), "rows within a tensor"


def test_too_few_rows_are_refused(tmp_path):
    apart = written(tmp_path, "qwen3-default")
    fuse(apart, tmp_path / "fused.gguf", missing="qwen3.attention.head_count_kv")
    with pytest.raises(ValueError, match="attn_qkv.weight must have the rows of queries"):
        load(tmp_path / "fused.gguf")
