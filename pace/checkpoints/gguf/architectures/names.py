"""Names of tensors in GGUF files and on the Hub.

GGUF's names are those of src/llama-arch.cpp of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TensorNames:
    """Maps GGUF's names to the Hub's. Names are mapped without their suffix, which is the same on both sides. A whole
    name, such as `exp_probs_b.bias`, maps to a whole name."""

    outer: Mapping[str, str]
    layers: str
    """Prefix of a layer's number on the Hub."""
    inner: Mapping[str, str]
    """Names in a layer. Layers of different kinds may share a name on the Hub, but not in the file."""
    blocks: str = "blk"
    """Prefix of a layer's number in the file."""

    def but(self, inner: Mapping[str, str]) -> TensorNames:
        """Returns a copy with other names in the layers."""
        return replace(self, inner={**self.inner, **inner})

    def on_hub(self, source: str) -> str:
        """The Hub's name of a tensor, or `source` if it has none."""
        inside = re.fullmatch(rf"{re.escape(self.blocks)}\.(\d+)\.(.+)", source)
        prefix, names, whole = (
            (f"{self.layers}.{inside[1]}.", self.inner, inside[2]) if inside else ("", self.outer, source)
        )
        part, _, suffix = whole.rpartition(".")
        if whole in names:
            return f"{prefix}{names[whole]}"
        if part in names:
            return f"{prefix}{names[part]}.{suffix}"
        if inside and (found := re.fullmatch(r"ffn_(gate|up|down)\.(\d+)", part)):  # from before experts were stacked
            return f"{prefix}mlp.experts.{found[2]}.{found[1]}_proj.{suffix}"
        return source


def gated(prefix: str, end: str = "") -> dict[str, str]:
    """Names of a gated MLP or of a stack of them: `ffn_gate{end}` -> `{prefix}.gate_proj`."""
    return {f"ffn_{part}{end}": f"{prefix}.{part}_proj" for part in ("gate", "up", "down")}


NEXTN = {
    **{f"nextn.{part}": part for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{part}": f"shared_head.{part}" for part in ("norm", "head")},
}
"""Names of a layer for multi-token prediction, next to those of any layer."""


LLAMA = TensorNames(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    "model.layers",
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate_inp": "mlp.gate",
        **gated("mlp"),
        **gated("mlp.experts", "_exps"),
        "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    },
)
AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
GEMMA = LLAMA.but(
    {
        **AFTER_ATTENTION,
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
GEMMA4 = replace(
    GEMMA.but(
        {
            "layer_output_scale.weight": "layer_scalar",
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj",
            **gated("experts", "_exps"),
        }
    ),
    outer={
        **LLAMA.outer,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
)
FUSED_QKV = {"attn_qkv": "self_attn.qkv_proj"}
GLM = LLAMA.but({"ffn_up": "mlp.gate_up_proj"})
PHI3 = GLM.but(FUSED_QKV)
PHI2 = replace(
    LLAMA.but({**FUSED_QKV, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}),
    outer={**LLAMA.outer, "output_norm": "model.final_layernorm"},
)
GLM4 = GLM.but({"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"})
HUNYUAN_NORMS = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
SHARED_EXPERTS = gated("mlp.shared_experts", "_shexp")
BIASED_EXPERTS = {
    **dict.fromkeys(("exp_probs_b", "exp_probs_b.bias"), "mlp.gate.e_score_correction_bias"),
    **SHARED_EXPERTS,
}
"""Experts that a bias helps to choose, next to shared ones. In files of Hunyuan 3 its name has no suffix."""
BIASED = LLAMA.but(BIASED_EXPERTS)
LATENT = LLAMA.but(
    {
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
    }
)
INDEXER = {
    f"indexer.{there}": f"self_attn.indexer.{here}"
    for there, here in {"attn_q_b": "wq_b", "attn_k": "wk", "k_norm": "k_norm", "proj": "weights_proj"}.items()
}
"""Names of what chooses the positions that a token sees."""
GPT_NEOX = TensorNames(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "lm_head"},
    "gpt_neox.layers",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
CHATGLM = TensorNames(
    {
        "token_embd": "transformer.embedding.word_embeddings",
        "output_norm": "transformer.encoder.final_layernorm",
        "output": "lm_head",
    },
    "transformer.encoder.layers",
    {**GPT_NEOX.inner, "attn_qkv": "self_attention.query_key_value", "attn_output": "self_attention.dense"},
)
GPT2 = TensorNames(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)

APERTUS = LLAMA.but({"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"})
BLOOM = TensorNames(
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h",
    {
        **GPT_NEOX.inner,
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
    },
)
FALCON = BLOOM
"""Files of Falcon have no second norm, or `FALCON_NORMS`."""
FALCON_NORMS = {"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
"""Names of two norms in a layer."""
MPT = TensorNames(
    {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
    "transformer.blocks",
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)


def mamba(prefix: str) -> dict[str, str]:
    """Names of a Mamba-2 layer."""
    return {
        "ssm_in": f"{prefix}.in_proj",
        "ssm_conv1d": f"{prefix}.conv1d",
        "ssm_dt.bias": f"{prefix}.dt_bias",
        "ssm_a": f"{prefix}.A_log",
        "ssm_d": f"{prefix}.D",
        "ssm_norm": f"{prefix}.norm",
        "ssm_out": f"{prefix}.out_proj",
    }


LFM2 = replace(
    LLAMA.but(
        {
            "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm",
            **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
            "exp_probs_b.bias": "mlp.expert_bias",
        }
    ),
    outer={"token_embd": "model.embed_tokens", "token_embd_norm": "model.norm", "output": "lm_head"},
)
QWEN3_NEXT = LLAMA.but(
    {
        **AFTER_ATTENTION,
        **NEXTN,
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_a": "linear_attn.A_log",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        **gated("mlp.shared_expert", "_shexp"),
    }
)
KIMI_LINEAR = LATENT.but(
    {
        **BIASED_EXPERTS,
        **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
        **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta": "self_attn.b_proj",
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "ssm_norm": "self_attn.o_norm",
    }
)
BAILING_HYBRID = KIMI_LINEAR.but(
    {"ssm_f_a": "self_attn.f_proj", "ssm_g_a": "self_attn.g_proj", "attn_gate": "self_attn.g_proj"}
)
GRANITE_MOE = LLAMA.but(
    {
        "ffn_gate_inp": "block_sparse_moe.router",
        **gated("block_sparse_moe.experts", "_exps"),
        **gated("shared_mlp", "_shexp"),
        "ffn_down_shexp": "shared_mlp.output_linear",
    }
)
GRANITE_MOE_SWA = GRANITE_MOE.but(
    {
        "attn_sinks.weight": "self_attn.sinks",
        "ffn_gate_up_exps.weight": "block_sparse_moe.experts.gate_up_proj",
        "ffn_up_shexp": "shared_mlp.input_linear",
    }
)
GRANITE_HYBRID = GRANITE_MOE.but({**mamba("mamba"), **gated("shared_mlp"), "ffn_down": "shared_mlp.output_linear"})
BAMBA = LLAMA.but(mamba("mamba"))
FALCON_H1 = BAMBA.but({"ffn_norm": "post_attention_layernorm.weight"})
"""The name of the second norm has no suffix in files."""
MAMBA2 = TensorNames(
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    "backbone.layers",
    {"attn_norm": "norm", **mamba("mixer")},
)
NEMOTRON_H = TensorNames(
    LLAMA.outer,
    "model.layers",
    {
        "attn_norm": "norm",
        **mamba("mixer"),
        **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
        "attn_output": "mixer.o_proj",
        **gated("mixer"),
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        **gated("mixer.experts", "_exps"),
        **gated("mixer.shared_experts", "_shexp"),
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
)
