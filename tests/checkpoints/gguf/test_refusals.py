"""Metadata and tensors of GGUF files that are refused, and oddities that are accepted."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.file import GgufFile
from pace.llm import LLMModel
from tests.checkpoints.gguf.files import write_gguf
from tests.llm.models.variants import save_tiny


def changed(tmp_path, change, model_type="llama", types="F32", **fields):
    """A file whose writer also made `change`, or wrote something else instead."""
    save_tiny(tmp_path / "hub", model_type, fields)
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf", types, change)
    return tmp_path / "model.gguf"


def drop(*keys):
    def change(writer):
        for key in keys:
            assert any(entries.pop(key, None) for entries in writer.kv_data)

    return change


def put(key, value, kind):
    return lambda writer: (writer.kv_data[0].pop(key, None), getattr(writer, f"add_{kind}")(key, value))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (drop("general.architecture"), ValueError, "has no general.architecture in its metadata"),
        (put("general.architecture", "mamba", "string"), NotImplementedError,
         "has the architecture 'mamba', .*implemented: llama, qwen2, qwen3, phi2, phi3"),
        (put("general.architecture", 3, "uint32"), ValueError, "general.architecture must be a string; got 3"),
        *[
            (drop(f"llama.{key}"), ValueError, rf"has no llama\.{key} in its metadata")
            for key in ("context_length", "embedding_length", "block_count", "feed_forward_length",
                        "attention.head_count", "attention.layer_norm_rms_epsilon")
        ],
        (put("llama.block_count", "2", "string"), ValueError, r"llama\.block_count must be an integer; got '2'"),
        (put("llama.block_count", 2**31, "uint32"), ValueError, "num_hidden_layers must be an integer in 1..4096"),
        (put("llama.block_count", 3, "uint32"), ValueError, r"missing \(9\): model\.layers\.2\."),
        (put("llama.block_count", 1, "uint32"), ValueError, r"unexpected \(9\): model\.layers\.1\."),
        (put("llama.embedding_length", 64, "uint32"), ValueError, "has shape .*the config demands"),
        (put("llama.attention.head_count", 0, "uint32"), ValueError, "attention.head_count must be positive; got 0"),
        (put("llama.attention.head_count", [4, 2], "array"), NotImplementedError, "head_count differs between"),
        (put("llama.attention.value_length", 4, "uint32"), NotImplementedError, "attention.value_length differ"),
        (put("llama.attention.layer_norm_rms_epsilon", float("nan"), "float32"), ValueError, "rms_norm_eps must be a"),
        (put("llama.expert_count", 8, "uint32"), ValueError, "has no llama.expert_used_count"),
        (put("llama.expert_count", [8, 0], "array"), ValueError, "llama.expert_count must be an integer"),
        (put("llama.logit_scale", 0.5, "float32"), NotImplementedError, "logit_scale = 0.5"),
        (put("llama.attention.causal", False, "bool"), NotImplementedError, "is_causal = False"),
        (put("llama.rope.dimension_count", 4, "uint32"), NotImplementedError, "partial_rotary_factor = 0.5"),
        (put("llama.rope.freq_base", 0.0, "float32"), ValueError, "rope_theta must be a number"),
        (put("llama.rope.scaling.type", "su", "string"), NotImplementedError,
         r"llama\.rope\.scaling\.type = 'su' .*implemented: none, linear, yarn"),
        (put("llama.rope.scaling.type", "yarn", "string"), ValueError, r"has no llama\.rope\.scaling\.factor"),
        (lambda writer: writer.add_tensor("rope_freqs.weight", torch.ones(3).numpy()), ValueError,
         r"rope_freqs.weight must have a factor for each of 4 pairs; got \[3\]"),
        (lambda writer: writer.add_tensor("blk.0.ffn_gate_exps.weight", torch.ones(2, 3).numpy()), ValueError,
         r"unexpected \(1\): model\.layers\.0\.mlp\.experts\.gate_proj\.weight"),
        (put("tokenizer.ggml.model", "rwkv", "string"), NotImplementedError,
         "a tokenizer of type 'rwkv', .*implemented: gpt2, llama, gemma4, .*Give tokenizer_name_or_path"),
        (put("tokenizer.ggml.model", "gpt2", "string"), ValueError, "has no tokenizer.ggml.tokens"),
    ],
)  # fmt: skip
def test_what_a_file_must_not_say(tmp_path, change, error, message):
    path = changed(tmp_path, change)
    with pytest.raises(error, match=message) as raised:
        LLMModel(path, num_threads=1, progress=False)
    assert "model.gguf" in str(raised.value)


@pytest.mark.parametrize(("kind", "at"), [("Q4_0", 0), ("Q5_1", 2), ("Q8_0", 0)])
def test_scales_that_are_not_finite_name_their_tensor(tmp_path, kind, at):
    save_tiny(tmp_path, "llama", {})
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path, path, lambda name: kind if name.endswith("layers.1.self_attn.k_proj.weight") else "F32")
    begin = GgufFile(path).tensors["blk.1.attn_k.weight"].begin + at
    data = bytearray(path.read_bytes())
    data[begin : begin + 2] = b"\x00\x7c"  # infinity
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"'blk\.1\.attn_k\.weight' in .*model\.gguf has scales that are NaN or infinite"
    ):
        LLMModel(path, num_threads=1, progress=False)


def test_unknown_keys_are_named(tmp_path, caplog):
    path = changed(tmp_path, put("llama.something.new", 3, "uint32"))
    with caplog.at_level(logging.WARNING, "pace"):
        LLMModel(path, num_threads=1, progress=False)
    assert "llama.something.new" in caplog.text and caplog.text.count("ignored") == 1


def test_sizes_of_zero_and_harmless_keys_are_read(tmp_path, caplog):
    def change(writer):
        writer.add_expert_count(0)
        writer.add_float32("llama.attention.max_alibi_bias", 0.0)
        writer.add_bool("llama.attention.causal", True)
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_array("llama.feed_forward_length", [56, 56])

    path = changed(tmp_path, lambda writer: (drop("llama.feed_forward_length")(writer), change(writer)))
    with caplog.at_level(logging.WARNING, "pace"):
        assert LLMModel(path, num_threads=1, progress=False).config.intermediate_size == 56
    assert not caplog.text
