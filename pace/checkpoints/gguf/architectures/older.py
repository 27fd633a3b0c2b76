"""Architectures of GGUF files of BLOOM, Falcon, MPT, OLMo 1 and StarCoder, and of Apertus.

llama.cpp orders the rows of queries, keys and values by kind. It knows neither Falcon with ALiBi, nor StarCoder with a
key head for each query head."""

from __future__ import annotations

import numpy as np

from pace.checkpoints.gguf.architectures.architecture import Architecture, Fields, Keys
from pace.checkpoints.gguf.architectures.changes import ATTENTION_BIAS, layers_of
from pace.checkpoints.gguf.architectures.names import APERTUS, BLOOM, FALCON, FALCON_NORMS, GPT2, LLAMA, MPT
from pace.checkpoints.gguf.file import Metadata

OLMO_EPS = 1e-5
"""The epsilon of OLMo's norms, which is no field of its config.json."""
NO_WIDTH = ("intermediate_size", "num_key_value_heads", "head_dim", "rope_theta")


def width(keys: Keys, part: str) -> int | None:
    """Width of a feed-forward. The converter of llama.cpp always writes four times the hidden size as its key."""
    return keys.shapes.get(f"transformer.h.0.mlp.{part}.weight", (None,))[0]


def falcon(fields: Fields, keys: Keys) -> Fields:
    """The newer form of the config describes all files, also those with one key head."""
    return fields | {"num_kv_heads": fields["num_key_value_heads"], "ffn_hidden_size": width(keys, "dense_h_to_4h")}


def mpt(fields: Fields, keys: Keys) -> Fields:
    """A file has the largest bias in place of a switch."""
    largest = fields.pop("alibi", 0.0)
    return fields | {"alibi": largest > 0, **({"alibi_bias_max": largest} if largest > 0 else {})}


def starcoder(fields: Fields, keys: Keys) -> Fields:
    return fields | {"n_inner": width(keys, "c_fc"), "multi_query": fields["num_key_value_heads"] == 1}


def olmo(fields: Fields, keys: Keys) -> Fields:
    if (eps := fields["layer_norm_eps"]) != OLMO_EPS:
        raise keys.refused(f"{keys.prefix}attention.layer_norm_epsilon = {eps} is not implemented; {OLMO_EPS} is")
    return fields


def apertus(fields: Fields, keys: Keys) -> Fields:
    """Adds the numbers of xIELU. A file without a scaling of the rotation has none, but a config.json without one has
    that of the published models."""
    count = len(layers_of(fields))
    columns = [floats_of_layers(keys.of_file, f"xielu.{name}", count) for name in ("alpha_p", "alpha_n", "beta", "eps")]
    rope = {} if fields.get("rope_scaling") else {"rope_parameters": {"rope_type": "default"}}
    return fields | rope | {"xielu": [list(numbers) for numbers in zip(*columns, strict=True)]}


def floats_of_layers(keys: Metadata, name: str, count: int) -> list[float]:
    """Numbers of the layers: those of an array, or the same for all. Raises ValueError if they are missing, too few, or
    no numbers."""
    values = keys.get(name)
    if not isinstance(values, np.ndarray):
        return [keys.required(name, keys.number(name))] * count
    if len(values) < count or values.dtype.kind != "f":
        raise ValueError(
            f"{keys.path}: {name} must have a number for each of {count} layers; got {len(values)} of type "
            f"{values.dtype}"
        )
    return values[:count].astype(float).tolist()


OLDER = (
    Architecture("apertus", "apertus", names=APERTUS, present=ATTENTION_BIAS, convert=apertus),
    Architecture(
        "bloom", "bloom", names=BLOOM, layer_norms="layer_norm_epsilon", defaults={"qkv_by_head": False},
        absent=NO_WIDTH,
    ),
    # The marker is in Falcon 40B and 180B, with two norms in a layer.
    Architecture(
        "falcon", "falcon", marker="blk.0.attn_norm_2.weight", names=FALCON.but(FALCON_NORMS),
        layer_norms="layer_norm_epsilon", convert=falcon,
        absent=("intermediate_size", "num_key_value_heads", "head_dim"),
        defaults={"new_decoder_architecture": True, "qkv_by_group": False, "num_ln_in_parallel_attn": 2},
    ),
    Architecture(
        "falcon", "falcon", names=FALCON, layer_norms="layer_norm_epsilon", convert=falcon,
        absent=("intermediate_size", "num_key_value_heads", "head_dim"),
        defaults={"new_decoder_architecture": True, "qkv_by_group": False, "num_ln_in_parallel_attn": 1},
    ),
    Architecture("mpt", "mpt", names=MPT, layer_norms="layer_norm_epsilon", convert=mpt, absent=NO_WIDTH),
    Architecture(
        "olmo", "olmo", names=LLAMA, permuted=True, layer_norms="layer_norm_eps", convert=olmo,
        absent=("layer_norm_eps",),
    ),
    Architecture(
        "starcoder", "gpt_bigcode", names=GPT2, layer_norms="layer_norm_epsilon", convert=starcoder, absent=NO_WIDTH,
    ),
)  # fmt: skip
