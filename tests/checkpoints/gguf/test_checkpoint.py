"""GGUF files as checkpoints, against transformers with the file's weights, and against the checkpoint that the file was
made from."""

from __future__ import annotations

import itertools
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.checkpoints.gguf.blocks import BLOCK_TYPES
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint, hub_order
from pace.llm import LLMModel
from pace.ops.blocks import BlockRows, WeightLayout
from tests.checkpoints.gguf import latent_files, mixture_files
from tests.checkpoints.gguf.files import ARCHITECTURES, load, write_gguf
from tests.llm.models.parts import representative
from tests.llm.models.rotations import mrope
from tests.llm.models.variants import IDS, VARIANTS, save_tiny
from tests.llm.models.visit import TOLERANCE, oracle, relative_error
from tests.plugins.tiers import sample
from tests.support import prefill

HELD = [
    "llama-gqa", "llama-mha", "llama-head_dim", "llama-attention_bias", "llama-mlp_bias", "llama-tied", "llama-eps",
    "llama-theta", "llama-linear", "llama-llama3", "llama-yarn", "llama-yarn-attention_factor", "llama-yarn-beta",
    "mistral-no-window", "mistral-window", "mistral-yarn", "qwen2-default", "qwen2-tied", "qwen2-yarn",
    "qwen3-default", "qwen3-bias-tied", "phi-default", "phi-gqa",
    "phi3-default", "phi3-window", "phi3-longrope-short", "phi3-longrope-long",
    "phi3-phi-4-mini", "phi3-partial", "phi3-partial-odd", "llama-falcon3", "gemma2-default", "gemma2-low-caps",
    "gemma3_text-default", "gemma3_text-linear", "gemma3_text-theta", "smollm3-default", "smollm3-yarn",
    "granite-default", "granite-tied-bias", "granite-theta", "olmo2-default", "olmo2-tied-theta", "olmo3-default",
    "olmo3-yarn", "olmo3-published-yarn", "olmo3-theta", "olmo3-layer_types", "glm-default", "glm-no-bias",
    "glm-partial-tied", "glm4-default", "glm4-no-bias", "ernie4_5-default", "ernie4_5-bias-untied",
    "hunyuan_v1_dense-default", "hunyuan_v1_dense-alpha", "cohere-default", "cohere-qk_norm", "cohere2-default",
    "minicpm-default", "minicpm-untied-theta", "starcoder2-default", "starcoder2-no-bias",
    "starcoder2-head_dim-theta", "stablelm-default", "stablelm-bias-theta", "stablelm-parallel", "stablelm-2-12b",
    "stablelm-mqa", "stablelm-partial", "stablelm-yarn", "gpt_neox-default", "gpt_neox-sequential",
    "gpt_neox-partial-tied", "gpt_neox-all-linear", "gpt2-default", "gpt2-n_inner-untied", "chatglm-default",
    "chatglm-no-bias", "chatglm-linear-bias", "mixtral-default", "mixtral-window", "qwen2_moe-default",
    "qwen2_moe-normalised", "qwen3_moe-default", "qwen3_moe-normalised", "qwen3_moe-bias-all", "olmoe-default",
    "olmoe-normalised", "granitemoe-default", "granitemoe-tied-bias", "granitemoeshared-default", "gpt_oss-default",
    "hunyuan_v1_moe-default", "hunyuan_v1_moe-lists", "ernie4_5_moe-default", "glm4_moe-default", "glm4_moe-groups",
    "glm4_moe-all", "phimoe-default", "phimoe-no-bias", "phimoe-longrope-short", "phimoe-window",
    "llama4_text-default", "qwen2_vl-default", "qwen2_5_vl-default", "qwen3_vl-default", "qwen3_vl-bias-theta",
    "deepseek_v2-default", "deepseek_v2-lite", "deepseek_v2-groups", "deepseek_v2-experts-everywhere",
    "deepseek_v3-default", "deepseek_v3-yarn", "deepseek_v3-not-normalised", "deepseek_v3-one-group",
    "deepseek_v32-default", "glm_moe_dsa-default", "dbrx-default", "hy_v3-default", "hy_v3-types", "mistral4-default",
    "mistral4-groups",
    "glm4_moe_lite-default", "glm4_moe_lite-eps", "minicpm3-default", "minicpm3-longrope", "afmoe-default",
    "bailing_moe_v2-default", "bailing_moe_v2-biases", "cohere2_moe-default", "cohere2_moe-rms", "cohere2_moe-prefix",
    "dots1-default", "dots1-groups", "exaone_moe-default", "exaone_moe-groups", "laguna-default",
    "laguna-per-element", "laguna-ropes", "mellum-default", "minimax_m2-default", "sarvam_moe-default",
    "solar_open-bias-groups",
]  # fmt: skip
"""The variants that a GGUF file can describe: no keys describe Qwen's windows or the activation."""
ALSO = {name: {"query_pre_attn_scalar": 12} for name in ("gemma2", "gemma3_text")}
WIDE_ALSO = {name: {"query_pre_attn_scalar": 64} for name in ALSO}
ALSO |= {
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "afmoe": {"mup_enabled": True},
    "laguna": {"moe_router_logit_softcapping": 0.0},
    "phimoe": {"router_jitter_noise": 0.01},
}
"""model_type -> fields that have no key, and that llama.cpp derives from other keys."""
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 64}
"""Sizes for which rows are whole blocks of every type."""
TIED = ("gemma2", "cohere", "cohere2", "cohere2_moe")
"""Families whose files hold no head, by model_type."""
WIDE_ALSO |= dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), mrope([8, 12, 12]))
WITH_TESTS_OF_THEIR_OWN = (*mixture_files.ARCHITECTURES, *latent_files.ARCHITECTURES)
WITH_TESTS_OF_THEIR_OWN += ("paddleocr_vl_text", "qwen3_asr", "qwen3_vl_moe", "qwen3_omni_moe_thinker")  # projectors
PROMPT = 45


def ids_of(seed):
    return torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(seed))


# -- in floats ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sample(HELD, always=lambda name: name in representative()))
def test_float32_logits(tmp_path, name):
    model_type, _, fields = VARIANTS[IDS.index(name)]
    theirs = save_tiny(tmp_path / "hub", model_type, fields | ALSO.get(model_type, {}))
    write_gguf(tmp_path / "hub", tmp_path / "model.gguf")
    ours = load(tmp_path / "model.gguf")
    ids = ids_of(1)
    expected = oracle(theirs, ids)
    assert expected.std() > 0.05
    logits = prefill(ours, ids)
    assert relative_error(logits, expected) < TOLERANCE
    # A file stores the scalings of Llama 3 and of longrope as factors, rounded to float32.
    if fields.get("rope_parameters", {}).get("rope_type") not in ("llama3", "longrope"):
        assert torch.equal(logits, prefill(load(tmp_path / "hub"), ids)), "the bits of the checkpoint"


def test_queries_keys_and_values_of_old_phi_2_files(tmp_path):
    save_tiny(tmp_path / "hub", "phi", {})
    state = load_file(tmp_path / "hub" / "model.safetensors")

    def add_fused(writer):
        for layer, end in itertools.product(range(2), ("weight", "bias")):
            parts = [state[f"model.layers.{layer}.self_attn.{part}_proj.{end}"].float() for part in "qkv"]
            writer.add_tensor(f"blk.{layer}.attn_qkv.{end}", torch.cat(parts).numpy())

    parts = tuple(f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in "qkv")
    write_gguf(tmp_path / "hub", tmp_path / "old.gguf", add=add_fused, without=parts)
    write_gguf(tmp_path / "hub", tmp_path / "new.gguf")
    old, new = (prefill(load(tmp_path / f"{name}.gguf"), ids_of(1)) for name in ("old", "new"))
    assert torch.equal(old, new)


LIKE_THE_HUB = (
    "llama-gqa mistral-window qwen2-tied qwen3-default phi3-default starcoder2-default stablelm-2-12b "
    "gpt_neox-sequential gpt2-default chatglm-default"
)


@pytest.mark.parametrize("name", LIKE_THE_HUB.split())
def test_the_config_is_that_of_the_hub(tmp_path, name):
    """All fields are equal, except those that a file does not have or expresses differently."""
    model_type, _, fields = VARIANTS[IDS.index(name)]
    save_tiny(tmp_path / "hub", model_type, fields | {"bos_token_id": 3, "eos_token_id": 5, "pad_token_id": 0})

    def add(writer):
        for special, index in (("bos", 3), ("eos", 5), ("pad", 0)):
            getattr(writer, f"add_{special}_token_id")(index)

    write_gguf(tmp_path / "hub", tmp_path / "model.gguf", add=add)
    hub, file = (
        LLMModel(path, num_threads=1, progress=False, kv_cache_bytes=2**24).config
        for path in (tmp_path / "hub", tmp_path / "model.gguf")
    )
    other = {"eos_token_id", "matrices_transposed", "qkv_by_head", "head_norms_stacked"} | (
        {"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
        if model_type.startswith("qwen")
        else set()
    )
    assert type(hub) is type(file) and file.eos_token_id == (5,)
    assert {field: value for field, value in vars(hub).items() if field not in other} == {
        field: value for field, value in vars(file).items() if field not in other
    }


def test_rows_in_any_pieces_are_the_hubs_rows(tmp_path):
    """This includes queries and keys, whose rows have another order in the file."""
    save_tiny(tmp_path / "hub", "llama", {"head_dim": 20, "attention_bias": True})
    held = write_gguf(tmp_path / "hub", tmp_path / "model.gguf", "F16")
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        assert set(reader.tensors) == set(held)
        for name, expected in held.items():
            assert reader.tensors[name].shape == tuple(expected.shape)
            assert reader.tensors[name].dtype is (torch.float16 if expected.ndim == 2 else torch.float32)
            rows = len(expected)
            for start, stop in ((0, None), (0, rows), (3, 29), (rows - 1, rows), (7, 8), (5, 5)):
                assert torch.equal(reader.read(name, start, stop).float(), expected[start:stop]), (name, start, stop)
            reader.release(name)
            for start, stop in reader.row_ranges(name, 1024):
                assert torch.equal(reader.read(name, start, stop).float(), expected[start:stop])
        assert reader.total_bytes == sum(t.numel() * (2 if t.ndim == 2 else 4) for t in held.values())
        assert reader.row_ranges("model.layers.0.self_attn.q_proj.weight", 16 * 32) == [
            (start, min(start + 16, 80)) for start in range(0, 80, 16)
        ]
        with pytest.raises(KeyError):
            reader.read("absent")


def test_the_order_of_queries_and_keys():
    assert hub_order(range(12), 6).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert hub_order(range(4, 9), 6).tolist() == [3, 5, 6, 8, 10]


# ------------------------------------------------------------------------------------------------------------ quantised


def quantised(tmp_path, model_type, types, **fields):
    """A file with tensors of these types, and transformers' model with the weights that it holds."""
    sizes = {name: size for name, size in WIDE.items() if model_type not in ("phi3", "chatglm") or name != "head_dim"}
    sizes |= {"chatglm": {"kv_channels": 64}, "gpt2": {"n_inner": 512}}.get(model_type, {})
    theirs = save_tiny(tmp_path / "hub", model_type, sizes | fields | WIDE_ALSO.get(model_type, {}))
    held = write_gguf(tmp_path / "hub", tmp_path / "model.gguf", types)
    state = {name.replace("embed_out", "lm_head"): tensor for name, tensor in held.items()}
    theirs.load_state_dict(state, strict=False)  # a tied head is not a separate tensor
    return tmp_path / "model.gguf", theirs, held


KINDS = sample(
    [kind.name for kind in BLOCK_TYPES.values()],
    lambda name: not name.startswith(("IQ1", "IQ2", "IQ3")) or name in ("IQ1_M", "IQ3_S"),
)

ACTIVATIONS = 2.3 / 127 / 12**0.5
"""Relative error that the kernels' rounding of activations to int8 adds to a product. The largest of 32 normal numbers
is about 2.3 times their spread (2.8 times for the 128 of super-blocks). The rounding to 127ths of it is uniform."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_against_transformers(tmp_path, kind):
    """Compares the rows read and torch's logits. The kernels' weights match bit for bit, and their logits match except
    for the rounding of activations."""
    path, theirs, held = quantised(tmp_path, "llama", kind)
    ours, on_kernels = load(path, backend="torch"), load(path)
    with GgufCheckpoint(path) as reader:
        assert reader.total_bytes == sum(reader.read(name).nbytes for name in reader.tensors)
        for name, expected in held.items():
            rows = reader.read(name, 3, 40)
            if expected.ndim == 2:
                assert isinstance(rows, BlockRows) and rows.layout == reader.tensors[name].dtype
                rows = rows.dequantize()
            assert torch.equal(rows, expected[3:40]), name
        for matrix in on_kernels.matrices():
            values = torch.cat([reader.read(f"{part}.weight").dequantize() for part in matrix.parts])
            assert torch.equal(on_kernels.ops.unpack(matrix.weight), values), matrix.parts
    layout = next(block.layout for block in BLOCK_TYPES.values() if block.name == kind)
    assert {found for matrix in ours.matrices() for found in matrix.plan.layouts.values()} == {layout}
    ids = ids_of(2)
    expected = oracle(theirs, ids)
    assert relative_error(prefill(ours, ids), expected) < TOLERANCE
    error = (prefill(on_kernels, ids) - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    # Nine products in sequence with independent errors. The operations between them at most double these errors, and
    # another half allows for chance.
    assert error < 2.5 * 9**0.5 * ACTIVATIONS * (2.8 / 2.3 if layout.in_super_blocks else 1)


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
FACTORS = {
    "model.layers.0.self_attn.q_proj.weight": ("blk.0.attn_q", [0.37]),
    "model.layers.0.mlp.experts.up_proj.weight": ("blk.0.ffn_up_exps", [1.3]),
    "model.layers.1.mlp.experts.down_proj.weight": ("blk.1.ffn_down_exps", [0.5, 1.7, 0.03, 2.9]),
    "lm_head.weight": ("output", [3.1]),
}


def test_the_factors_of_nvfp4(tmp_path):
    """A number multiplies each matrix. Packing rounds the product of scale and number to 11 bits."""

    def add(writer):
        for name, numbers in FACTORS.values():
            writer.add_tensor(f"{name}.scale", np.array(numbers, np.float32))
            writer.add_tensor(f"{name}.input_scale", np.array([7], np.float32))

    save_tiny(tmp_path / "hub", "qwen3_moe", WIDE | EXPERTS)
    write_gguf(tmp_path / "hub", tmp_path / "plain.gguf", "NVFP4")
    write_gguf(tmp_path / "hub", tmp_path / "scaled.gguf", "NVFP4", add)
    with GgufCheckpoint(tmp_path / "plain.gguf") as plain, GgufCheckpoint(tmp_path / "scaled.gguf") as scaled:
        assert plain.tensors == scaled.tensors
        for name in plain.tensors.keys() - FACTORS.keys():
            assert torch.equal(*(values(reader.read(name)) for reader in (plain, scaled)))
        for name, (_, numbers) in FACTORS.items():
            of_rows = torch.tensor(numbers).repeat_interleave(plain._tensor(name).num_rows // len(numbers))[:, None]
            for some in (slice(0, None), slice(60, 70)):
                expected = of_rows[some] * plain.read(name, some.start, some.stop).dequantize()
                torch.testing.assert_close(scaled.read(name, some.start, some.stop).dequantize(), expected)
    exact, packed = load(tmp_path / "scaled.gguf", backend="torch"), load(tmp_path / "scaled.gguf")
    for one, other in zip(exact.matrices(), packed.matrices(), strict=True):
        ours, theirs = packed.ops.unpack(other.weight), exact.ops.unpack(one.weight)
        assert ((ours - theirs).abs() <= 2.0**-11 * theirs.abs()).all()


def test_damaged_factors_of_nvfp4(tmp_path):
    save_tiny(tmp_path / "hub", "qwen3_moe", WIDE | EXPERTS)
    for numbers, message in (([1, 2], "one number for each matrix"), ([1, 2, np.nan, 4], "NaN or infinite")):
        factors = {"name": "blk.0.ffn_up_exps.scale", "tensor": np.array(numbers, np.float32)}
        write_gguf(tmp_path / "hub", tmp_path / "x.gguf", "NVFP4", lambda writer, f=factors: writer.add_tensor(**f))
        with pytest.raises(ValueError, match=f"blk.0.ffn_up_exps.scale.*{message}"):
            load(tmp_path / "x.gguf")


def values(rows):
    return rows if isinstance(rows, torch.Tensor) else rows.dequantize()


MIXTURES = {
    "Q4_K_M": lambda name: "Q6_K" if "v_proj" in name or "down_proj" in name or "lm_head" in name else "Q4_K",
    "Q2_K": lambda name: "Q3_K" if "v_proj" in name or "o_proj" in name else "Q6_K" if "lm_head" in name else "Q2_K",
    "Q5_0": lambda name: "Q8_0" if "embed" in name else "Q5_1" if "k_proj" in name else "Q5_0",
    "IQ4_NL": lambda name: "Q5_K" if "v_proj" in name or "qkv_proj" in name else "IQ4_NL",
    "floats within": lambda name: "F16" if "q_proj" in name else "BF16" if "embed" in name else "Q4_0",
}


TYPES = [name for name in ARCHITECTURES if name not in WITH_TESTS_OF_THEIR_OWN]
PAIRS = list(itertools.product(TYPES, MIXTURES))
ALWAYS = [pair for pair in PAIRS if pair[0] == "llama" or TYPES.index(pair[0]) % 5 == list(MIXTURES).index(pair[1])]
REST = [pytest.param(pair, marks=pytest.mark.thorough) for pair in PAIRS if pair not in ALWAYS]


@pytest.mark.parametrize("pair", ALWAYS + REST, ids="-".join)
def test_types_that_differ_within_a_layer(tmp_path, pair):
    """Parts of one matrix in pace have two types in the file. Each commit runs every architecture, and Llama with every
    mixture of types."""
    model_type, mixture = pair
    path, theirs, _ = quantised(
        tmp_path, model_type, MIXTURES[mixture], tie_word_embeddings=mixture == "Q5_0" or model_type in TIED
    )
    ids = ids_of(3)
    ours = load(path, backend="torch")
    assert relative_error(prefill(ours, ids), oracle(theirs, ids)) < TOLERANCE


def test_parts_of_a_matrix_stay_quantised(tmp_path, caplog):
    """Each part keeps its type, including floats, and the model's size is that of the file's tensors."""
    layouts = {kind.name: kind.layout for kind in BLOCK_TYPES.values()}
    for mixture, expected in (
        ("Q4_K_M", ["Q4_K", "Q4_K", "Q6_K"]),
        ("IQ4_NL", ["IQ4_NL", "IQ4_NL", "Q5_K"]),
        ("floats within", [None, "Q4_0", "Q4_0"]),
    ):
        path, _, _ = quantised(tmp_path / mixture, "llama", MIXTURES[mixture])
        with caplog.at_level(logging.WARNING, "pace"):
            ours = load(path, torch.bfloat16)
        plan = ours.layers[0].mixer.qkv.plan.layouts
        assert [plan.get(f"model.layers.0.self_attn.{name}_proj") for name in "qkv"] == list(map(layouts.get, expected))
        assert not caplog.records
        with GgufCheckpoint(path) as reader:
            stored = sum(file.tensors[name].nbytes for file in set(reader._files.values()) for name in file.tensors)
        padding = 200 * sum(1 for _ in ours.matrices()) + 16 * 2 * 512
        assert ours.nbytes <= 1.04 * stored + padding


def test_quantization_takes_what_is_in_floats(tmp_path, caplog):
    path, _, _ = quantised(tmp_path, "llama", lambda name: "F16" if "embed" in name or "lm_head" in name else "Q4_0")
    with caplog.at_level(logging.WARNING, "pace"):
        ours = load(path, torch.bfloat16, backend="torch", quantization="int4")
    assert (
        "14 tensors of this checkpoint are quantised already and stay as they are" in caplog.text
        and "2 others are quantised now" in caplog.text
    )
    plans = {part: matrix.plan.layouts.get(part) for matrix in ours.matrices() for part in matrix.parts}
    assert str(plans.pop("lm_head")) == str(plans.pop("model.embed_tokens")) == "int8, a scale a row"
    assert set(plans.values()) == {WeightLayout("int4", 32)}
    whole, _, _ = quantised(tmp_path / "whole", "llama", "Q8_0")
    with pytest.raises(ValueError, match="model.gguf.* is already quantised .*load it without quantization, or"):
        load(whole, backend="torch", quantization="int4")
