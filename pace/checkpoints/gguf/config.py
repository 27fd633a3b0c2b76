"""Converts the metadata of a GGUF file to a config.json: `read_config`.

A key that would change the mathematics becomes a field that the reader of config.json refuses by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pace.checkpoints.gguf.families import LAYER_NORMS, PARALLEL, of_family
from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.latent import LATENT, LATENT_KEYS
from pace.checkpoints.gguf.llama_like import FULL_EVERY
from pace.checkpoints.gguf.mixtures import MIXTURE_KEYS, has_experts
from pace.checkpoints.gguf.names import ARCHITECTURES, hub_name
from pace.checkpoints.gguf.tokens import read_tokens

CONFIG_KEYS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
}
PER_LAYER_KEYS = {
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
"""Keys with one number, or one for each layer."""
MATH_KEYS = {
    "expert_count": "num_experts",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "attention.causal": "is_causal",
    "attention.max_alibi_bias": "alibi",
    "rope.dimension_sections": "use_mrope",
}
"""Keys that change the mathematics -> the config.json field with the same value. The reader of config.json refuses the
field if the architecture does not support it."""
HAS_BIASES = ("llama", "qwen3", "qwen3vl", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "glm", "glm4", "hunyuan-dense", "command-r", "cohere2", "qwen3moe", "olmoe", "granitemoe", "gpt-oss", "hunyuan-moe", "glm4moe", "phimoe")  # fmt: skip
"""Architectures whose queries, keys and values may have biases."""
READ_KEYS = {
    "attention.layer_norm_rms_epsilon",
    "attention.layer_norm_epsilon",
    PARALLEL,
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "attention.sliding_window_pattern",
    "rope.dimension_count",
}
READ_KEYS |= {
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    *(f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
}
READ_KEYS |= {
    *(f"rope.scaling.yarn_{name}" for name in ("beta_fast", "beta_slow", "ext_factor", "attn_factor", "log_multiplier"))
}
HARMLESS_KEYS = {"n_deepstack_layers", "vocab_size", "tensor_data_layout"}


def read_config(
    metadata: Metadata, architecture: str, shapes: dict[str, tuple[int, ...]], factors: dict[str, list[float]]
) -> dict[str, Any]:
    """Returns the fields of config.json.

    `architecture`: as `family_of` returns it.
    `shapes`: by the Hub's tensor names.
    `factors`: factors of the rotary embedding, by GGUF's names.

    Raises ValueError for missing values and wrong types, NotImplementedError for layers that differ from each other."""

    def key(name: str) -> str:
        return f"{metadata['general.architecture']}.{name}"

    fields: dict[str, Any] = {"architectures": [ARCHITECTURES[architecture]], "model_type": architecture}
    for name, field in CONFIG_KEYS.items():
        fields[field] = metadata.required(key(name), metadata.integer(key(name)))
    fields["num_hidden_layers"] -= metadata.integer(key("nextn_predict_layers"), 0)  # they predict further tokens
    for name, field in PER_LAYER_KEYS.items():
        fields[field] = _same_for_all(metadata, key(name))
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    for field in ("intermediate_size", "num_attention_heads"):
        metadata.required(key(next(name for name, other in PER_LAYER_KEYS.items() if other == field)), fields[field])
    for name, field in MATH_KEYS.items():
        value = metadata.get(key(name))
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if value is False or value:  # 0 means that the feature is absent
            fields[field] = _shortest(value) if type(value) is float else value
    epsilon = key(f"attention.layer_norm_{'' if architecture in LAYER_NORMS else 'rms_'}epsilon")
    epsilon_field = LAYER_NORMS.get(architecture, "rms_norm_eps")
    fields[epsilon_field] = _shortest(metadata.required(epsilon, metadata.number(epsilon)))
    fields["head_dim"] = _head_dim(metadata, key, fields, is_latent=architecture in LATENT)
    embedding = shapes.get(hub_name("token_embd.weight", architecture))
    if embedding is None or len(embedding) != 2:
        raise ValueError(
            f"{metadata.path} has no matrix token_embd.weight; its tensors are damaged or not a language model's"
        )
    fields["vocab_size"] = embedding[0]
    fields["tie_word_embeddings"] = "lm_head.weight" not in shapes
    if architecture in HAS_BIASES:
        fields["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in shapes
    if architecture in ("llama", "smollm3", "granite"):
        fields["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in shapes
    if architecture not in (*FULL_EVERY, "gpt-oss", "llama4") and not has_experts(metadata, "llama"):
        fields |= _window(metadata, key, architecture, fields)
    fields |= _rope(metadata, key, fields, factors)
    fields = of_family(architecture, fields, metadata, shapes) | special_tokens(metadata)
    unknown = {name.removeprefix(key("")) for name in metadata if name.startswith(key(""))}
    unknown -= (
        MIXTURE_KEYS
        | LATENT_KEYS
        | CONFIG_KEYS.keys()
        | PER_LAYER_KEYS.keys()
        | MATH_KEYS.keys()
        | READ_KEYS
        | HARMLESS_KEYS
    )
    # The reader of config.json reports unknown fields as ignored.
    return fields | {key(name): True for name in unknown}


def _same_for_all(metadata: Metadata, key: str) -> int | None:
    """An integer that is given once, or equal for all layers."""
    if not isinstance(metadata.get(key), np.ndarray):
        return metadata.integer(key)
    values = metadata[key].tolist()
    if len(set(values)) != 1 or type(values[0]) is not int:
        raise NotImplementedError(
            f"{metadata.path}: {key} differs between the layers ({values[:8]}...), which is not implemented"
        )
    return values[0]


def _head_dim(metadata: Metadata, key, fields: dict[str, Any], is_latent: bool) -> int:
    """Width of a head. For latent attention, only its rotated part."""
    heads = fields["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"{metadata.path}: {key('attention.head_count')} must be positive; got {heads}")
    if is_latent:
        return metadata.required(key("rope.dimension_count"), metadata.integer(key("rope.dimension_count")))
    head_dim = metadata.integer(key("attention.key_length"), fields["hidden_size"] // heads)
    if metadata.integer(key("attention.value_length"), head_dim) != head_dim:
        raise NotImplementedError(
            f"{metadata.path}: attention.key_length and attention.value_length differ, which is not implemented"
        )
    return head_dim


def _window(metadata: Metadata, key, architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of the sliding window. A Llama with a window is a Mistral; llama.cpp writes none for Qwen."""
    name = key("attention.sliding_window")
    window = metadata.integer(name, 0)
    if architecture in ("phi3", "phimoe"):
        return {"sliding_window": window or None}
    if window == 0 or window >= fields["max_position_embeddings"]:
        return {}
    if architecture != "llama":
        raise NotImplementedError(f"{metadata.path}: {name} = {window} is not implemented for {architecture}")
    return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}


def _rope(metadata: Metadata, key, fields: dict[str, Any], factors: dict[str, list[float]]) -> dict[str, Any]:
    """Fields of the rotary embedding, in the spelling of transformers 4."""
    head_dim, positions = fields["head_dim"], fields["max_position_embeddings"]
    dim = metadata.integer(key("rope.dimension_count"), head_dim)
    found: dict[str, Any] = {"rope_theta": metadata.number(key("rope.freq_base"), 10000.0)}
    if dim != head_dim:
        found["partial_rotary_factor"] = dim / max(1, head_dim)
    kind = metadata.text(
        key("rope.scaling.type"), "linear" if metadata.number(key("rope.scale_linear"), 1.0) != 1.0 else "none"
    )
    factor = metadata.number(key("rope.scaling.factor"), metadata.number(key("rope.scale_linear")))
    original = metadata.integer(key("rope.scaling.original_context_length"))
    if factors:
        # llama.cpp divides the angle of each pair by a factor, as longrope does. One set of factors is used up to the
        # original length, one beyond. Llama 3's factors are in rope_freqs, for any length.
        same = factors.get("rope_freqs.weight")
        short, long = (factors.get(f"rope_factors_{which}.weight", same) for which in ("short", "long"))
        if short is None or long is None or not len(short) == len(long) == -(-dim // 2):
            raise ValueError(
                f"{metadata.path}: {', '.join(sorted(factors))} must have a factor for each of {-(-dim // 2)} pairs; got {[len(values) for values in factors.values()]}"
            )
        found["original_max_position_embeddings"] = original or positions
        # Without attn_factor llama.cpp does not scale.
        attention = metadata.number(key("rope.scaling.attn_factor"), 1.0)
        return found | {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": short,
                "long_factor": long,
                "attention_factor": attention,
            }
        }
    if kind == "linear" and factor not in (None, 0.0, 1.0):
        return found | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        scaling: dict[str, Any] = {"rope_type": "yarn", "factor": metadata.required(key("rope.scaling.factor"), factor)}
        scaling["original_max_position_embeddings"] = original or positions
        for name in ("beta_fast", "beta_slow"):
            if (value := metadata.number(key(f"rope.scaling.yarn_{name}"))) is not None:
                scaling[name] = value
        # config.json calls this attention_factor. llama.cpp uses the usual factor for 1; omitting the field gives it
        # unrounded.
        usual = 1.0 + 0.1 * math.log(max(scaling["factor"], 1.0))
        attention = metadata.number(key("rope.scaling.yarn_attn_factor"), 1.0)
        if attention not in (1.0, float(np.float32(usual))):
            scaling["attention_factor"] = _shortest(attention)
        for name in ("attn_factor", "yarn_ext_factor", "yarn_log_multiplier"):
            if name == "yarn_log_multiplier" and fields["model_type"] in LATENT:
                continue
            if (value := metadata.number(key(f"rope.scaling.{name}"))) not in (None, 1.0):
                raise NotImplementedError(
                    f"{metadata.path}: {key(f'rope.scaling.{name}')} = {value} is not implemented"
                )
        return found | {"rope_scaling": scaling}
    if kind not in ("none", "linear"):
        raise NotImplementedError(
            f"{metadata.path}: {key('rope.scaling.type')} = {kind[:80]!r} without tensors of factors is not implemented; implemented: none, linear, yarn"
        )
    return found


def _shortest(value: float) -> float:
    """The decimal number that an fp32 value stands for: 1e-05 for 9.99999974737875e-06."""
    return float(str(np.float32(value))) if np.isfinite(value) else value


def special_tokens(metadata: Metadata) -> dict[str, Any]:
    """Ids of the begin, end and padding tokens, as in config.json. None for missing ones."""

    def token(name: str) -> int | None:
        return metadata.integer(f"tokenizer.ggml.{name}_token_id")

    ends = [token(name) for name in ("eos", "eot", "eom")]
    tokens = read_tokens(metadata)
    ends += tokens.ends if tokens else []
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    return {"bos_token_id": token("bos"), "eos_token_id": ends or None, "pad_token_id": token("padding")}
