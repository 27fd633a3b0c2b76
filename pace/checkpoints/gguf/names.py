"""Names of architectures and tensors in GGUF files and on the Hub.

GGUF's names are those of src/llama-arch.cpp of llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "chatglm": "ChatGLMForConditionalGeneration",
    "glm": "GlmForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "qwen2vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3vl": "Qwen3VLForConditionalGeneration",
    "deepseek2": "DeepseekV2ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
}
"""Name that `family_of` returns -> the Hub's architecture."""
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "minicpm")
"""Architectures whose queries and keys have permuted rows."""
RAISED_NORMS = ("gemma2", "gemma3")
"""Architectures whose norm weights are 1 above the Hub's."""


class Names(NamedTuple):
    """Maps GGUF's names of parts to the Hub's."""

    outer: Mapping[str, str]
    layers: str
    """Prefix of a layer's number on the Hub."""
    inner: Mapping[str, str]

    def but(self, **inner: str) -> Names:
        """Returns a copy with other names in the layers."""
        return self._replace(inner={**self.inner, **inner})


LLAMA = Names(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    "model.layers",
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.gate_proj",
        "ffn_up_exps": "mlp.experts.up_proj",
        "ffn_down_exps": "mlp.experts.down_proj",
    },
)
GEMMA = LLAMA.but(
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
PHI3 = LLAMA.but(ffn_up="mlp.gate_up_proj")


def with_shared(name: str) -> Names:
    """Names of a mixture with a shared MLP, which the Hub has under `mlp.{name}`."""
    parts = {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in ("gate", "up", "down")}
    return LLAMA.but(ffn_gate_inp_shexp="mlp.shared_expert_gate", **parts)


LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}

NAMES = {
    "deepseek2": with_shared("shared_experts").but(exp_probs_b="mlp.gate.e_score_correction_bias", **LATENT),
    "minicpm3": LLAMA.but(**LATENT),
    "qwen2moe": with_shared("shared_expert"),
    "hunyuan-moe": with_shared("shared_mlp").but(
        attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm", ffn_gate_inp="mlp.gate.wg"
    ),
    "ernie4_5-moe": with_shared("shared_experts").but(exp_probs_b="mlp.moe_statics.e_score_correction_bias"),
    "glm4moe": with_shared("shared_experts").but(
        post_attention_norm="post_attention_layernorm", exp_probs_b="mlp.gate.e_score_correction_bias"
    ),
    "llama4": LLAMA.but(
        ffn_gate_inp="feed_forward.router",
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
        **{f"ffn_{part}_exps": f"feed_forward.experts.{part}_proj" for part in ("gate", "up", "down")},
        **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    ),
    "gpt-oss": LLAMA.but(
        post_attention_norm="post_attention_layernorm", attn_sinks="self_attn.sinks", ffn_gate_inp="mlp.router"
    ),
    "granitemoe": LLAMA.but(
        ffn_gate_inp="block_sparse_moe.router",
        **{f"ffn_{part}_exps": f"block_sparse_moe.experts.{part}_proj" for part in ("gate", "up", "down")},
        ffn_gate_shexp="shared_mlp.gate_proj",
        ffn_up_shexp="shared_mlp.up_proj",
        ffn_down_shexp="shared_mlp.output_linear",
    ),
    "phi3": PHI3,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "olmo2": GEMMA,
    "glm": PHI3,
    "glm4": PHI3.but(post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
    "hunyuan-dense": LLAMA.but(attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
    "starcoder2": LLAMA.but(ffn_up="mlp.c_fc", ffn_down="mlp.c_proj"),
    "stablelm": LLAMA.but(attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm"),
    "gptneox": Names(
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
    ),
    "gpt2": Names(
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
    ),
    "chatglm": Names(
        {
            "token_embd": "transformer.embedding.word_embeddings",
            "output_norm": "transformer.encoder.final_layernorm",
            "output": "lm_head",
        },
        "transformer.encoder.layers",
        {
            "attn_norm": "input_layernorm",
            "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense",
            "ffn_norm": "post_attention_layernorm",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
    ),
}
"""Names by architecture, if they differ from a Llama's."""
WHOLE_NAMES = ("exp_probs_b", "attn_sinks")
"""Tensors whose names on the Hub have no suffix such as `.weight`."""
OF_ONE_ROW = ("mlp.shared_expert_gate.weight", "mlp.moe_statics.e_score_correction_bias")
"""Ends of names of vectors that are a matrix of one row on the Hub."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that become part of the config."""


def family_of(architecture: str, sources: Collection[str]) -> str:
    """Name of a file's family in these tables, given its tensors `sources`. This is the architecture, but `chatglm`
    covers two families. One is that of the first checkpoints. The other is the newer GLM-4-9B, whose queries, keys and
    values are separate tensors."""
    return "glm" if architecture == "chatglm" and "blk.0.attn_q.weight" in sources else architecture


def hub_name(source: str, architecture: str) -> str:
    """The Hub's name of a tensor, or `source` if it has none."""
    names = NAMES.get(architecture, LLAMA)
    part, _, end = source.rpartition(".")
    if part in names.outer:
        return f"{names.outer[part]}.{end}"
    if (found := re.fullmatch(r"blk\.(\d+)\.(\w+)", part)) and found[2] in names.inner:
        name = f"{names.layers}.{found[1]}.{names.inner[found[2]]}"
        return name if found[2] in WHOLE_NAMES else f"{name}.{end}"
    if found := re.fullmatch(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)", part):  # from before experts were stacked
        return f"{names.layers}.{found[1]}.mlp.experts.{found[3]}.{found[2]}_proj.{end}"
    return source
