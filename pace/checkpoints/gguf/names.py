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
}
PERMUTED = ("llama",)
"""Architectures whose queries and keys have their rows permuted."""

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
PHI3_NAMES = {"ffn_up": "mlp.gate_up_proj"}
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that the config takes up."""


def hub_name(source: str, architecture: str) -> str:
    """The Hub's name of a tensor; those that have none keep theirs."""
    part, _, end = source.rpartition(".")
    if part in OUTER_NAMES:
        return f"{OUTER_NAMES[part]}.{end}"
    if found := re.fullmatch(r"blk\.(\d+)\.(\w+)", part):
        names = LAYER_NAMES | PHI3_NAMES if architecture == "phi3" else LAYER_NAMES
        if found[2] in names:
            return f"model.layers.{found[1]}.{names[found[2]]}.{end}"
    return source
