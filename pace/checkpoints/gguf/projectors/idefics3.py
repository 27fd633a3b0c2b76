"""The tower of Idefics3 and SmolVLM: SigLIP on tiles, whose rows are shuffled into wider ones and projected."""

from __future__ import annotations

from pace.checkpoints.gguf.projectors.projector import Projector, Tower, TowerFile, Whole
from pace.checkpoints.gguf.projectors.siglip import siglip_names

EPSILON, NOT_STATED = 1e-6, 1e-5
"""Default of the norms' epsilon in config.json, and what the converter writes for it."""
TILES = 4
"""Tiles on the longest side of an image, unless a file states the side."""
NAMES = siglip_names("model.vision_model", {"mm.model.fc": "model.connector.modality_projection.proj"})
WHOLE = Whole("idefics3", "Idefics3ForConditionalGeneration")
"""SmolVLM has the same tensors, and the same mathematics for images."""


def idefics3(file: TowerFile) -> Tower:
    side, epsilon = file.integer("image_size"), file.number("attention.layer_norm_epsilon")
    vision = {
        "model_type": "idefics3_vision",
        **file.transformer(),
        "image_size": side,
        "layer_norm_eps": EPSILON if epsilon == NOT_STATED else epsilon,
        "hidden_act": "gelu_pytorch_tanh",
    }
    config = {
        "vision_config": vision,
        "scale_factor": file.keys.integer("projector.scale_factor", 2),
        "image_token_id": file.placeholder("<image>"),
    }
    settings = {
        "size": {"longest_edge": file.keys.integer("preproc_image_size", TILES * side)},
        "max_image_size": {"longest_edge": side},
        **file.normalisation(),
    }
    return Tower(config, settings, file.tensors(NAMES))


IDEFICS3 = Projector("idefics3", {"llama": WHOLE}, idefics3)
