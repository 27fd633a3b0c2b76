"""Converts the metadata of a GGUF file to a config.json: `read_config`.

A key that would change the mathematics becomes a field that the reader of config.json refuses by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys
from pace.checkpoints.gguf.architectures.changes import layers_of, shortest
from pace.checkpoints.gguf.architectures.gemma4 import share_of_pairs
from pace.checkpoints.gguf.architectures.registry import ARCHITECTURES
from pace.checkpoints.gguf.embedding import DENSE
from pace.checkpoints.gguf.file import Metadata
from pace.checkpoints.gguf.tokens import read_tokens

CONFIG_KEYS = {
    "max_position_embeddings": Key("context_length"),
    "hidden_size": Key("embedding_length"),
    "num_hidden_layers": Key("block_count"),
}
PER_LAYER_KEYS = {
    "intermediate_size": Key("feed_forward_length"),
    "num_attention_heads": Key("attention.head_count"),
}
"""Keys with one number, or one for each layer."""
MATH_KEYS = {
    "num_experts": "expert_count",
    "logit_scale": "logit_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "clip_qkv": "attention.clamp_kqv",
    "is_causal": "attention.causal",
    "alibi": "attention.max_alibi_bias",
    "use_mrope": "rope.dimension_sections",
}
"""Field of config.json -> key with the same value, which changes the mathematics. The reader of config.json refuses the
field if the architecture does not support it."""
OTHER_KEYS = {
    *("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length", "attention.key_length_mla", "attention.value_length_mla"),
    *("attention.q_lora_rank", "attention.kv_lora_rank"),
    *("attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers"),
    *("attention.key_length_swa", "attention.value_length_swa"),
    "embedding_length_per_layer_input",
    *("attention.rope_pattern", "attention.temperature_scale", "attention.temperature_length"),
    *("expert_shared_feed_forward_length", "expert_gating_func", "nextn_predict_layers"),
    *("rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base", "rope.freq_base_swa"),
    "rope.scale_linear",
    *(f"rope.scaling.{name}" for name in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
    *(
        f"rope.scaling.yarn_{name}"
        for name in ("beta_fast", "beta_slow", "ext_factor", "attn_factor", "log_multiplier")
    ),
    *("attention.recurrent_layers", "full_attention_interval", "ssm.inner_size", "moe_latent_size"),
    "kda.gate_lower_bound",
    *("n_deepstack_layers", "vocab_size", "tensor_data_layout"),
    *("pooling_type", "classifier.pooling_type", "classifier.output_labels", "hidden_activation"),
    *(f"{dense}_feat_{end}" for dense in DENSE for end in ("in", "out")),
    *("target_layers", "attention.indexer.types"),
}
"""Further keys that are read, or that change nothing."""
KEYED_FIELDS = (CONFIG_KEYS, PER_LAYER_KEYS, *(architecture.keys for architecture in ARCHITECTURES))
KNOWN_KEYS = OTHER_KEYS | {*MATH_KEYS.values(), *(key.name for fields in KEYED_FIELDS for key in fields.values())}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that become part of the config."""


def read_config(
    metadata: Metadata,
    architecture: Architecture,
    shapes: Mapping[str, tuple[int, ...]],
    factors: Mapping[str, list[float]],
) -> Fields:
    """Returns the fields of config.json.

    `shapes`: by the Hub's tensor names.
    `factors`: factors of the rotary embedding, by GGUF's names.

    Raises ValueError for missing values and wrong types, NotImplementedError for layers that differ from each other."""
    keys, on_hub = Keys(metadata, shapes), architecture.names.on_hub
    fields: Fields = {"model_type": architecture.model_type, **architecture.defaults}
    fields |= {field: keys.read(*key) for field, key in CONFIG_KEYS.items()}
    fields["num_hidden_layers"] -= keys.integer("nextn_predict_layers", 0)  # without multi-token prediction layers
    for field, key in PER_LAYER_KEYS.items():
        value = _number(keys, key.name, architecture)
        fields[field] = value if field in architecture.absent else keys.required(key.name, value)
    groups = _number(keys, "attention.head_count_kv", architecture)
    without = groups is None or (architecture.mixed and groups == 0)
    fields["num_key_value_heads"] = fields["num_attention_heads"] if without else groups
    for field, name in MATH_KEYS.items():
        value = keys.get(name)
        value = value.tolist() if isinstance(value, np.ndarray) else value
        if value is False or value:  # 0 means that the feature is absent
            fields[field] = shortest(value) if type(value) is float else value
    epsilon, other = (f"attention.layer_norm_{kind}epsilon" for kind in ("", "rms_"))
    if architecture.layer_norms is None:
        epsilon = other
    # The converter writes norm_eps of a ModernBERT as that of RMS norms.
    value = keys.required(epsilon, keys.number(epsilon, keys.number(other)))
    fields[architecture.layer_norms or "rms_norm_eps"] = shortest(value)
    fields["head_dim"] = _head_dim(keys, fields, architecture.latent) if architecture.attends else 0
    embedding = shapes.get(on_hub("token_embd.weight"))
    if embedding is None and not architecture.embeds:
        embedding = keys.read("vocab_size"), fields["hidden_size"]
    if embedding is None or len(embedding) != 2:
        raise ValueError(
            f"{metadata.path} has no matrix token_embd.weight; its tensors are damaged or not a language model's"
        )
    fields["vocab_size"] = embedding[0]
    fields["tie_word_embeddings"] = "lm_head.weight" not in shapes
    fields |= {field: on_hub(tensor) in shapes for field, tensor in architecture.present.items()}
    fields |= _rope(keys, fields, factors, architecture)
    fields = architecture.convert(architecture.window(fields, keys), keys)
    fields = {field: value for field, value in fields.items() if field not in architecture.absent}
    fields |= {field: keys.read(*key) for field, key in architecture.keys.items()} | special_tokens(metadata)
    if (stated := fields.get("first_k_dense_replace")) is not None:
        fields["first_k_dense_replace"] = _num_dense(stated, fields, architecture, shapes)
    # The reader of config.json reports unknown fields as ignored.
    return fields | {keys.prefix + name: True for name in keys.keys() - KNOWN_KEYS}


def _num_dense(stated: int, fields: Fields, architecture: Architecture, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Number of layers before the first one with a router. The converter states 0 for a config.json with
    mlp_layer_types."""
    routers = (architecture.names.on_hub(f"blk.{layer}.ffn_gate_inp.weight") for layer in layers_of(fields))
    return next((layer for layer, router in enumerate(routers) if router in shapes), stated)


def _number(keys: Keys, name: str, architecture: Architecture) -> int | None:
    """An integer that is given once, or for each layer: the first if they may vary."""
    if name in architecture.varied:
        return keys.per_layer(name, 1)[0]
    return _same_for_all(keys, name, architecture.mixed)


def _same_for_all(keys: Keys, name: str, mixed: bool) -> int | None:
    """An integer that is given once, or equal for all layers. In a mixed model it is that of the layers that have one;
    the others have 0."""
    if not isinstance(values := keys.get(name), np.ndarray):
        return keys.integer(name)
    values = values.tolist()
    if mixed and any(values):
        values = [value for value in values if value != 0]
    if len(set(values)) != 1 or type(values[0]) is not int:
        raise keys.refused(
            f"{keys.prefix}{name} differs between the layers ({values[:8]}...), which is not implemented"
        )
    return values[0]


def _head_dim(keys: Keys, fields: Fields, is_latent: bool) -> int:
    """Width of a head. For latent attention, only its rotated part."""
    heads = fields["num_attention_heads"]
    if heads < 1:
        raise ValueError(f"{keys.path}: {keys.prefix}attention.head_count must be positive; got {heads}")
    if is_latent:
        return keys.read("rope.dimension_count")
    head_dim = keys.integer("attention.key_length", fields["hidden_size"] // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refused("attention.key_length and attention.value_length differ, which is not implemented")
    return head_dim


def _rope(keys: Keys, fields: Fields, factors: Mapping[str, list[float]], architecture: Architecture) -> Fields:
    """Fields of the rotary embedding, in the spelling of transformers 4."""
    head_dim, positions = fields["head_dim"], fields["max_position_embeddings"]
    dim = keys.integer("rope.dimension_count", head_dim)
    found: Fields = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    if dim != head_dim:
        found["partial_rotary_factor"] = dim / max(1, head_dim)
    scale = keys.number("rope.scale_linear")
    kind = keys.text("rope.scaling.type", "none" if scale in (None, 1.0) else "linear")
    factor = keys.number("rope.scaling.factor", scale)
    original = keys.integer("rope.scaling.original_context_length") or positions
    if factors:
        # llama.cpp divides the angle of each pair by a factor, as longrope does. One set of factors is used up to the
        # original length, one beyond. Llama 3's factors are in rope_freqs, for any length.
        same = factors.get("rope_freqs.weight")
        short, long = (factors.get(f"rope_factors_{which}.weight", same) for which in ("short", "long"))
        if short is None or long is None or not len(short) == len(long) == -(-dim // 2):
            raise ValueError(
                f"{keys.path}: {', '.join(sorted(factors))} must have a factor for each of {-(-dim // 2)} "
                f"pairs; got {[len(values) for values in factors.values()]}"
            )
        if architecture.proportional:
            if (share := share_of_pairs(short)) is None:
                raise keys.refused("rope_freqs.weight must be ones, and then very large numbers")
            return found | {"rope_scaling": {"rope_type": "proportional"}, "partial_rotary_factor": share}
        # Without attn_factor llama.cpp does not scale.
        scaling = {"attention_factor": keys.number("rope.scaling.attn_factor", 1.0)}
        scaling |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        return found | {"original_max_position_embeddings": original, "rope_scaling": scaling}
    if kind == "linear" and factor not in (None, 0.0, 1.0):
        return found | {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    if kind == "yarn":
        return found | {
            "rope_scaling": _yarn(keys, keys.required("rope.scaling.factor", factor), original, architecture)
        }
    if kind not in ("none", "linear"):
        raise keys.refused(
            f"{keys.prefix}rope.scaling.type = {kind[:80]!r} without tensors of factors is not implemented; "
            "implemented: none, linear, yarn"
        )
    return found


def _yarn(keys: Keys, factor: float, original: int, architecture: Architecture) -> Fields:
    reads_multiplier = architecture.latent or architecture.log_multiplier
    scaling: Fields = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for name in ("beta_fast", "beta_slow"):
        if (value := keys.number(f"rope.scaling.yarn_{name}")) is not None:
            scaling[name] = value
    # config.json calls this attention_factor. llama.cpp uses the usual factor for 1; omitting the field gives it
    # unrounded.
    usual = 1.0 + 0.1 * math.log(max(factor, 1.0))
    attention = keys.number("rope.scaling.yarn_attn_factor", 1.0)
    if attention not in (1.0, float(np.float32(usual))):
        scaling["attention_factor"] = shortest(attention)
    for name in ("attn_factor", "yarn_ext_factor", *(() if reads_multiplier else ("yarn_log_multiplier",))):
        if (value := keys.number(f"rope.scaling.{name}")) not in (None, 1.0):
            raise keys.refused(f"{keys.prefix}rope.scaling.{name} = {value} is not implemented")
    return scaling


def special_tokens(metadata: Metadata) -> dict[str, Any]:
    """Ids of the begin, end and padding tokens, as in config.json. None for missing ones."""

    def token(name: str) -> int | None:
        return metadata.integer(f"tokenizer.ggml.{name}_token_id")

    ends = [token(name) for name in ("eos", "eot", "eom")]
    tokens = read_tokens(metadata)
    ends += tokens.ends if tokens else []
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    return {"bos_token_id": token("bos"), "eos_token_id": ends or None, "pad_token_id": token("padding")}
