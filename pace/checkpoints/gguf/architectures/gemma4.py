"""Gemma 4, whose layers differ in their heads and widths. A file has an array with a number for each layer."""

from __future__ import annotations

import math
from dataclasses import replace

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Key, Keys, unchanged
from pace.checkpoints.gguf.architectures.changes import FULL, SLIDING, layers_of
from pace.checkpoints.gguf.architectures.names import GEMMA4

ROTATION = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")


def gemma4(fields: Fields, keys: Keys) -> Fields:
    layers = layers_of(fields)
    slides = keys.per_layer("attention.sliding_window_pattern", len(layers))
    fulls = [layer for layer in layers if not slides[layer]]
    groups = keys.per_layer("attention.head_count_kv", len(layers))
    shared = keys.integer("attention.shared_kv_layers", 0)
    found = {name: value for name, value in fields.items() if name not in ROTATION}
    found |= {
        "layer_types": [SLIDING if slide else FULL for slide in slides],
        "sliding_window": keys.read("attention.sliding_window"),
        "head_dim": _head_dim(keys, "_swa"),
        "num_key_value_heads": next((groups[layer] for layer in layers if slides[layer]), groups[-1]),
        "per_layer_config": {
            layer: {"head_dim": _head_dim(keys), "num_key_value_heads": groups[layer]} for layer in fulls
        },
        "num_kv_shared_layers": shared,
        "attention_k_eq_v": _keys_are_values(keys, [layer for layer in fulls if layer < len(layers) - shared]),
        "rope_parameters": _rotations(fields, keys),
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input", 0),
        **_widths(keys, len(layers), shared),
    }
    for layer in layers:
        if slides[layer] and groups[layer] != found["num_key_value_heads"]:
            raise keys.refused(f"{keys.prefix}attention.head_count_kv differs between layers with a window")
    if table := keys.shapes.get("model.embed_tokens_per_layer.weight"):
        found["vocab_size_per_layer_input"] = table[0]
    if keys.has_tensor(".router.proj.weight"):
        found |= {
            "enable_moe_block": True,
            "num_experts": keys.read("expert_count"),
            "top_k_experts": keys.read("expert_used_count"),
            "moe_intermediate_size": keys.read("expert_feed_forward_length"),
        }
    return found


def _head_dim(keys: Keys, end: str = "") -> int:
    """Width of the heads of layers without a window, or with one (`_swa`)."""
    width = keys.read(f"attention.key_length{end}")
    if keys.integer(f"attention.value_length{end}", width) != width:
        raise keys.refused(
            f"attention.key_length{end} and attention.value_length{end} differ, which is not implemented"
        )
    return width


def _keys_are_values(keys: Keys, layers: list[int]) -> bool:
    """True if these layers, which have no window, lack projections of values."""
    found = {f"model.layers.{layer}.self_attn.v_proj.weight" not in keys.shapes for layer in layers}
    if len(found) > 1:
        raise keys.refused("only some of the layers without a window have attn_v, which is not implemented")
    return found == {True}


def _widths(keys: Keys, num_layers: int, shared: int) -> Fields:
    """Width of the MLPs, which may be doubled in layers that share keys and values."""
    widths = keys.per_layer("feed_forward_length", num_layers)
    others = set(widths[num_layers - shared :])
    own = set(widths[: num_layers - shared]) or others
    if len(own) == 1 and others <= own:
        return {"intermediate_size": widths[0], "use_double_wide_mlp": False}
    if len(own) == 1 and others == {2 * widths[0]}:
        return {"intermediate_size": widths[0], "use_double_wide_mlp": True}
    raise keys.refused(
        f"{keys.prefix}feed_forward_length may differ only by being doubled in the last {shared} layers; got "
        f"{widths[:8]}..."
    )


def _rotations(fields: Fields, keys: Keys) -> Fields:
    """The rotation of each kind of layer. That of layers with a window has a separate base."""
    if (fields.get("rope_scaling") or {}).get("rope_type") != "proportional":
        raise ValueError(f"{keys.path} has no tensor rope_freqs.weight, which says how many pairs of a head rotate")
    full = {"rope_theta": fields["rope_theta"], "partial_rotary_factor": fields.get("partial_rotary_factor", 1.0)}
    sliding = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 10000.0)}
    width = _head_dim(keys, "_swa")
    if (rotated := keys.integer("rope.dimension_count_swa", width)) != width:
        sliding["partial_rotary_factor"] = rotated / max(1, width)
    return {FULL: {"rope_type": "proportional", **full}, SLIDING: sliding}


def share_of_pairs(factors: list[float]) -> float | None:
    """Returns the share of pairs that rotate, if their factors are 1 and those of the others infinite; else None."""
    count = sum(factor == 1.0 for factor in factors)
    if factors != [1.0] * count + factors[count:] or any(factor < 1e29 for factor in factors[count:]):
        return None
    share = count / max(1, len(factors))
    return share if int(2 * share * len(factors) // 2) == count else math.nextafter(share, 1.0)


GEMMA_4 = Architecture(
    "gemma4", "gemma4_text", names=GEMMA4, proportional=True, convert=gemma4,
    varied=("feed_forward_length", "attention.head_count_kv"), window=unchanged,
)  # fmt: skip


def gemma4_assistant(fields: Fields, keys: Keys) -> Fields:
    """The assistant of Gemma 4. Its layers are stated as layers for multi-token prediction, and share all keys and
    values."""
    count = keys.read("block_count")
    found = gemma4(fields | {"num_hidden_layers": count}, keys)
    return found | {"num_kv_shared_layers": count, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 0}


GEMMA_4_ASSISTANT = replace(
    GEMMA_4,
    name="gemma4-assistant",
    names=replace(
        GEMMA4,
        outer={**GEMMA4.outer, **{f"nextn.{part}": part for part in ("pre_projection", "post_projection")}},
    ),
    defaults={"architectures": ["Gemma4AssistantForCausalLM"]},
    keys={"backbone_hidden_size": Key("embedding_length_out")},
    convert=gemma4_assistant,
)
"""Files have no clusters: all tokens get logits."""
