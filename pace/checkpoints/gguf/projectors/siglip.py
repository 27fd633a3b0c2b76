"""Names of SigLIP's and CLIP's tensors, which several families share."""

from __future__ import annotations

from collections.abc import Mapping

from pace.checkpoints.gguf.architectures.names import TensorNames
from pace.checkpoints.gguf.projectors.projector import BLOCKS

BLOCK = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def siglip_names(prefix: str, others: Mapping[str, str]) -> TensorNames:
    """Names of a tower under `prefix`, and of `others`."""
    outer = {
        "v.patch_embd": f"{prefix}.embeddings.patch_embedding",
        "v.position_embd": f"{prefix}.embeddings.position_embedding",
        "v.post_ln": f"{prefix}.post_layernorm",
    }
    return TensorNames({**outer, **others}, f"{prefix}.encoder.layers", BLOCK, BLOCKS)
