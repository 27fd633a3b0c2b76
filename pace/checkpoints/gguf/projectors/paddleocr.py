"""The tower of PaddleOCR-VL: SigLIP with rotated heads on images of any size, whose rows are joined and projected."""

from __future__ import annotations

from pace.checkpoints.gguf.projectors.projector import Projector, Tower, TowerFile, Whole, with_sections
from pace.checkpoints.gguf.projectors.siglip import siglip_names

MERGE = 2
"""Rows of patches that become one row of the text model."""
NAMES = siglip_names(
    "visual.vision_model",
    {"mm.input_norm": "mlp_AR.pre_norm", "mm.1": "mlp_AR.linear_1", "mm.2": "mlp_AR.linear_2"},
)


def paddleocr(file: TowerFile) -> Tower:
    patch = file.integer("patch_size")
    vision = {
        "model_type": "paddleocr_vl_vision",
        **file.transformer(),
        "image_size": file.side("v.position_embd.weight") * patch,  # the key has that of the largest image
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_pytorch_tanh",
        "spatial_merge_size": MERGE,
    }
    config = {"vision_config": vision, "image_token_id": file.placeholder("<|IMAGE_PLACEHOLDER|>")}
    settings = {
        "patch_size": patch,
        "temporal_patch_size": 1,
        "merge_size": MERGE,
        "min_pixels": file.integer("image_min_pixels"),
        "max_pixels": file.integer("image_max_pixels"),
        **file.normalisation(),
    }
    return Tower(config, settings, file.tensors(NAMES), text=with_sections(file.text, file.config))


WHOLE = Whole("paddleocr_vl", "PaddleOCRVLForConditionalGeneration")
PADDLEOCR = Projector("paddleocr", {"paddleocr": WHOLE, "ernie4_5": WHOLE}, paddleocr)
