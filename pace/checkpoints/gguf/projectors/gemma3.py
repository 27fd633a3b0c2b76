"""The tower of Gemma 3: SigLIP, whose rows are pooled, normalised and projected."""

from __future__ import annotations

from pace.checkpoints.gguf.architectures.forms import PLUS_ONE
from pace.checkpoints.gguf.projectors.projector import Projector, Tower, TowerFile, Whole
from pace.checkpoints.gguf.projectors.siglip import siglip_names

POOLED = 4
"""Rows of patches that one row of pooled patches has, unless a file states it."""
UNUSED = r"<unused\d+>"
"""Tokens that no text has. The converter leaves out the placeholder, which lies after the sentencepiece vocabulary."""
NAMES = siglip_names(
    "vision_tower.vision_model",
    {
        "mm.input_projection.weight": "multi_modal_projector.mm_input_projection_weight",
        "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    },
)


def gemma3(file: TowerFile) -> Tower:
    vision = {
        "model_type": "siglip_vision_model",
        **file.transformer(),
        "image_size": file.integer("image_size"),
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
    }
    pooled = max(1, file.keys.integer("projector.scale_factor", POOLED))
    num_tokens = (vision["image_size"] // max(1, vision["patch_size"]) // pooled) ** 2
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    config = {
        "vision_config": vision,
        "mm_tokens_per_image": num_tokens,
        "image_token_index": file.placeholder("<image_soft_token>", instead=UNUSED),
    }
    settings = {"size": size, "image_seq_length": num_tokens, **file.normalisation()}
    return Tower(config, settings, file.tensors(NAMES, {"mm.soft_emb_norm.weight": PLUS_ONE}))


GEMMA3 = Projector("gemma3", {"gemma3": Whole("gemma3", "Gemma3ForConditionalGeneration")}, gemma3)
