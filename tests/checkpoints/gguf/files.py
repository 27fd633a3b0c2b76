"""GGUF files of checkpoints, like those of llama.cpp's converter, with tensors of any type and with tokenizers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.comparison.gguf_families import permute, rope_factors
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from tests.checkpoints.gguf import latent_files, mixture_files
from tests.quant import ternary_types

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "gemma2": "gemma2",
    "phi": "phi2",
    "gemma3_text": "gemma3", "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "olmo3": "olmo2",
    "glm": "chatglm", "glm4": "glm4", "ernie4_5": "ernie4_5", "hunyuan_v1_dense": "hunyuan-dense",
    "cohere": "command-r", "cohere2": "cohere2", "minicpm": "minicpm", "starcoder2": "starcoder2",
    "stablelm": "stablelm", "gpt_neox": "gptneox", "gpt2": "gpt2", "chatglm": "chatglm",
    "paddleocr_vl_text": "paddleocr",
    **mixture_files.ARCHITECTURES, **latent_files.ARCHITECTURES,
}  # fmt: skip
"""GGUF's architecture names by model_type."""
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "minicpm")

HALVES = {
    Kind.Q2_K: (80, 82, 1.5), Kind.Q3_K: (108, None, 0), Kind.Q4_K: (0, 2, 7.5), Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0), Kind.IQ4_NL: (0, None, 0), Kind.IQ4_XS: (0, None, 0), Kind.IQ1_S: (0, None, 0),
    Kind.IQ1_M: (None, None, 0), Kind.IQ2_XXS: (0, None, 0), Kind.IQ2_XS: (0, None, 0), Kind.IQ2_S: (0, None, 0),
    Kind.IQ3_XXS: (0, None, 0), Kind.IQ3_S: (0, None, 0),
    Kind.NVFP4: (None, None, 0),
}  # fmt: skip
"""Types that the gguf package reads but does not write. The values are two offsets in a block, of the fp16 scale and of
the minima's scale, and a ratio. With this ratio of the second scale to the first, weights are centred around zero. The
scale of IQ1_M lies in the high four bits of its last four shorts. NVFP4 begins with four float8 scales."""

SEEING = {
    "qwen2_vl": "qwen2vl", "qwen2_5_vl": "qwen2vl", "qwen3_vl": "qwen3vl", "qwen3_asr": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe", "qwen3_omni_moe_thinker": "qwen3vlmoe",
}  # fmt: skip
"""The same for models with towers, whose files have the text part."""
ARCHITECTURES |= SEEING


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The model of a file, for one thread."""
    return load_model(LoadOptions(path, dtype=dtype, num_threads=1, progress=False, **options))


def write_gguf(
    folder: Path,
    path: Path,
    types: str | Callable[[str], str] = "F32",
    add: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    tensors_a_shard: int = 0,
    without: tuple[str, ...] = ("-",),
) -> dict[str, Tensor]:
    """Writes the checkpoint in `folder` (config.json and one model.safetensors) to `path`. Returns the weights that the
    file holds, in float32 and by the Hub's names. `types` is ggml's name of the matrices' type, for all or by name.
    `add` may add more to the file. Tensors whose names begin with one of `without` are left out."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("thinker_config", config)
    config |= {**config.get("text_config", {}), "model_type": config["model_type"]}
    config = mixture_files.flat_dbrx(config) if config["model_type"] == "dbrx" else config
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_shard)
    rope = add_config(writer, config)
    add(writer)
    names = tensor_names(architecture, config.get("num_hidden_layers") or 8)
    held, state = {}, load_file(folder / "model.safetensors")
    for name, tensor in rearranged(state, config).items():
        if name.startswith(without):
            continue
        is_matrix = tensor.ndim >= 2 and "norm" not in name and not name.endswith(("bias", "ffn_gate_inp.weight"))
        kind = ternary_types.kind_of((types if isinstance(types, str) else types(name)) if is_matrix else "F32")
        data, held[name] = stored(tensor.float().contiguous(), kind, seed=len(held))
        part = re.search(r"self_attn\.([qk])_proj", name)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data + 1
        if part and architecture in PERMUTED:
            heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
            data = permute(torch.from_numpy(data), heads).contiguous().numpy()
        writer.add_tensor(names(name), data, raw_dtype=kind)
    for name, factors in rope.items():
        writer.add_tensor(name, factors)
    finish(writer)
    return rearranged(held, config, back=True)


def add_stored(writer: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str, as_floats: bool = False) -> None:
    """Adds a tensor in a type of ggml. With `as_floats`, its values in that type become float32."""
    data, values = stored(tensor.float().contiguous(), Kind[kind])
    if as_floats:
        data, kind = values.contiguous().numpy(), "F32"
    writer.add_tensor(name, data, raw_dtype=Kind[kind])


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes all of a file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()  # no progress bar, which would go to stderr
    writer.close()


def tensor_names(architecture: str, num_layers: int) -> Callable[[str], str]:
    """Function from a checkpoint's tensor name to GGUF's, from the gguf package. The converter cuts ChatGLM's names.
    Those that the package does not know have the names of Qwen3."""
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    others = {"deepseek32": "deepseek2", "glm-dsa": "deepseek2"}
    number = numbers.get(architecture, numbers[others.get(architecture, "qwen3")])
    known = gguf.get_tensor_name_map(number, num_layers)
    prefix = "transformer." if architecture == "chatglm" else ""
    return lambda name: (
        name
        if name.startswith("blk.")
        else known.get_name(name.removeprefix(prefix), try_suffixes=(".weight", ".bias"))
    )


def rearranged(state: dict[str, Tensor], config: dict[str, Any], back: bool = False) -> dict[str, Tensor]:
    """Arranges tensors' elements like the converter. GPT-2's matrices are transposed, GPT-NeoX's queries come before
    its keys and values, and StableLM's head norms are stacked. Of Qwen's vision models only the text part is kept.
    `back` gives the Hub's arrangement again."""
    family = config["model_type"]
    if family in SEEING:
        head, within = ("model.", "model.language_model.") if back else ("model.language_model.", "model.")
        towers = ("visual.", "audio_tower.", "multi_modal_projector.")
        text = {name: tensor for name, tensor in state.items() if not any(tower in name for tower in towers)}
        text = {re.sub(f"^{head}", within, name.removeprefix("thinker.")): tensor for name, tensor in text.items()}
        return mixture_files.arranged(with_stacks(text)) if not back and "num_experts_per_tok" in config else text
    if family == "gpt2":
        turned = r".*\.(c_attn|c_proj|c_fc)\.weight"
        return {name: tensor.t() if re.fullmatch(turned, name) else tensor for name, tensor in state.items()}
    if family == "gpt_neox":
        heads = config["num_attention_heads"]
        parts = (3, heads) if back else (heads, 3)
        return {
            name: tensor.unflatten(0, (*parts, -1)).transpose(0, 1).flatten(0, 2)
            if "query_key_value" in name
            else tensor
            for name, tensor in state.items()
        }
    if family == "dbrx" and not back:
        return mixture_files.of_dbrx(state, config)
    if family in (*mixture_files.ARCHITECTURES, *latent_files.MIXTURES) and not back:
        state = mixture_files.arranged(with_stacks(state) if family == "mistral4" else state)
    if family in latent_files.ARCHITECTURES and not back:
        state = latent_files.arranged(state, config)
    if family != "stablelm":
        return state
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        if back and "layernorm.weight" in name and "self_attn" in name:
            stem = name.removesuffix("weight")
            found |= {f"{stem}norms.{head}.weight": row for head, row in enumerate(tensor)}
        elif norm := re.fullmatch(r"(.*_layernorm)\.norms\.(\d+)\.weight", name):
            found.setdefault(f"{norm[1]}.weight", {})[int(norm[2])] = tensor
        else:
            found[name] = tensor
    stacks = {
        name: torch.stack([rows[head] for head in sorted(rows)])
        for name, rows in found.items()
        if isinstance(rows, dict)
    }
    return found | stacks


def with_stacks(text: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gives GGUF's names to the experts of Qwen3-VL-MoE and Mistral 4, which transformers saves as `[E, 2 I, H]` and
    `[E, H, I]`."""
    found = {}
    for name, tensor in text.items():
        stack = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)
        parts = stack[2].split("_") if stack else ()
        pieces = zip(parts, tensor.chunk(len(parts), 1)) if stack else ()
        found |= {f"blk.{stack[1]}.ffn_{part}_exps.weight": piece for part, piece in pieces} or {name: tensor}
    return found


def stored(values: Tensor, kind: Kind, seed: int = 0) -> tuple[np.ndarray, Tensor]:
    """The stored data of a tensor, and the values that it represents. If the package cannot write the type, they are
    random blocks of about the same spread."""
    if kind in ternary_types.SIZES:
        data = ternary_types.quantize(values.numpy(), kind)
        return data, torch.from_numpy(ternary_types.dequantize(data, kind))
    if kind in HALVES:
        *stack, k = values.shape
        blocks = random_blocks((math.prod(stack), k), kind, float(values.std()), seed)
        data = blocks.reshape(*stack, -1)
    elif kind == Kind.BF16:
        data = values.bfloat16().view(torch.uint8).numpy()
    else:
        data = gguf.quants.quantize(values.numpy(), kind)
    return data, torch.from_numpy(np.array(gguf.quants.dequantize(data, kind))).reshape(values.shape)


def random_blocks(shape: tuple[int, int], kind: Kind, spread: float, seed: int) -> np.ndarray:
    """Random blocks, uint8 `[rows, row bytes]`."""
    weights, nbytes = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (shape[0], shape[1] // weights, nbytes), dtype=np.uint8)
    scale_at, min_at, min_factor = HALVES[kind]

    def put(scales: np.ndarray) -> np.ndarray:
        for at, factor in ((scale_at, 1.0), (min_at, min_factor)):
            if at is not None:
                blocks[..., at : at + 2] = (factor * scales).astype(np.float16)[..., None].view(np.uint8)
        if kind == Kind.IQ1_M:
            fields = scales.astype(np.float16).view(np.uint16)[..., None] >> np.arange(0, 16, 4, dtype=np.uint16)
            high = blocks[..., -7::2]
            high[:] = high & 15 | ((fields & 15) << 4).astype(np.uint8)
        if kind == Kind.NVFP4:
            blocks[..., :4] = np.clip(8 * (np.log2(scales) + 7), 1, 126).round()[..., None]
        return blocks.reshape(shape[0], -1)

    sizes = random.uniform(0.5, 1.5, blocks.shape[:2])
    return put(sizes * (spread / gguf.quants.dequantize(put(sizes), kind).std()))


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Adds the keys of a config.json, and returns the tensors that belong to its rotary embedding."""
    if config["model_type"] in ("gpt2", "chatglm"):
        {"gpt2": add_gpt2, "chatglm": add_chatglm}[config["model_type"]](writer, config)
        return {}
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    part = config.get("partial_rotary_factor", 1.0)
    dim = int(head_dim * rope.get("full_attention", rope).get("partial_rotary_factor", part))
    positions = config.get("max_position_embeddings", 32768)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(positions)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    widths = ("intermediate_size_mlp", "prefix_dense_intermediate_size", "intermediate_size")
    writer.add_feed_forward_length(next(config[name] for name in widths if config.get(name)))
    writer.add_head_count(config.get("num_attention_heads_per_layer") or heads)
    if config["model_type"] in latent_files.ARCHITECTURES:
        latent_files.add_keys(writer, config)
    else:
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_rope_dimension_count(dim)
    if config["model_type"] in LAYER_NORMS:
        writer.add_layer_norm_eps(config[LAYER_NORMS[config["model_type"]]])
    if config["model_type"] not in LAYER_NORMS or config.get("rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "use_parallel_residual" in config:
        writer.add_parallel_residual(config["use_parallel_residual"])
    if config.get("sliding_window") and config["model_type"] not in ("qwen2", "qwen3", "smollm3", "dots1"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    add_factors(writer, config)
    is_seeing_mixture = config["model_type"] in SEEING and "num_experts_per_tok" in config
    if config["model_type"] in (*mixture_files.ARCHITECTURES, *latent_files.MIXTURES) or is_seeing_mixture:
        mixture_files.add_keys(writer, config)
    if "full_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        if "partial_rotary_factor" in rope["sliding_attention"]:
            writer.add_rope_dimension_count_swa(int(head_dim * rope["sliding_attention"]["partial_rotary_factor"]))
        rope = rope["full_attention"]
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if "alpha" in rope:
        theta, rope = theta * rope["alpha"] ** (dim / (dim - 2)), {}
    writer.add_rope_freq_base(theta)
    kind = rope.get("rope_type", "default")
    if kind == "llama3":
        return {
            "rope_freqs.weight": rope_factors(
                {**config, "head_dim": head_dim, "rope_theta": rope["rope_theta"], "rope_scaling": rope}
            )
        }
    if kind == "longrope":
        original = config.get("original_max_position_embeddings") or rope["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = positions / original
        usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        writer.add_rope_scaling_attn_factors(rope.get("short_mscale", usual))
        return {
            f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32) for which in ("short", "long")
        }
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        for field, add in {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }.items():
            if field in rope:
                add(rope[field])
    return {}


def add_factors(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Adds the factors and caps that the family has."""
    if config["model_type"] == "minicpm":
        writer.add_embedding_scale(config["scale_emb"])
        writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
        writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])
    for field, add in {
        "attention_multiplier": writer.add_attention_scale,
        "embedding_multiplier": writer.add_embedding_scale,
        "residual_multiplier": writer.add_residual_scale,
        "logits_scaling": writer.add_logit_scale,
        "logit_scale": writer.add_logit_scale,
        "attn_logit_softcapping": writer.add_attn_logit_softcapping,
        "final_logit_softcapping": writer.add_final_logit_softcapping,
        "clip_qkv": writer.add_clamp_kqv,
    }.items():
        if config.get(field) is not None:
            add(config[field])


LAYER_NORMS = {"starcoder2": "norm_epsilon"} | dict.fromkeys(
    ("phi", "stablelm", "gpt_neox", "cohere", "cohere2", "cohere2_moe", "dbrx"), "layer_norm_eps"
)


def add_gpt2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_block_count(config["n_layer"])
    writer.add_feed_forward_length(config["n_inner"] or 4 * config["n_embd"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def add_chatglm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["seq_length"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_layers"])
    writer.add_feed_forward_length(config["ffn_hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["multi_query_group_num"])
    writer.add_layer_norm_rms_eps(config["layernorm_epsilon"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"] // 2)
    writer.add_rope_freq_base(10000.0 * config["rope_ratio"])
    writer.add_add_bos_token(False)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, pre: str | None = None) -> None:
    """Adds the vocabulary, special tokens and chat template of one of transformers' fast tokenizers.

    `pre` names the rule by which a byte-level tokenizer splits texts. Without it the tokenizer is a sentencepiece one,
    and its scores are made from its merges."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens: list[str] = [""] * len(tokenizer)
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
    types = [gguf.TokenType.NORMAL] * len(tokens)
    for added in state["added_tokens"]:
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2" if pre else "llama")
    writer.add_token_list(tokens)
    if pre:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        rank = {"".join(merge): index for index, merge in reversed(list(enumerate(merges)))}
        writer.add_token_scores([-float(rank.get(token, len(merges))) for token in tokens])
        types = [
            gguf.TokenType.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else kind
            for token, kind in zip(tokens, types, strict=True)
        ]
        if tokenizer.unk_token_id is not None:
            types[tokenizer.unk_token_id] = gguf.TokenType.UNKNOWN
    writer.add_token_types(types)
    for name in ("bos", "eos", "unk", "pad"):
        if (index := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(index)
    adds = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(adds["bos"] is not None and ids[:1] == [adds["bos"]])
    writer.add_add_eos_token(adds["eos"] is not None and ids[-1:] == [adds["eos"]])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
