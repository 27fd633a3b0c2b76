"""nomic-embed-text-v2-moe against its forward pass in plain torch."""

from __future__ import annotations

import json

import pytest
import torch

from pace.calibrate import quantize_checkpoint
from pace.llm import EmbeddingModel
from pace.llm.encoding.embedder import TextTokens
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.llm.operators import OperatorConfig
from pace.ops import native, reference
from tests.llm.models.encoders.nomic_moe import CONFIG, random_tensors, rows, save_nomic_moe
from tests.llm.models.encoders.oracle import load_encoder, random_texts, rows_of, unit


def load(folder, **options) -> EmbeddingModel:
    return EmbeddingModel(folder, **{"dtype": "float32", "progress": False, **options})


@pytest.mark.parametrize("ops", [native, reference])
def test_rows(tmp_path, ops):
    tensors = random_tensors()
    save_nomic_moe(tmp_path, tensors)
    encoder = load_encoder(tmp_path, ops)
    for text in random_texts(encoder, (1, 2, 17, 40)):
        ours, theirs = rows_of(encoder, text), rows(tensors, text.tokens).float()
        # The bounds of tests/llm/models/encoders/test_oracle.py, times two for four layers in place of two.
        assert (ours - theirs).abs().max() <= 80e-6 * theirs.abs().max()
        assert (unit(ours) - unit(theirs)).abs().max() <= 4e-6


def test_bits_and_formats(tmp_path):
    """The same bits alone, in batches, as a program, op by op, and from a checkpoint of `pace quantize`."""
    save_nomic_moe(tmp_path / "hub", random_tensors())
    texts = [TextTokens(tuple(range(3, 3 + length))) for length in (1, 40, 17)]
    with load(tmp_path / "hub") as model:
        vectors = model.embed_tokens(texts)
        assert torch.equal(torch.cat([model.embed_tokens([text]) for text in texts]), vectors)
        assert model.max_length == 2048
    with load(tmp_path / "hub", backend="native-eager") as model:
        assert torch.equal(model.embed_tokens(texts), vectors)
    with load(tmp_path / "hub", backend=OperatorConfig(mlp="torch")) as model:
        assert (unit(model.embed_tokens(texts)) - unit(vectors)).abs().max() <= 4e-6
    for format in ("int8", "int4"):
        quantize_checkpoint(tmp_path / "hub", tmp_path / format, format, progress=False)
        with load(tmp_path / format) as model, load(tmp_path / "hub", quantization=format) as at_load:
            assert torch.equal(model.embed_tokens(texts), at_load.embed_tokens(texts))
            assert (unit(model.embed_tokens(texts)) - unit(vectors)).abs().max() > 1e-4


def test_config(tmp_path):
    config = read_encoder_config(CONFIG)[1]
    assert [config.has_experts(layer) for layer in range(5)] == [False, True, False, True, False]
    assert [read_encoder_config(CONFIG | {"moe_every_n_layers": n})[1].has_experts(4) for n in (0, 1, 3)] == [
        False, False, True
    ]  # fmt: skip
    for field, value in (
        ("expert_choice_router", True), ("moe_normalize_expert_weights", True), ("num_shared_experts", 1),
        ("activation_function", "swiglu"), ("ffn_div", 2),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=field):
            read_encoder_config(CONFIG | {field: value})
    for field, value in (("moe_top_k", 6), ("num_experts", None)):
        with pytest.raises(ValueError, match="moe_top_k must be at most num_experts"):
            read_encoder_config(CONFIG | {field: value})
    tensors = random_tensors()
    tensors["encoder.layers.1.mlp.experts.mlp.w2"] = tensors["encoder.layers.1.mlp.experts.mlp.w2"][:-1].clone()
    save_nomic_moe(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"w2 has shape \[239, 32\], the config demands \[240, 32\]"):
        load(tmp_path)


def test_gates_may_have_biases(tmp_path):
    """The Hub's code has biases for gates, too, which no published checkpoint uses."""
    import transformers

    fields = {"vocab_size": 99, "n_embd": 32, "n_head": 4, "n_inner": 48, "n_layer": 2, "activation_function": "swiglu"}
    dense = CONFIG | fields | {"moe_every_n_layers": 0, "num_experts": 0, "type_vocab_size": 2}
    config = transformers.NomicBertConfig(
        vocab_size=99, hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 900.0}, layer_norm_eps=1e-5,
    )  # fmt: skip
    oracle = transformers.NomicBertModel(config).eval()
    with torch.no_grad():
        for layer in oracle.layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    module.bias = torch.nn.Parameter(torch.randn(module.out_features))
    folder = tmp_path / "gated"
    oracle.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(dense))
    encoder = load_encoder(folder, native)
    for text in random_texts(encoder, (3, 20)):
        with torch.no_grad():
            types = torch.tensor([text.types or (0,) * len(text.tokens)])
            theirs = oracle(input_ids=torch.tensor([text.tokens]), token_type_ids=types).last_hidden_state[0]
        assert (unit(rows_of(encoder, text)) - unit(theirs)).abs().max() <= 2e-6
