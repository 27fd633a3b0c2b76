"""Names in GGUF files and on the Hub: of architectures and of tensors.

The names are those of src/llama-arch.cpp of llama.cpp.
"""

from __future__ import annotations

import re

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
}
PERMUTED = ("llama", "smollm3", "granite", "minicpm")
"""Architectures whose queries and keys have their rows permuted."""
RAISED_NORMS = ("gemma2", "gemma3")
"""Architectures whose norms have weights that are 1 above the Hub's."""

OUTER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
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
}
_FUSED_NAMES = {"ffn_up": "mlp.gate_up_proj"}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OWN_NAMES = {
    "phi3": _FUSED_NAMES,
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
    "olmo2": _GEMMA_NAMES,
    "glm4": {**_FUSED_NAMES, "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"},
    "hunyuan-dense": {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
}
"""Where an architecture's names differ from `LAYER_NAMES`."""
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that the config takes up."""


def hub_name(source: str, architecture: str) -> str:
    """The Hub's name of a tensor; those that have none keep theirs."""
    part, _, end = source.rpartition(".")
    if part in OUTER_NAMES:
        return f"{OUTER_NAMES[part]}.{end}"
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", part):
        names = LAYER_NAMES | OWN_NAMES.get(architecture, {})
        if found[2] in names:
            return f"model.layers.{found[1]}.{names[found[2]]}.{end}"
    return source
