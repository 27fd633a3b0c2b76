"""Files of families with latent attention: heads split or not, in blocks, and missing keys."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")

import gguf

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from tests.checkpoints.gguf import latent_files
from tests.checkpoints.gguf.files import write_gguf
from tests.llm.models.families.latent_variants import YARN
from tests.llm.models.variants import save_tiny
from tests.support import prefill

IDS = torch.randint(2, 99, (45,), generator=torch.Generator().manual_seed(4))
WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "kv_lora_rank": 256, "q_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip


def load(path, dtype="float32", **more):
    return load_model(LoadOptions(path, dtype=dtype, num_threads=1, progress=False, **more))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
def test_files_from_before_kv_b_was_cut(tmp_path, monkeypatch, model_type):
    save_tiny(tmp_path / "hub", model_type, {"rope_parameters": YARN})
    cut = latent_files.add_keys
    monkeypatch.setattr(latent_files, "arranged", lambda state, config: state)
    monkeypatch.setattr(latent_files, "add_keys", lambda writer, config: cut(writer, config, split=False))
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf")
    ours = load(tmp_path / "model.gguf")
    assert torch.equal(prefill(ours, IDS), prefill(load(tmp_path / "hub"), IDS))


@pytest.mark.parametrize("kinds", [("Q8_0", "Q4_K"), ("Q4_0", "Q6_K"), ("F16", "BF16")])
def test_heads_have_the_weights_of_the_file(tmp_path, kinds):
    """Keys have one type, values another. All weights are equal to the bit on the torch backend."""
    save_tiny(tmp_path / "hub", "deepseek_v3", WIDE)
    of_keys, of_others = kinds
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf", lambda name: of_keys if "k_b_proj" in name else of_others)
    model = load(tmp_path / "model.gguf", backend="torch")
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        for layer, block in enumerate(model.layers):
            for stack, part in ((block.mixer.keys_up, "k_b_proj"), (block.mixer.values_up, "v_b_proj")):
                rows = reader.read(f"model.layers.{layer}.self_attn.{part}.weight")
                rows = rows.float() if isinstance(rows, torch.Tensor) else rows.dequantize()
                for weight, expected in zip(stack.stack.experts, rows.unflatten(0, (4, -1)), strict=True):
                    assert torch.equal(model.ops.unpack(weight), expected)
    expected = prefill(model, IDS)
    found = prefill(load(tmp_path / "model.gguf", "bfloat16"), IDS)
    # Activations are rounded to int8 or bf16 in about ten products in sequence; a row may change experts.
    rows = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert rows.median() < 0.08


def test_an_unknown_gating_function_is_refused(tmp_path, monkeypatch):
    save_tiny(tmp_path / "hub", "deepseek_v3", {})
    keys = latent_files.add_keys

    def add_keys(writer, config):
        keys(writer, config)
        writer.kv_data[0]["deepseek2.expert_gating_func"].value = 3

    monkeypatch.setattr(latent_files, "add_keys", add_keys)
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf")
    with pytest.raises(NotImplementedError, match="expert_gating_func = 3"):
        load(tmp_path / "model.gguf")


def test_what_a_config_of_transformers_does_not_state(tmp_path, monkeypatch):
    """The converter copies neither scoring_func nor first_k_dense_replace from a config.json without them. The tensors
    show both."""
    save_tiny(tmp_path / "hub", "deepseek_v3", {})
    keys = latent_files.add_keys

    def add_keys(writer, config):
        keys(writer, config)
        del writer.kv_data[0]["deepseek2.expert_gating_func"]

    monkeypatch.setattr(latent_files, "add_keys", add_keys)
    monkeypatch.setattr(gguf.GGUFWriter, "add_leading_dense_block_count", lambda writer, count: None)
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf")
    assert torch.equal(*(prefill(load(tmp_path / path), IDS) for path in ("model.gguf", "hub")))
