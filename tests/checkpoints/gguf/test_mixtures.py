"""Stacks of experts in files, in blocks of all types."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")

from pace.checkpoints.gguf.blocks import BLOCK_TYPES
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm import LLMModel
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from tests.checkpoints.gguf import mixture_files
from tests.checkpoints.gguf.files import finish, write_gguf
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample

WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_key_value_heads": 2, "num_hidden_layers": 2}
FAMILIES = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def written(tmp_path, model_type, types):
    save_tiny(tmp_path / "hub", model_type, WIDE | FAMILIES[model_type])
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf", types)
    return tmp_path / "model.gguf"


def logits(path):
    with LLMModel(path, dtype="float32", progress=False) as model, model.session() as session:
        return session.append(list(range(3, 40)), logits="all")


def values(rows):
    return rows if isinstance(rows, torch.Tensor) else rows.dequantize()


KINDS = [kind.name for kind in BLOCK_TYPES.values()]


@pytest.mark.parametrize(
    "kind", sample(KINDS, lambda name: not name.startswith(("IQ1", "IQ2", "IQ3")) or name == "IQ2_XS")
)
def test_experts_have_the_weights_of_the_file(tmp_path, kind):
    """Gate and up have the given type, down has Q8_0. All weights are equal to the bit on the torch backend. Each type
    is tested with one of the families, in turn."""
    model_type = list(FAMILIES)[KINDS.index(kind) % len(FAMILIES)]
    path = written(tmp_path, model_type, lambda name: "Q8_0" if "down" in name else kind)
    model = load_model(LoadOptions(path, dtype="float32", backend="torch", num_threads=1, progress=False))
    layout = next(block.layout for block in BLOCK_TYPES.values() if block.name == kind)
    with GgufCheckpoint(path) as reader:
        for layer, block in enumerate(model.layers):
            name = f"model.layers.{layer}.mlp.experts"
            gate, up, down = (
                values(reader.read(f"{name}.{part}_proj.weight")).unflatten(0, (4, -1))
                for part in ("gate", "up", "down")
            )
            for e in range(4):
                found = model.ops.unpack(block.mlp.gate_up.stack.experts[e])
                assert torch.equal(found, torch.cat([gate[e], up[e]]))
                assert torch.equal(model.ops.unpack(block.mlp.down.stack.experts[e]), down[e])
            assert block.mlp.gate_up.storage(torch.float32) == layout


@pytest.mark.parametrize(("model_type", "of_up", "others"), [*((name, "Q6_K", "Q4_K") for name in FAMILIES),
                                                              ("qwen3_moe", "IQ3_S", "IQ1_M")])  # fmt: skip
def test_gate_and_up_may_have_two_types(tmp_path, model_type, of_up, others):
    path = written(tmp_path, model_type, lambda name: of_up if "up" in name else others)
    ids = list(range(3, 40))
    with LLMModel(path, dtype="float32", backend="torch", progress=False) as exact, exact.session() as session:
        expected = session.append(ids, logits="all")
    with LLMModel(path, dtype="float32", progress=False) as model, model.session() as session:
        found = session.append(ids, logits="all")
    # Activations are rounded to int8 in about ten products in sequence; a row may go to other experts.
    rows = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() < 0.08


def test_experts_before_they_were_stacked(tmp_path):
    """Old files of Mixtral have one tensor per expert."""
    save_tiny(tmp_path / "hub", "mixtral", {})
    stacked = tmp_path / "model.gguf"
    write_gguf(tmp_path / "hub", stacked)

    import gguf

    apart, reader = tmp_path / "apart.gguf", gguf.GGUFReader(stacked)
    writer = gguf.GGUFWriter(apart, "llama")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        if "_exps" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data)
            continue
        for expert, matrix in enumerate(tensor.data):
            writer.add_tensor(tensor.name.replace("_exps", f".{expert}"), matrix)
    finish(writer)

    assert torch.equal(logits(apart), logits(stacked))


def test_gpt_oss_without_yarn(tmp_path):
    """A file without keys for a scaling has no scaling; a config.json without them has the scaling of the published
    models."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    save_tiny(tmp_path / "hub", "gpt_oss", {"rope_parameters": rope})
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf")
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(tmp_path / "hub"))


def test_a_bias_whose_name_has_no_suffix(tmp_path, monkeypatch):
    """So llama.cpp writes Hunyuan 3."""
    monkeypatch.setattr(mixture_files, "NAMES", {
        pattern: "exp_probs_b" if name == "exp_probs_b.bias" else name for pattern, name in mixture_files.NAMES.items()
    })  # fmt: skip
    save_tiny(tmp_path / "hub", "hy_v3", {})
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf")
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        assert not [name for name in reader.tensors if "exp_probs" in name]
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(tmp_path / "hub"))
