"""Configs and names of tensors as transformers writes them, and as checkpoints with code of their own have them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pace.llm.encoding.steps import TextSteps
from pace.llm.layers import Rotary
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.encoders.encoder_list import find_encoder, read_encoder_config
from pace.llm.models.encoders.gemma_embedding import GemmaEmbeddingModel
from pace.llm.models.encoders.mpnet import bucket
from pace.llm.runners.encoder import EncoderRunner
from pace.ops import native
from pace.ops.weight_layout import WeightLayout
from tests.llm.models.encoders.oracle import load_encoder, oracle_rows, random_texts, rows_of, unit
from tests.llm.models.encoders.variants import BASE, VARIANTS, Variant, save_encoder
from tests.support import TensorDict

pytest.importorskip("transformers")


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def saved(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Saves a variant. Returns its config.json and its tensors."""
    save_encoder(folder, VARIANTS[name])
    return config_of(folder), load_file(folder / "model.safetensors")


def loaded(fields: dict[str, Any], tensors: dict[str, Tensor]) -> Encoder:
    encoder_class, config = read_encoder_config(fields)
    encoder = encoder_class(config, torch.float32, native)
    encoder.load_weights(TensorDict(tensors))
    return encoder


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """Tensors under other names, given by regular expressions."""
    found = {}
    for name, tensor in tensors.items():
        for pattern, here in names.items():
            name = re.sub(pattern, here, name)
        found[name] = tensor
    return found


def result(encoder: Encoder) -> Tensor:
    """The rows of some texts, or their logits."""
    texts = random_texts(encoder, (37, 1, 16))
    if encoder.num_labels:
        return EncoderRunner(encoder).logits(TextSteps(encoder, 100, 3).batch(texts))
    return torch.cat([rows_of(encoder, text) for text in texts])


# ---------------------------------------------------------------------------------------------------------------
# names

FAMILIES = r"(eurobert|gte|jina|modernbert|mpnet|nomic|ultrabert)"
RENAMED = [name for name in VARIANTS if re.fullmatch(FAMILIES + "(-masked|-classifier|-cls|-late)?", name)]


@pytest.mark.parametrize("name", RENAMED)
def test_names_of_parameters(name, tmp_path):
    """A checkpoint with the names of the module's parameters is the same model. Matrices are apart there that are one
    in the files of some families. Heads for masked words are left out."""
    oracle = save_encoder(tmp_path, VARIANTS[name])
    own = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    assert torch.equal(result(loaded(config_of(tmp_path), own)), result(load_encoder(tmp_path, native)))


def test_new_is_gte(tmp_path):
    """Alibaba's code: model_type "new", and names with that prefix."""
    native_fields, tensors = saved(tmp_path, "gte-classifier")
    fields = native_fields | {
        "architectures": ["NewForSequenceClassification"],
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "layer_norm_type": "layer_norm",
        "logn_attention_clip1": False,
        "logn_attention_scale": False,
        "model_type": "new",
        "pack_qkv": True,
        "position_embedding_type": "rope",
        "rope_scaling": None,
        "rope_theta": native_fields["rope_parameters"]["rope_theta"],
        "unpad_inputs": False,
        "use_memory_efficient_attention": False,
    }
    del fields["rope_parameters"]
    new = renamed(tensors, {"^(gte|new)[.]": "", "^(?!classifier)": "new."})
    assert any(name.startswith("new.encoder.layer.0.attention.qkv_proj") for name in new)
    assert torch.equal(result(loaded(fields, new)), result(load_encoder(tmp_path, native)))
    bare = {name.removeprefix("new."): tensor for name, tensor in new.items() if "classifier" not in name}
    rows = result(loaded(fields | {"architectures": ["NewModel"]}, bare))
    both = fields | {"architectures": ["NewModel", "NewForTokenClassification"]}
    assert torch.equal(result(loaded(both, new)), rows), "gte-multilingual-base, with a classifier of tokens"
    for field, value in (("layer_norm_type", "rms_norm"), ("logn_attention_scale", True)):
        with pytest.raises(NotImplementedError, match=field):
            read_encoder_config(fields | {field: value})


def test_jina_v3_as_xlm_roberta_with_rotations(tmp_path):
    """Jina's own code: matrices are parametrised by adapters, which rows without a task do not have."""
    native_fields, tensors = saved(tmp_path, "jina")
    fields = native_fields | {
        "architectures": ["XLMRobertaModel"],
        "lora_adaptations": ["retrieval.query", "separation"],
        "lora_rank": 4,
        "matryoshka_dimensions": [16, 32],
        "model_type": "xlm-roberta",
        "position_embedding_type": "rotary",
        "rotary_emb_base": native_fields["rope_parameters"]["rope_theta"],
        "use_flash_attn": True,
    }
    del fields["rope_parameters"]
    parametrised = r"(Wqkv|out_proj|fc1|fc2|word_embeddings|token_type_embeddings)\.weight$"
    own = renamed(tensors, {r"^": "roberta.", parametrised: r"\1.parametrizations.weight.original"})
    matrices = [name.removesuffix("original") for name in own if name.endswith(".original")]
    assert len(matrices) == 2 * 4 + 2
    own |= {f"{name}0.lora_{part}": torch.randn(2, 4, 4) for name in matrices for part in "AB"}
    encoder = loaded(fields, own)
    assert encoder.instructions == {"retrieval.query": "", "separation": ""}
    assert torch.equal(result(encoder), result(load_encoder(tmp_path, native)))
    del fields["position_embedding_type"]
    assert read_encoder_config(fields)[0] is not type(encoder), "an XLM-RoBERTa with learned positions"


# ---------------------------------------------------------------------------------------------------------------
# configs


def published(architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers writes."""
    import transformers

    config_class = getattr(transformers, architecture).config_class
    return config_class(**BASE | fields).to_dict() | {"architectures": [architecture]}


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
    native = published("NomicBertModel", {
        "vocab_size": 30528, "hidden_size": 96, "num_attention_heads": 6, "intermediate_size": 200,
        "num_hidden_layers": 5, "max_position_embeddings": 2048,
    })  # fmt: skip
    found, expected = read_encoder_config(ours)[1], read_encoder_config(native)[1]
    same = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size", "hidden_act",
            "max_position_embeddings", "type_vocab_size", "layer_norm_eps", "rope", "vocab_size")  # fmt: skip
    assert [getattr(found, name) for name in same] == [getattr(expected, name) for name in same]
    scaled = read_encoder_config(ours | {"rotary_scaling_factor": 2})[1]
    assert (scaled.max_position_embeddings, scaled.rope.kind) == (8192, "dynamic")
    assert (scaled.rope.factor, scaled.rope.max_positions) == (2.0, 2048)
    for field, value in (
        ("prenorm", True),
        ("rotary_emb_interleaved", True),
        ("rotary_emb_fraction", 0.5),
        ("activation_function", "glu"),
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
    native = published("ModernBertModel", {
        "num_hidden_layers": 7, "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 77.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 33.0},
        },
    })  # fmt: skip
    old = {name: value for name, value in native.items() if name not in ("layer_types", "rope_parameters")} | {
        "global_attn_every_n_layers": 2, "global_rope_theta": 77.0, "local_rope_theta": 33.0, "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute", "reference_compile": None, "repad_logits_with_grad": False,
    }  # fmt: skip
    found, expected = read_encoder_config(old)[1], read_encoder_config(native)[1]
    assert (found.ropes, found.layer_types) == (expected.ropes, expected.layer_types)
    assert [found.window(i) for i in range(3)] == [None, 65, None]
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
    native = published("UltrabertModel", {**VARIANTS["ultrabert"].fields, "sliding_window": 9})
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
    assert bucket(-128) == bucket(-(10**6)) == 15 and bucket(128) == bucket(10**6) == 31, "all farther ones are alike"
    for field, value in (("relative_attention_num_buckets", 16), ("max_position_embeddings", 2)):
        with pytest.raises(ValueError, match=field):
            read_encoder_config({"model_type": "mpnet", field: value})


def test_quantised_biases_of_mpnet_are_refused(tmp_path):
    fields, tensors = saved(tmp_path, "mpnet")
    encoder_class, config = read_encoder_config(fields)
    reader, name = TensorDict(tensors), "encoder.relative_attention_bias.weight"
    reader.tensors[name] = (WeightLayout("int8", None), reader.tensors[name][1])
    with pytest.raises(ValueError, match=f"{name} is int8, a scale a row, not a floating-point tensor"):
        encoder_class(config, torch.float32, native).load_weights(reader)


def test_distances_beyond_the_table_of_mpnet(tmp_path):
    oracle = save_encoder(tmp_path, Variant("MPNetModel", {"max_position_embeddings": 400}))
    encoder = load_encoder(tmp_path, native)
    assert encoder.max_length == 398
    for text in random_texts(encoder, (129, 130, 398)):
        ours, theirs = unit(rows_of(encoder, text)), unit(oracle_rows(oracle, encoder, text))
        assert (ours - theirs).abs().max() <= 2e-6, len(text)
