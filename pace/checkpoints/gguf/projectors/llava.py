"""The tower of LLaVA: CLIP without its last layers, and two matrices. Files are those of the first converters, whose
`projection_dim` is that of CLIP."""

from __future__ import annotations

from pace.checkpoints.gguf.projectors.projector import Projector, Tower, TowerFile, Whole
from pace.checkpoints.gguf.projectors.siglip import siglip_names

PREFIX = "vision_tower.vision_model"
NAMES = siglip_names(
    PREFIX,
    {
        "v.class_embd": f"{PREFIX}.embeddings.class_embedding",
        "v.pre_ln": f"{PREFIX}.pre_layrnorm",
        "mm.0": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
)
WHOLE = Whole("llava", "LlavaForConditionalGeneration")
TEXTS = ("llama", "mistral3", "phi3", "qwen2", "qwen3")


def llava(file: TowerFile) -> Tower:
    for name in ("mm.0.weight", "mm.2.weight"):  # MobileVLM, Yi-VL and LLaVA 1.0 have other projectors
        file.shape(name, 2)
    file.shape("v.class_embd", 1)  # towers of SigLIP have none
    file.check_width(file.shape("mm.2.weight", 2)[0], "mm.2.weight")
    side, depth = file.integer("image_size"), file.integer("block_count")
    _refuse(file, depth)
    vision = {
        "model_type": "clip_vision_model",
        **file.transformer(),
        "image_size": side,
        "layer_norm_eps": file.number("attention.layer_norm_epsilon"),
        "hidden_act": file.activation("gelu"),
    }
    config = {
        "vision_config": vision,
        "vision_feature_layer": -1,  # later layers are not in the file
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": file.has("mm.0.bias"),
        "image_seq_length": (side // max(1, vision["patch_size"])) ** 2,
        "image_token_index": file.placeholder("<image>"),
    }
    settings = {
        "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
        **file.normalisation(),
    }
    return Tower(config, settings, file.tensors(NAMES))


def _refuse(file: TowerFile, depth: int) -> None:
    """Refuses what belongs to LLaVA-NeXT and others."""
    layers = file.keys.numbers("feature_layer")
    if layers is not None and layers.tolist() != [depth]:
        raise NotImplementedError(f"{file.path}: clip.vision.feature_layer = {layers.tolist()} is not implemented")
    for name in ("image_grid_pinpoints", "mm_patch_merge_type"):
        value = file.keys.get(name)
        if value is not None and not isinstance(value, str) or value == "spatial_unpad":
            raise NotImplementedError(f"{file.path}: clip.vision.{name} is not implemented; LLaVA-NeXT has it")


LLAVA = Projector("mlp", dict.fromkeys(TEXTS, WHOLE), llava, states_width=False)
