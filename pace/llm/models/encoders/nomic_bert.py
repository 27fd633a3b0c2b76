"""nomic-bert (nomic-embed-text v1 and v1.5): BERT with rotations and gates, and without biases in its layers.

Configs are read in the spelling of transformers, and in that of the code that the Hub's checkpoints came with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import RopeConfig
from pace.llm.models.encoders.heads import Head
from pace.llm.models.encoders.rotary_encoder import RotaryEncoder, RotaryEncoderConfig
from pace.llm.models.model_config import MAX_POSITIONS, activation, count, declared, token_ids
from pace.llm.models.rope_config import read_rope

GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
"""Names of gated feed-forwards in the Hub's spelling, and the activations of their gates."""


def gated_activation() -> Any:
    """A field with the name of a gated feed-forward in the Hub's spelling, or null."""

    def read(value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, str):
            raise ValueError(f"one of {', '.join(GATED_ACTIVATIONS)}")
        if value not in GATED_ACTIVATIONS:
            raise NotImplementedError(f"{value!r} is not implemented; implemented: {', '.join(GATED_ACTIVATIONS)}")
        return GATED_ACTIVATIONS[value]

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class NomicBertConfig(RotaryEncoderConfig):
    vocab_size: int = count(30528)
    hidden_act: str = activation("silu")
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    type_vocab_size: int = count(2, minimum=0)
    intermediate_size: int | None = count(3072, optional=True)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    activation_function: str | None = gated_activation()
    n_positions: int | None = count(None, MAX_POSITIONS, optional=True)
    max_trained_positions: int = count(2048, MAX_POSITIONS)

    default_theta = 1000.0
    aliases: ClassVar[dict[str, str]] = {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }
    only_here: ClassVar[dict[str, tuple]] = {
        "causal": (False,),
        "mlp_fc1_bias": (False,),
        "mlp_fc2_bias": (False,),
        "moe_every_n_layers": (None, 0),
        "parallel_block": (False,),
        "parallel_block_tied_norm": (False,),
        "prenorm": (False,),
        "qkv_proj_bias": (False,),
        "rotary_emb_fraction": (1.0, 1),
        "rotary_emb_interleaved": (False,),
        "rotary_emb_scale_base": (None,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
        "use_rms_norm": (False, None),
    }
    without_effect: ClassVar[dict[str, tuple]] = {
        "dense_seq_output": (True,),
        "fused_bias_fc": (True, False),
        "fused_dropout_add_ln": (True, False),
        "pad_vocab_size_multiple": (64, 1),
        "reorder_and_upcast_attn": (False,),
        "use_flash_attn": (True, False),
        "use_xentropy": (True, False),
    }
    also_read: ClassVar[frozenset[str]] = RotaryEncoderConfig.also_read | {"rotary_scaling_factor"}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields) | {"intermediate_size": self.intermediate_size or 4 * self.hidden_size}
        if self.activation_function is not None:
            values["hidden_act"] = self.activation_function
        if "max_position_embeddings" not in fields and self.n_positions is not None:
            scaled = fields.get("rotary_scaling_factor") is not None
            values["max_position_embeddings"] = (
                self.n_positions if scaled else min(self.n_positions, self.max_trained_positions)
            )
        return values

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        factor = fields.get("rotary_scaling_factor")
        if factor is None:
            return super().read_rope(fields, head_dim)
        scaled = {"rope_scaling": {"rope_type": "dynamic", "factor": factor}, "rope_theta": fields.get("rope_theta")}
        return read_rope(scaled, head_dim, self.max_trained_positions, default_theta=self.default_theta)


class NomicBertModel(RotaryEncoder):
    Config = NomicBertConfig
    prefix = "nomic_bert."
    attention_bias = False
    down_bias = False
    text_prefixes: ClassVar[dict[str, str]] = {"bert.": "nomic_bert."}
    other_names: ClassVar[dict[str, str]] = {
        r"(^|\.)encoder\.layers\.": r"\1layers.",
        r"(^|\.)emb_ln\.": r"\1embeddings.LayerNorm.",
        r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.mlp\.fc11\.": ".mlp.up_proj.",
        r"\.mlp\.fc12\.": ".mlp.gate_proj.",
        r"\.mlp\.fc2\.": ".mlp.down_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    }

    def __init__(self, config: NomicBertConfig, dtype: torch.dtype, ops: Any):
        super().__init__(config, dtype, ops)
        if self.num_labels:
            self.head = Head("nomic_bert.pooler.dense", "tanh", "classifier", config.hidden_size, self.num_labels)
