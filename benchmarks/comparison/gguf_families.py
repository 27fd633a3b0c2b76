"""Contents of GGUF files for each family, as in llama.cpp's converter: the tensors, their sources in a checkpoint, and
the config keys.

llama.cpp rotates the pairs (2i, 2i + 1) of a Llama head; checkpoints on the Hub have them at (i, i + D/2). So the rows
of queries and keys are permuted. Experts are one tensor `[E, N, K]`. Gemma's norms include their added 1. DeepSeek's
`kv_b_proj` is split into a part that makes keys, transposed, and one that makes values.

Source of names: the gguf package's table. Source of keys: the GGUF specification (ggml/docs/gguf.md) and llama.cpp's
src/llama-arch.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "GptOssForCausalLM": "gpt-oss",
    "DeepseekV2ForCausalLM": "deepseek2",
    "Gemma3ForCausalLM": "gemma3",
}
PERMUTED = {"llama"}


class FileTensor(NamedTuple):
    """A tensor of a GGUF file."""

    name: str
    sources: tuple[str, ...]
    """Names of the checkpoint's tensors that it is made from."""
    arrange: Callable[..., Tensor]
    """Makes the tensor from its sources; with meta tensors, only its shape."""

    def shape(self, shapes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
        """`shapes`: those of the checkpoint's tensors."""
        return tuple(self.arrange(*(torch.empty(shapes[name], device="meta") for name in self.sources)).shape)


def file_tensors(config: dict[str, Any], names: list[str]) -> list[FileTensor]:
    """Returns all tensors of the file, for a checkpoint of `config` with tensors of these `names`. Raises
    NotImplementedError for an unsupported architecture, ImportError without the `gguf` package."""
    found: dict[str, FileTensor] = {}
    for name in names:
        for tensor in _of_tensor(config, name):
            before = found.get(tensor.name)  # an expert of the same stack
            found[tensor.name] = tensor if before is None else before._replace(sources=before.sources + tensor.sources)
    return list(found.values())


def _of_tensor(config: dict[str, Any], name: str) -> Iterator[FileTensor]:
    """Yields the file's tensors that a tensor of the checkpoint belongs to. Experts come in ascending order."""
    architecture = architecture_of(config)
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    block = f"blk.{layer}"
    if expert := re.fullmatch(r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", part):
        yield FileTensor(f"{block}.ffn_{expert[1]}_exps.weight", (name,), lambda *rows: torch.stack(rows))
    elif part.startswith("mlp.experts.gate_up_proj"):
        kind = "bias" if part.endswith("bias") else "weight"
        for first, half in enumerate(("gate", "up")):
            yield FileTensor(f"{block}.ffn_{half}_exps.{kind}", (name,), _every_second(first, kind == "weight"))
    elif part == "mlp.experts.down_proj":
        yield FileTensor(f"{block}.ffn_down_exps.weight", (name,), lambda stack: stack.transpose(1, 2))
    elif part == "mlp.experts.down_proj_bias":
        yield FileTensor(f"{block}.ffn_down_exps.bias", (name,), lambda stack: stack)
    elif part == "self_attn.kv_b_proj.weight":
        heads, key_dim = config["num_attention_heads"], config["qk_nope_head_dim"]
        keys, values = (slice(None, key_dim), slice(key_dim, None))
        by_head = lambda rows: rows.unflatten(0, (heads, -1))
        yield FileTensor(f"{block}.attn_k_b.weight", (name,), lambda rows: by_head(rows)[:, keys].transpose(1, 2))
        yield FileTensor(f"{block}.attn_v_b.weight", (name,), lambda rows: by_head(rows)[:, values])
    else:
        yield FileTensor(tensor_name(config, name), (name,), _whole(config, architecture, part))


def _every_second(first: int, is_matrix: bool) -> Callable[[Tensor], Tensor]:
    """Extracts gate or up from a stack `[E, K, 2 N]` or its biases `[E, 2 N]`, in which they alternate."""
    return lambda stack: (stack.transpose(1, 2) if is_matrix else stack)[:, first::2]


def _whole(config: dict[str, Any], architecture: str, part: str) -> Callable[[Tensor], Tensor]:
    rotated = re.fullmatch(r"self_attn\.([qk])_proj\.\w+", part)
    if rotated and architecture in PERMUTED:
        heads = config["num_attention_heads" if rotated[1] == "q" else "num_key_value_heads"]
        return lambda rows: permute(rows, heads)
    if architecture == "gemma3" and part.endswith("norm.weight"):
        return lambda weight: weight.float() + 1
    return lambda tensor: tensor


def architecture_of(config: dict[str, Any]) -> str:
    """GGUF's name of the architecture. Raises NotImplementedError for an unsupported one."""
    name = config["architectures"][0]
    if name not in ARCHITECTURES:
        raise NotImplementedError(f"the GGUF writer knows {', '.join(ARCHITECTURES)}; got {name}")
    return ARCHITECTURES[name]


def tensor_name(config: dict[str, Any], name: str) -> str:
    """GGUF's name of a checkpoint's tensor that is also a single tensor of the file."""
    import gguf

    architecture = architecture_of(config)
    number = next(number for number, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise NotImplementedError(f"a GGUF file of {architecture} has no tensor for {name}")
    return found if found.endswith((".weight", ".bias")) else f"{found}.weight"


def permute(rows: Tensor, heads: int) -> Tensor:
    """Permutes rows `[heads * D, ...]`: in each head, rows i and i + D/2 become rows 2i and 2i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


# -- keys ----------------------------------------------------------------------------------------------------------


def add_config(writer: Any, config: dict[str, Any]) -> None:
    """Writes all keys of the config except those of the vocabulary."""
    writer.add_name("random weights")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "kv_lora_rank" in config:
        _add_latents(writer, config)
    else:
        head_dim = head_dim_of(config)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    _add_rope_scaling(writer, config.get("rope_scaling") or {})
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    _add_experts(writer, config)


def head_dim_of(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _add_latents(writer: Any, config: dict[str, Any]) -> None:
    rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope_dim)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope_dim)


def _add_experts(writer: Any, config: dict[str, Any]) -> None:
    """Writes each field of a mixture, from the names that families give it."""
    import gguf

    for fields, add in (
        (("num_experts", "num_local_experts", "n_routed_experts"), writer.add_expert_count),
        (("num_experts_per_tok",), writer.add_expert_used_count),
        (("n_shared_experts",), writer.add_expert_shared_count),
        (("first_k_dense_replace",), writer.add_leading_dense_block_count),
    ):
        for field in fields:
            if config.get(field):
                add(config[field])
    architecture = architecture_of(config)
    if architecture in ("qwen3moe", "deepseek2", "gpt-oss"):
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if architecture == "deepseek2":
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)


def _add_rope_scaling(writer: Any, scaling: dict[str, Any]) -> None:
    """Writes the scaling, except that of Llama 3, which is a tensor: `rope_factors`. Raises NotImplementedError for an
    unsupported kind."""
    import gguf

    kind = scaling.get("rope_type", "llama3")
    if kind not in ("llama3", "linear", "yarn"):
        raise NotImplementedError(f"the GGUF writer knows the rope scalings llama3, linear and yarn; got {kind}")
    if kind == "llama3":
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])


def rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    """`[D/2]`: divisors of llama.cpp's angles for Llama 3's scaling; None without such a scaling.

    Source: transformers, `_compute_llama3_parameters`. Wavelengths below `original / high` are kept, those above
    `original / low` are stretched by `factor`, with a smooth transition between."""
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return None
    head_dim = head_dim_of(config)
    frequencies = config["rope_theta"] ** (-np.arange(0, head_dim, 2) / head_dim)
    wavelengths = 2 * np.pi / frequencies
    low, high, original = (
        scaling["low_freq_factor"],
        scaling["high_freq_factor"],
        scaling["original_max_position_embeddings"],
    )
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / scaling["factor"] + smooth)).astype(np.float32)
