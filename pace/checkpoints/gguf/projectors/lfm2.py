"""The tower of LFM2-VL: SigLIP 2 on images of any size, whose rows are joined and projected."""

from __future__ import annotations

from pace.checkpoints.gguf.projectors.pixels import ROWS_OF_PIXELS
from pace.checkpoints.gguf.projectors.projector import PATCHES, Projector, Tower, TowerFile, Whole
from pace.checkpoints.gguf.projectors.siglip import siglip_names

MIN_TOKENS, MAX_TOKENS, TILE = 64, 256, 512
"""Rows for the text model of an image, and the side of a tile in pixels."""
NAMES = siglip_names(
    "model.vision_tower.vision_model",
    {
        "mm.input_norm": "model.multi_modal_projector.layer_norm",
        "mm.1": "model.multi_modal_projector.linear_1",
        "mm.2": "model.multi_modal_projector.linear_2",
    },
)


def lfm2(file: TowerFile) -> Tower:
    factor, patch = file.keys.integer("projector.scale_factor", 2), file.integer("patch_size")
    vision = {
        "model_type": "siglip2_vision_model",
        **file.transformer(),
        "num_patches": file.shape("v.position_embd.weight", 2)[0],
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": False,
    }
    config = {
        "vision_config": vision,
        "downsample_factor": factor,
        "projector_hidden_act": "gelu",
        "projector_hidden_size": file.shape("mm.1.weight", 2)[0],
        "projector_bias": file.has("mm.1.bias"),
        "projector_use_layernorm": file.has("mm.input_norm.weight"),
        "image_token_id": file.placeholder("<image>"),
    }
    settings = {
        "downsample_factor": factor,
        "encoder_patch_size": patch,
        "min_image_tokens": MIN_TOKENS,
        "max_image_tokens": MAX_TOKENS,
        "tile_size": TILE,
        **file.normalisation(),
    }
    return Tower(config, settings, file.tensors(NAMES, {PATCHES: ROWS_OF_PIXELS}))


WHOLE = Whole("lfm2_vl", "Lfm2VlForConditionalGeneration")
LFM2 = Projector("lfm2", {"lfm2": WHOLE, "lfm2moe": WHOLE}, lfm2)
