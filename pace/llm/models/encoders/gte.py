"""gte (gte-multilingual-base, gte-en-v1.5): BERT with rotations and gates. Its code on the Hub calls itself "new"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import RopeConfig
from pace.llm.models.encoders.rotary_encoder import RotaryEncoder, RotaryEncoderConfig
from pace.llm.models.model_config import MAX_POSITIONS, count, read_number
from pace.naming import shown


@dataclass(frozen=True, kw_only=True)
class GteConfig(RotaryEncoderConfig):
    vocab_size: int = count(250048)

    default_theta = 160000.0
    only_here: ClassVar[dict[str, tuple]] = {
        "layer_norm_type": ("layer_norm",),
        "logn_attention_clip1": (False,),
        "logn_attention_scale": (False,),
        "position_embedding_type": (None, "rope"),
    }
    without_effect: ClassVar[dict[str, tuple]] = {
        "pack_qkv": (True, False),
        "unpad_inputs": (True, False),
        "use_memory_efficient_attention": (True, False),
    }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return super().read_rope(without_ntk(fields, head_dim), head_dim)


@dataclass(frozen=True, kw_only=True)
class NewConfig(GteConfig):
    """Config in the spelling of the Hub's own code, whose defaults differ."""

    vocab_size: int = count(30528)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    default_theta = 10000.0


def without_ntk(fields: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """Returns the fields with `rope_scaling` of type "ntk" as one of type "linear". Its frequencies are those of the
    base times the factor f, divided by `f ** (2 / head_dim)`."""
    scaling = fields.get("rope_scaling")
    if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "ntk":
        return fields
    if scaling.get("mixed_b") is not None:
        raise NotImplementedError(f"config.json: rope_scaling.mixed_b = {shown(scaling['mixed_b'])} is not implemented")
    values = {}
    for name, given in (("factor", scaling.get("factor")), ("rope_theta", fields.get("rope_theta", 10000.0))):
        try:
            values[name] = read_number(given, 1e-3, 1e12)
        except ValueError as error:
            raise ValueError(f"config.json: {name} of rope_scaling must be {error}; got {shown(given)}") from None
    factor = values["factor"]
    linear = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
    return {**fields, "rope_scaling": linear, "rope_theta": values["rope_theta"] * factor}


class GteModel(RotaryEncoder):
    Config = GteConfig
    prefix = "gte."
    head_names = ("gte.pooler.dense", "classifier")
    text_prefixes: ClassVar[dict[str, str]] = {"new.": "gte."}
    other_names: ClassVar[dict[str, str]] = {
        r"(^|\.)encoder\.layer\.": r"\1layers.",
        r"\.attention\.": ".self_attn.",
        r"\.attn_ln\.": ".post_attention_layernorm.",
        r"\.mlp_ln\.": ".post_mlp_layernorm.",
    }

    def ignored(self) -> Iterator[str]:
        """gte-multilingual-base also has a classifier of tokens, for sparse vectors."""
        yield from super().ignored()
        if self.head is None:
            yield r"classifier\..*"

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        for index, layer in enumerate(self.layers):
            name = f"gte.layers.{index}.mlp"
            # Up comes first in this tensor.
            layer.mlp.gate_up.choose_whole(
                tensors, f"{name}.up_gate_proj", order=(f"{name}.up_proj", f"{name}.gate_proj")
            )


class NewModel(GteModel):
    Config = NewConfig
