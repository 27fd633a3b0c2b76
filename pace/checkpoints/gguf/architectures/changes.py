"""Fields of config.json that several architectures of GGUF files need."""

from __future__ import annotations

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Change, Fields, Key, Keys

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
BOTH_BIASES = {**ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_gate.bias"}
USE_BIAS = {"use_bias": "blk.0.attn_q.bias"}
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""
EXPERTS = {"num_experts": Key("expert_count"), "num_experts_per_tok": Key("expert_used_count")}
ROTATES_ALL = {"partial_rotary_factor": 1.0}
"""For classes with another default. A file that rotates whole heads does not state the factor."""


MAX_LISTED = 1 << 16
"""Layers for which lists are made. The reader of config.json refuses fewer than these."""


def layers_of(fields: Fields) -> range:
    """Numbers of the layers, at most MAX_LISTED: a damaged file may claim any number."""
    return range(min(fields["num_hidden_layers"], MAX_LISTED))


def one_window(fields: Fields, keys: Keys) -> Fields:
    """Sets the same window in all layers, or none."""
    return fields | {"sliding_window": keys.integer("attention.sliding_window", 0) or None}


def alternating(period: int, default: int = 0, full_first: bool = False) -> Change:
    """Returns a change that sets windows in some layers. If the file does not state which, the last layer of each
    `period` has full attention, or the first with `full_first`. Without a window, all layers see all positions;
    `default` is the window of files that state none."""

    def add(fields: Fields, keys: Keys) -> Fields:
        layers = layers_of(fields)
        window = keys.integer("attention.sliding_window", default)
        if window == 0:
            return fields | {"layer_types": [FULL for _ in layers]}
        pattern = keys.get(name := "attention.sliding_window_pattern")
        if not isinstance(pattern, np.ndarray):
            every = max(1, keys.integer(name, period))
            pattern = [(layer if full_first else layer + 1) % every for layer in layers]
        return fields | {"sliding_window": window, "layer_types": [SLIDING if slides else FULL for slides in pattern]}

    return add


def rotations(fields: Fields, local_theta: float, **local: float) -> Fields:
    """Returns `fields` with two rotations. The rotation of layers with a window has a separate base and is not
    scaled; `local` are its other fields that differ."""
    rope = ("rope_theta", "rope_scaling", "partial_rotary_factor", "original_max_position_embeddings")
    common = {name: fields[name] for name in fields.keys() & {"partial_rotary_factor"}}
    full = {"rope_theta": fields["rope_theta"], **(fields.get("rope_scaling") or {}), **common}
    kept = {name: value for name, value in fields.items() if name not in rope}
    return kept | {"rope_parameters": {FULL: full, SLIDING: {"rope_theta": local_theta, **common, **local}}}


def shortest(value: float) -> float:
    """The decimal number that an fp32 value stands for: 1e-05 for 9.99999974737875e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def only_sigmoids(fields: Fields, keys: Keys) -> Fields:
    """Refuses a file whose experts are weighed otherwise."""
    if keys.integer("expert_gating_func", SIGMOID) != SIGMOID:
        raise keys.refused(f"{keys.prefix}expert_gating_func other than sigmoid is not implemented")
    return fields


def granite(fields: Fields, keys: Keys) -> Fields:
    """Renames logit_scale, which is a divisor of the logits in these files. Raises NotImplementedError if a Granite
    without states does not rotate: llama.cpp's name for this is a context that is not finetuned."""
    if keys.of_file["general.architecture"] != "granitehybrid" and not keys.flag("rope.scaling.finetuned", True):
        raise keys.refused(f"{keys.prefix}rope.scaling.finetuned = false (no rotation) is not implemented")
    divisor = fields.pop("logit_scale", None)
    return fields if divisor is None else fields | {"logits_scaling": divisor}


def latent(fields: Fields, keys: Keys, key_length: int) -> Fields:
    """Adds head and latent widths, and YaRN's mscale. A file stores a tenth of mscale."""
    rope_dim = fields["head_dim"]
    found = fields | {
        "num_key_value_heads": fields["num_attention_heads"],
        "kv_lora_rank": keys.read("attention.kv_lora_rank"),
        "q_lora_rank": keys.integer("attention.q_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_length - rope_dim,
    }
    scaling = fields.get("rope_scaling")
    if scaling and scaling["rope_type"] == "yarn":
        mscale = round(10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
        found["rope_scaling"] = scaling | ({"mscale": mscale, "mscale_all_dim": mscale} if mscale else {})
    return found
