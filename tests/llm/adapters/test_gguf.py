"""Adapters in GGUF files: the same weights as the adapter that they were converted from, for both kinds of bases."""

from __future__ import annotations

import math

import pytest
import torch

from pace.assets import TINY
from pace.llm.adapters.gguf import read_gguf
from pace.llm.adapters.read import read_adapter
from pace.llm.adapters.slots import AdapterSlots
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.runners.program import ProgramRunner
from tests.llm.models.variants import save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error

gguf = pytest.importorskip("gguf")
pytest.importorskip("peft")
from tests.llm.adapters.test_families import prefill  # noqa: E402
from tests.llm.adapters.test_merge import load  # noqa: E402

CONFIG = Checkpoint(TINY).config
HEADS = {"q": CONFIG["num_attention_heads"], "k": CONFIG["num_key_value_heads"]}
SIZES = {"attn_q": 256, "attn_k": 256 * HEADS["k"] // HEADS["q"], "attn_output": 256, "ffn_up": 64}
NAMES = {f"attn_{part}": f"self_attn.{part[0]}_proj" for part in ("q", "k", "output")} | {"ffn_up": "mlp.up_proj"}


def permuted(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys as llama.cpp's converter orders them."""
    head = rows.shape[0] // num_heads
    return rows.view(num_heads, 2, head // 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def write(path, tensors, architecture="llama", alpha=6.0, kind="adapter", lora="lora", **more):
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_string("general.type", kind)
    writer.add_string("adapter.type", lora)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    for key, value in more.items():
        writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_pairs(r: int = 3) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)
    return {name: (draw(r, 256), draw(size, r)) for name, size in SIZES.items()}


def as_file(pairs) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, (a, b) in pairs.items():
        tensors[f"blk.1.{name}.weight.lora_a"] = a
        heads = HEADS.get(name.removeprefix("attn_"))
        tensors[f"blk.1.{name}.weight.lora_b"] = b if heads is None else permuted(b, heads)
    return tensors


def test_rows_are_those_of_the_hub(tmp_path):
    pairs = random_pairs()
    found = read_adapter(write(tmp_path / "a.gguf", as_file(pairs)), "a", Checkpoint(TINY))
    assert found.modules.keys() == {f"model.layers.1.{NAMES[name]}" for name in pairs}
    for name, (a, b) in pairs.items():
        module = found.modules[f"model.layers.1.{NAMES[name]}"]
        assert torch.equal(module.a, a) and torch.equal(module.b, b) and module.scale == 2.0, name


def test_bases_in_files_and_other_types(tmp_path):
    path = write(tmp_path / "a.gguf", as_file(random_pairs()))
    for model_type, architecture in (("llama", "llama"), ("mistral", "llama"), ("mistral", None), ("mixtral", None)):
        assert read_gguf(path, "a", {**CONFIG, "model_type": model_type}, architecture).rank == 3
    for model_type, architecture in (("qwen2", None), ("qwen2", "qwen2"), ("llama", "arcee"), ("gpt_neox", None)):
        with pytest.raises(ValueError, match="adapter for the architecture 'llama'"):
            read_gguf(path, "a", {**CONFIG, "model_type": model_type}, architecture)


def test_half_precision_and_no_alpha(tmp_path):
    pairs = random_pairs()
    tensors = {name: tensor.half() for name, tensor in as_file(pairs).items()}
    for alpha in (None, 0.0):
        found = read_adapter(write(tmp_path / "a.gguf", tensors, alpha=alpha), "a", Checkpoint(TINY))
        module = found.modules["model.layers.1.self_attn.o_proj"]
        assert module.scale == 1.0 and torch.equal(module.b, pairs["attn_output"][1].half())


def test_experts_and_embeddings(tmp_path):
    """With shapes as convert_lora_to_gguf.py writes them. Gate and up have the same shape: the name says which."""
    from safetensors.torch import load_file

    save_tiny(tmp_path, "qwen3_moe", {"tie_word_embeddings": False})
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.3
    state = load_file(tmp_path / "model.safetensors")
    expected, tensors = dict(state), {}
    for part in ("up", "down"):
        names = sorted(name for name in state if "layers.1.mlp.experts." in name and f".{part}_proj" in name)
        n, k = state[names[0]].shape
        a, b = draw(len(names), 3, k), draw(len(names), n, 3)
        tensors |= {f"blk.1.ffn_{part}_exps.weight.lora_{end}": pair for end, pair in (("a", a), ("b", b))}
        expected |= {name: state[name].float() + 2 * b[e] @ a[e] for e, name in enumerate(names)}
    table = "model.embed_tokens.weight"
    (v, h), (a, b) = state[table].shape, (draw(len(state[table]), 3), draw(state[table].shape[1], 3))
    tensors |= {"token_embd.weight.lora_a": a, "token_embd.weight.lora_b": b}
    expected[table] = state[table].float() + 2 * a @ b.T
    config = Checkpoint(tmp_path).config
    weights = read_gguf(write(tmp_path / "a.gguf", tensors, "qwen3moe"), "x", config, None)
    embedding = weights.modules["model.embed_tokens"]
    assert embedding.of_embedding and (embedding.a.shape, embedding.b.shape) == ((3, v), (h, 3))
    ids = torch.arange(2, 40)
    ours, theirs, plain = (
        prefill(ProgramRunner(load(tmp_path, *how)), ids)
        for how in ((weights,), (None, torch.float32, None, expected), ())
    )
    assert relative_error(ours, theirs) < TOLERANCE < 0.01 < relative_error(plain, theirs)
    with pytest.raises(NotImplementedError, match=r"layers\.1\.mlp\.experts.*merge=True"):
        AdapterSlots(load(tmp_path)).check(weights)
    AdapterSlots(load(tmp_path)).check(AdapterWeights("x", weights.modules))


A, B = torch.ones(3, 256), torch.ones(256, 3)


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        ({}, {}, "no tensors of an adapter"),
        ({"blk.0.attn_output.weight.lora_a": A}, {}, "B is missing"),
        ({"blk.0.attn_output.weight.lora_b": B}, {}, "A is missing"),
        ({"blk.0.attn_norm.weight": torch.ones(256)}, {}, "norms are not implemented"),
        ({"blk.0.attn_output.weight": B}, {}, "are not implemented in adapters"),
        ({"token_embd.weight.lora_a": A, "token_embd.weight.lora_b": B}, {}, "fit together"),
        ({"blk.0.ffn_up_exps.weight.lora_a": A}, {}, "must be a matrix of each expert"),
        (
            {"blk.0.ffn_up_exps.weight.lora_a": A[None], "blk.0.ffn_up_exps.weight.lora_b": B.expand(2, -1, -1)},
            {},
            "A of up_proj.weight has 1 experts, and B has 2",
        ),
        ({"blk.0.attn_output.weight.lora_a": A[:2], "blk.0.attn_output.weight.lora_b": B}, {}, "fit together"),
        ({"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B[:7]}, {}, "not those of"),
        ({"blk.0.attn_output.weight.lora_a": A * math.nan}, {}, "not finite"),
        ({"blk.0.attn_output.weight.lora_a": A}, {"kind": "model"}, "general.type must be 'adapter'"),
        ({"blk.0.attn_output.weight.lora_a": A}, {"lora": "other"}, "adapter.type must be 'lora'"),
        ({"blk.0.attn_output.weight.lora_a": A}, {"alpha": math.inf}, "alpha must be finite"),
        ({"blk.0.attn_output.weight.lora_a": A}, {"adapter.alora.invocation_tokens": [1]}, "aLoRA"),
        ({"blk.0.attn_output.weight.lora_a": A}, {"architecture": "gptneox"}, "adapter for the architecture 'gptneox'"),
    ],
)
def test_files_that_are_refused(tmp_path, tensors, options, message):
    path = write(tmp_path / "bad.gguf", tensors, **options)
    with pytest.raises((NotImplementedError, ValueError), match=f"bad.gguf.*{message}"):
        read_adapter(path, "a", Checkpoint(TINY))


def test_rows_in_another_order_than_on_the_hub(tmp_path):
    tensors = {"blk.0.attn_qkv.weight.lora_a": A, "blk.0.attn_qkv.weight.lora_b": torch.ones(768, 3)}
    path = write(tmp_path / "a.gguf", tensors, architecture="gptneox")
    with pytest.raises(NotImplementedError, match="another order"):
        read_gguf(path, "a", {"model_type": "gpt_neox"}, None)
    found = read_gguf(path, "a", {"model_type": "gpt_neox", "qkv_by_head": False}, "gptneox")
    assert list(found.modules) == ["gpt_neox.layers.0.attention.query_key_value"]
