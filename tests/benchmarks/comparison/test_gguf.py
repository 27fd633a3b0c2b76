"""The GGUF file that `benchmarks/compare.py` writes: names, shapes, dtypes, values, and the order of query and key rows
that llama.cpp needs."""

from __future__ import annotations

import json
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks.comparison import gguf_families, gguf_writer
from benchmarks.comparison.checkpoint import write_checkpoint
from benchmarks.comparison.runtimes.llama_cpp_runtime import check_convertible, gguf_step_bytes
from pace.assets import TINY
from pace.bench.shapes import SHAPES
from pace.llm import LLMModel
from pace.tokenizer.loading import load_tokenizer
from tests.benchmarks.shapes import SMALL

KINDS = {"bf16": ("BF16", torch.bfloat16), "fp16": ("F16", torch.float16), "fp32": ("F32", torch.float32)}


def written(tmp_path, shape: str, dtype: str, tokenizer=None, **changes):
    """Writes a small checkpoint of `shape`'s architecture as a GGUF file. Returns the reader's fields and tensors, and
    the checkpoint's tensors."""
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    write_checkpoint(SHAPES[shape] | SMALL | changes, tmp_path)
    gguf_writer.write_gguf(tmp_path, tmp_path / "model.gguf", dtype, tokenizer)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {tensor.name: tensor for tensor in reader.tensors}, load_file(tmp_path / "model.safetensors")


def values(tensor) -> torch.Tensor:
    """A tensor of a GGUF file as fp32, with the rows in the checkpoint's order."""
    data = torch.from_numpy(np.array(tensor.data))
    if tensor.tensor_type.name == "BF16":
        data = data.view(torch.bfloat16)
    return data.float().reshape([int(size) for size in reversed(tensor.shape)])


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", ["qwen2.5-0.5b", "qwen3-4b", "llama-3.2-1b", "tinyllama-1.1b"])
def test_every_tensor(tmp_path, shape, dtype):
    fields, tensors, checkpoint = written(tmp_path, shape, dtype)
    kind, torch_dtype = KINDS[dtype]
    names = {gguf_families.tensor_name(SHAPES[shape] | SMALL, name): name for name in checkpoint}
    assert set(tensors) - {"rope_freqs.weight"} == set(names) and ("rope_freqs.weight" in tensors) == (
        shape == "llama-3.2-1b"
    )
    assert {
        "token_embd.weight",
        "output_norm.weight",
        "blk.1.attn_q.weight",
        "blk.1.ffn_down.weight",
        "blk.0.ffn_norm.weight",
    } <= set(tensors)
    assert ("output.weight" in tensors) == (shape == "tinyllama-1.1b")
    assert ("blk.0.attn_k.bias" in tensors) == shape.startswith("qwen2")
    is_permuted = not shape.startswith("qwen")
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        want = checkpoint[names[name]]
        assert tensor.tensor_type.name == (kind if want.dim() == 2 else "F32"), name
        if is_permuted and (".attn_q." in name or ".attn_k." in name):
            heads = SMALL["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
            got = values(tensor)
            assert not torch.equal(got, want.to(torch_dtype).float()), name
            got = got.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # back: pairs to halves
        else:
            got = values(tensor)
        assert torch.equal(got, want.to(torch_dtype if want.dim() == 2 else torch.float32).float()), name
    architecture = "llama" if is_permuted else shape[:5]
    assert fields["general.architecture"] == architecture and fields["tokenizer.ggml.model"] == "no_vocab"
    assert fields[f"{architecture}.vocab_size"] == 96 and fields[f"{architecture}.attention.head_count_kv"] == 2
    assert (
        fields[f"{architecture}.rope.freq_base"] == SHAPES[shape]["rope_theta"]
        and fields[f"{architecture}.attention.key_length"] == 16
    )


def test_the_permutation_turns_halves_into_pairs():
    rows = torch.arange(12)[:, None]  # two heads of six rows
    assert gguf_families.permute(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_rope_factors_are_those_of_transformers():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = SHAPES["llama-3.2-1b"]
    config = LlamaConfig(**{name: value for name, value in fields.items() if name != "architectures"})
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = fields["rope_theta"] ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    factors = torch.from_numpy(gguf_families.rope_factors(fields))
    assert factors[0] == 1 and factors[-1] == 32
    torch.testing.assert_close(plain / factors, scaled.double(), rtol=1e-5, atol=0)
    assert gguf_families.rope_factors(SHAPES["qwen2.5-0.5b"]) is None


OTHERS = dict(
    num_experts=12,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    num_local_experts=12,
    n_routed_experts=12,
    n_shared_experts=1,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    query_pre_attn_scalar=16,
)
"""Further sizes that some families have."""


@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v2-lite", "gemma-3-4b"])
def test_files_of_other_families_hold_the_same_model(tmp_path, shape):
    """The file and the checkpoint have the same weights in pace, bit for bit: their logits are equal."""
    sizes = SMALL | {name: value for name, value in OTHERS.items() if name in SHAPES[shape]}
    if shape == "deepseek-v2-lite":
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    fields, tensors, _ = written(tmp_path, shape, "fp32", TINY, **sizes | {"vocab_size": 2100})
    stacks = [tensor for name, tensor in tensors.items() if name.endswith("_exps.weight")]
    assert all(len(tensor.shape) == 3 and tensor.shape[2] == 12 for tensor in stacks)
    assert bool(stacks) == (shape != "gemma-3-4b")
    options = dict(dtype="float32", progress=False, num_threads=1)
    from_folder = LLMModel(tmp_path, **options)
    from_file = LLMModel(tmp_path / "model.gguf", **options)
    prompt = list(range(3, 80))
    with from_folder, from_file:
        assert torch.equal(from_folder.score([prompt])[0], from_file.score([prompt])[0])


def test_experts_keep_their_order(tmp_path):
    """Tensors in a checkpoint are sorted by name, so expert 10 comes before expert 2."""
    _, tensors, checkpoint = written(
        tmp_path, "qwen3-30b-a3b", "fp32", **{**SMALL, "moe_intermediate_size": 32, "num_experts": 12}
    )
    stack = values(tensors["blk.1.ffn_up_exps.weight"])
    for index in range(12):
        assert torch.equal(stack[index], checkpoint[f"model.layers.1.mlp.experts.{index}.up_proj.weight"].float())


def test_other_scalings_are_refused():
    with pytest.raises(NotImplementedError, match="got longrope"):
        gguf_families.add_config(MagicMock(), SHAPES["llama-3.2-1b"] | {"rope_scaling": {"rope_type": "longrope"}})


def test_bytes_of_a_step_are_those_of_the_experts_that_a_token_chooses(tmp_path):
    sizes = {"moe_intermediate_size": 32, "num_experts": 12, "num_experts_per_tok": 3}
    _, tensors, _ = written(tmp_path, "qwen3-30b-a3b", "fp32", **sizes)
    experts = sum(tensor.n_bytes for name, tensor in tensors.items() if "_exps" in name)
    rest = sum(
        tensor.n_bytes for name, tensor in tensors.items() if "_exps" not in name and name != "token_embd.weight"
    )
    assert gguf_step_bytes(tmp_path / "model.gguf") == rest + experts // 4


def test_tables_that_are_read_row_by_row_are_not_bytes_of_a_step(tmp_path):
    gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gemma4")
    for name in ("token_embd", "per_layer_token_embd", "blk.0.attn_q"):
        writer.add_tensor(f"{name}.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_step_bytes(tmp_path / "model.gguf") == 2 * 4 * 8 * 4


def test_other_architectures_are_refused(tmp_path):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OPTForCausalLM"]}))
    with pytest.raises(NotImplementedError, match="got OPTForCausalLM"):
        gguf_writer.write_gguf(tmp_path, tmp_path / "model.gguf", "bf16")


def test_the_checkpoint_is_the_same_each_time_and_its_weights_differ(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_checkpoint(SHAPES["qwen2.5-0.5b"] | SMALL, tmp_path / name)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    first, second = one["model.layers.0.mlp.up_proj.weight"], one["model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(first, second) and first.float().std() == pytest.approx(0.02, rel=0.05)
    assert json.loads((tmp_path / "one" / "config.json").read_text())["eos_token_id"] is None


def test_q8_0_with_a_tokenizer(tmp_path):
    """The blocks are within half a step of the weights, and the vocabulary has the right first and last tokens."""
    gguf = pytest.importorskip("gguf")
    changes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 2100}
    fields, tensors, checkpoint = written(tmp_path, "qwen2.5-0.5b", "q8_0", TINY, **changes)
    for name, original in checkpoint.items():
        tensor, wanted = tensors[gguf_families.tensor_name(SHAPES["qwen2.5-0.5b"] | SMALL, name)], original.float()
        if original.ndim == 1:
            assert tensor.tensor_type.name == "F32" and torch.equal(values(tensor), wanted)
            continue
        found = torch.from_numpy(gguf.dequantize(np.array(tensor.data), tensor.tensor_type)).reshape(wanted.shape)
        step = wanted.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True) / 127
        error = (found - wanted).unflatten(-1, (-1, 32)).abs()
        assert (
            tensor.tensor_type.name == "Q8_0" and (error <= 0.57 * step).all()
        )  # half a step, plus the rounding of the scale to fp16
    own = AutoTokenizer.from_pretrained(TINY)
    read = load_tokenizer(tmp_path / "model.gguf", 2100)
    text = "Once upon a time, 12 foxes"
    assert read.encode(text) == own.encode(text, add_special_tokens=False)
    assert len(fields["tokenizer.ggml.tokens"]) == 2100 and read.eos_token_id == 2099
    assert read.decode([2098]) == " w2098"


def test_slices_that_llama_cpp_does_not_load_are_refused_with_one_that_it_does():
    lite = SHAPES["deepseek-v2-lite"]
    for config in (lite, lite | {"num_hidden_layers": 2, "q_lora_rank": 1536}, SHAPES["qwen3-4b"]):
        check_convertible(config)
    with pytest.raises(NotImplementedError, match="refuses 3: .*deepseek-v2-lite-8-experts"):
        check_convertible(lite | {"num_hidden_layers": 3})
