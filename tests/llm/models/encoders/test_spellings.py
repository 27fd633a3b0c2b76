"""Configs and names of tensors as transformers writes them, and as checkpoints with code of their own have them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace.llm.models.encoders.encoder_list import find_encoder, read_encoder_config
from pace.llm.models.encoders.gemma_embedding import GemmaEmbeddingModel
from pace.llm.models.encoders.mpnet import bucket
from tests.llm.models.encoders.oracle import load_encoder, oracle_rows, random_texts, rows_of, unit
from tests.llm.models.encoders.variants import BASE, VARIANTS, Variant, save_encoder

pytest.importorskip("transformers")


def rewrite(folder: Path, name: str, values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def with_names(folder: Path, to: Path, names: dict[str, str], fields: dict[str, Any]) -> Path:
    """A copy of a checkpoint with tensors renamed by regular expressions, and with other fields."""
    to.mkdir()
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for pattern, here in names.items():
            name = re.sub(pattern, here, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, to / "model.safetensors")
    rewrite(to, "config.json", fields)
    return to


# ---------------------------------------------------------------------------------------------------------------
# names


@pytest.mark.parametrize("kind", ["Model", "ForMaskedLM", "ForSequenceClassification"])
@pytest.mark.parametrize("family", ["NomicBert", "Gte", "JinaEmbeddingsV3", "MPNet", "ModernBert", "EuroBert", "Ultrabert"])
def test_names_of_transformers_and_of_the_file(family, kind, tmp_path):
    """A checkpoint with the names of the module's parameters is the same model. Matrices are apart there that are one
    in the files of some families. Heads for masked words are left out."""
    saved, own = tmp_path / "saved", tmp_path / "own"
    oracle = save_tiny(saved, family, {}, kind)
    own.mkdir()
    save_file({name: tensor.clone() for name, tensor in oracle.state_dict().items()}, own / "model.safetensors")
    rewrite(own, "config.json", config_of(saved))
    texts = some_texts()
    compute = logits if kind == "ForSequenceClassification" else rows
    for found, expected in zip(compute(load(own), texts), compute(load(saved), texts), strict=True):
        assert torch.equal(found, expected)


def test_new_is_gte(tmp_path):
    """Alibaba's code: model_type "new", names with that prefix."""
    saved = tmp_path / "saved"
    save_tiny(saved, "Gte", {"num_labels": 1}, "ForSequenceClassification")
    fields = config_of(saved)
    rope = fields.pop("rope_parameters")
    fields |= {
        "architectures": ["NewForSequenceClassification"],
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "model_type": "new",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": None,
        "rope_theta": rope["rope_theta"],
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    names = {"^(gte|new)[.]": "", "^(?!classifier)": "new."}
    new, texts = with_names(saved, tmp_path / "new", names, fields), some_texts()
    assert torch.equal(logits(load(new), texts), logits(load(saved), texts))
    for field, value in (("layer_norm_type", "rms_norm"), ("logn_attention_scale", True)):
        with pytest.raises(NotImplementedError, match=field):
            read_encoder_config(fields | {field: value})


def test_jina_v3_as_xlm_roberta_with_rotations(tmp_path, caplog):
    """Jina's own code: matrices are parametrised by adapters, which are left out and named."""
    saved = tmp_path / "saved"
    save_tiny(saved, "JinaEmbeddingsV3", {})
    fields = config_of(saved)
    rope = fields.pop("rope_parameters")
    fields |= {
        "architectures": ["XLMRobertaModel"],
        "lora_adaptations": ["retrieval.query", "separation"],
        "lora_rank": 4,
        "matryoshka_dimensions": [16, 32],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": rope["rope_theta"],
        "use_flash_attn": True,
    }
    names = {r"^": "roberta.", r"(Wqkv|out_proj|fc1|fc2|word_embeddings)\.weight$": r"\1.parametrizations.weight.original"}
    own = with_names(saved, tmp_path / "own", names, fields)
    tensors = load_file(own / "model.safetensors")
    matrices = [name.removesuffix("original") for name in tensors if name.endswith(".original")]
    assert len(matrices) == 3 * 4 + 1
    adapters = {f"{name}0.lora_{part}": torch.randn(2, 4, 4) for name in matrices for part in "AB"}
    save_file(tensors | adapters, own / "model.safetensors")
    with caplog.at_level(logging.WARNING, "pace"):
        model = load(own)
    assert "retrieval.query" in caplog.text and "without a task" in caplog.text
    for found, expected in zip(rows(model, some_texts()), rows(load(saved), some_texts()), strict=True):
        assert torch.equal(found, expected)
    plain = {name: value for name, value in fields.items() if name != "position_embedding_type"}
    assert read_encoder_config(plain)[0] is not type(model), "an XLM-RoBERTa with learned positions"


# ---------------------------------------------------------------------------------------------------------------
# configs


def test_nomic_of_the_hub():
    """The config.json of nomic-embed-text-v1.5, in the names of GPT-2, and the one of transformers."""
    ours = {
        "activation_function": "swiglu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0, "causal": False,
        "dense_seq_output": True, "fused_bias_fc": True, "fused_dropout_add_ln": True, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-12, "max_trained_positions": 2048, "mlp_fc1_bias": False, "mlp_fc2_bias": False,
        "model_type": "nomic_bert", "n_embd": 96, "n_head": 6, "n_inner": 200, "n_layer": 5, "n_positions": 8192,
        "pad_vocab_size_multiple": 64, "parallel_block": False, "parallel_block_tied_norm": False, "prenorm": False,
        "qkv_proj_bias": False, "reorder_and_upcast_attn": False, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
        "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "type_vocab_size": 2,
        "use_rms_norm": False, "use_xentropy": True, "vocab_size": 30528,
    }  # fmt: skip
    native = make_config("NomicBert", {
        "vocab_size": 30528, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200,
        "num_hidden_layers": 5, "max_position_embeddings": 2048,
    }).to_dict() | {"architectures": ["NomicBertModel"]}  # fmt: skip
    found, expected = read_encoder_config(ours)[1], read_encoder_config(native)[1]
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "hidden_act",
            "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "rope", "vocab_size")  # fmt: skip
    assert [getattr(found, name) for name in same] == [getattr(expected, name) for name in same]
    scaled = read_encoder_config(ours | {"rotary_scaling_factor": 2})[1]
    assert (scaled.max_position_embeddings, scaled.rope.kind) == (8192, "dynamic")
    assert (scaled.rope.factor, scaled.rope.max_positions) == (2.0, 2048)
    for field, value in (
        ("prenorm", True),
        ("moe_every_n_layers", 2),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_fraction", 0.5),
        ("activation_function", "gelu"),
        ("qkv_proj_bias", True),
    ):
        with pytest.raises(NotImplementedError, match=field):
            read_encoder_config(ours | {field: value})
    with pytest.raises(ValueError, match="n_embd"):
        read_encoder_config({"hidden_size": 768} | ours)


def test_ntk_scaling_of_new():
    """The frequencies of the published code: those of `base * factor`, divided by `factor ** (2 / dim)`."""
    fields = {"model_type": "new", "hidden_size": 128, "num_attention_heads": 2, "rope_theta": 20000}
    config = read_encoder_config(fields | {"rope_scaling": {"type": "ntk", "factor": 8.0}})[1]
    exponents = torch.arange(0, 64, 2).double() / 64
    expected = 1 / (20000.0 * 8.0) ** exponents / 8.0 ** (2 / 64)
    from pace.llm.layers import Rotary

    found = Rotary(config.rope).frequencies(torch.arange(1)).double()
    # A power of a number up to 160000 in fp32, and two divisions.
    torch.testing.assert_close(found, expected, rtol=20 * 2.0**-24, atol=0.0)
    with pytest.raises(NotImplementedError, match="mixed_b"):
        read_encoder_config(fields | {"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}})
    with pytest.raises(NotImplementedError, match="'other'"):
        read_encoder_config(fields | {"rope_scaling": {"type": "other", "factor": 8.0}})
    with pytest.raises(ValueError, match="factor of rope_scaling"):
        read_encoder_config(fields | {"rope_scaling": {"type": "ntk"}})


def test_modern_bert_before_transformers_5():
    native = make_config("ModernBert", {
        "num_hidden_layers": 7, "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 77.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
        },
    }).to_dict() | {"architectures": ["ModernBertModel"]}  # fmt: skip
    old = {name: value for name, value in native.items() if name not in ("layer_types", "rope_parameters")} | {
        "global_attn_every_n_layers": 2, "global_rope_theta": 77.0, "local_rope_theta": 33.0, "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute", "reference_compile": None, "repad_logits_with_grad": False,
    }  # fmt: skip
    found, expected = read_encoder_config(old)[1], read_encoder_config(native)[1]
    assert (found.ropes, found.layer_types) == (expected.ropes, expected.layer_types)
    assert [found.window(i) for i in range(3)] == [None, 5, None]
    # What a file states wins.
    assert read_encoder_config(native | {"global_attn_every_n_layers": 1})[1].layer_types == expected.layer_types
    thetas = [rope.theta for rope in read_encoder_config({"model_type": "modernbert"})[1].ropes]
    assert thetas == [160000.0, 10000.0]


def test_windows_of_gemma():
    """The window in the file is that of both sides together."""
    fields = {
        "architectures": ["Gemma3TextModel"], "model_type": "gemma3_text", "sliding_window": 512,
        "use_bidirectional_attention": True,
    }  # fmt: skip
    config = read_encoder_config(fields)[1]
    assert [config.window(layer) for layer in (0, 4, 5)] == [257, 257, None]
    assert find_encoder(fields) is GemmaEmbeddingModel
    assert find_encoder(fields | {"use_bidirectional_attention": False}) is None
    del fields["use_bidirectional_attention"]
    assert find_encoder(fields) is None


def test_ultrabert_with_lists_of_layers():
    native = make_config("Ultrabert", {"sliding_window": 9}).to_dict() | {"architectures": ["UltrabertModel"]}
    old = {name: value for name, value in native.items() if name not in ("layer_types", "rope_parameters")}
    old |= {"attention_windows": [9, 9, 0, 9, 9], "rope_theta": [1e4, 1e4, 2560000.0, 1e4, 1e4], "sliding_window": 128}
    found, expected = read_encoder_config(old)[1], read_encoder_config(native)[1]
    assert [found.window(layer) for layer in range(5)] == [10, 10, None, 10, 10]
    assert (found.ropes, found.layer_types, found.sliding_window) == (expected.ropes, expected.layer_types, 9)
    for fields in ({"attention_windows": 9}, {"attention_windows": [9, -1]}, {"rope_theta": 1e4}):
        with pytest.raises(ValueError, match=next(iter(fields))):
            read_encoder_config(old | fields)


def test_buckets_of_mpnet():
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    distances = torch.arange(-700, 701)
    expected = MPNetEncoder.relative_position_bucket(distances).tolist()
    assert [bucket(distance) for distance in distances.tolist()] == expected
    assert bucket(-128) == bucket(-10**6) == 15 and bucket(128) == bucket(10**6) == 31, "all farther ones are alike"
    for field, value in (("relative_attention_num_buckets", 16), ("max_position_embeddings", 2)):
        with pytest.raises(ValueError, match=field):
            read_encoder_config({"model_type": "mpnet", field: value})


@pytest.mark.parametrize("model_type", ["mpnet", "modernbert", "nomic_bert", "gte", "jina_embeddings_v3", "eurobert", "ultrabert"])  # fmt: skip
def test_fields_that_are_left_out_have_the_defaults_of_transformers(model_type):
    from transformers import AutoConfig

    whole = AutoConfig.for_model(model_type).to_dict()
    assert read_encoder_config({"model_type": model_type})[1] == read_encoder_config(whole)[1]
