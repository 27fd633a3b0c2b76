"""Configs of InternVL's vision tower: as transformers converts it, and as published with `InternVLChatModel`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from pace.llm.layers import LayerNorm, RMSNorm
from pace.llm.models.model_config import (
    MAX_LAYERS,
    activation,
    choice,
    count,
    flag,
    read_activation,
    read_declared,
    same,
)
from pace.llm.models.towers.siglip import MAX_SIZE, SiglipVisionConfig, side
from pace.naming import shown

HEAD_NORM_EPS = 1e-6
"""Added to the mean square in the norms of queries and keys; not in the config."""
MAX_TILES = 256
"""Maximum number of tiles of an image. Published are 6 and 12; llama.cpp has at most 40."""
MAX_SIDE = 4096
"""Maximum side of a tile in pixels."""
ONLY: dict[str, tuple] = {
    "pad2square": (None, False),
    "select_layer": (None, -1),
    "use_backbone_lora": (None, 0, False),
    "use_llm_lora": (None, 0, False),
}
"""Fields of InternVLChatModel that change pixels, rows or names of tensors."""


@dataclass(frozen=True, kw_only=True)
class InternVLVisionConfig(SiglipVisionConfig):
    """Fields of `vision_config`, and those about the tower outside of it."""

    model_types: ClassVar[tuple[str, ...]] = ("internvl_vision",)
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"initializer_factor", "layer_scale_init_value", "use_mask_token"}
    )

    hidden_size: int = count(1024, MAX_SIZE)
    intermediate_size: int = count(4096)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    image_size: int = side(448, MAX_SIZE)
    patch_size: int = side(14, 512)
    hidden_act: str = activation("gelu")
    attention_bias: bool = flag(False)
    use_qk_norm: bool = flag(False)
    norm_type: str = choice("layer_norm", ("layer_norm", "rms_norm"))
    use_absolute_position_embeddings: bool = flag(True)
    use_mean_pooling: bool = flag(True)
    """False if a norm follows the last block."""
    merge: int = 2
    """Side of the square of patches that becomes one row."""
    projector_act: str = "gelu"
    joined_qkv: bool = False
    """True if one tensor has the rows of queries, keys and values."""
    transposed: bool = False
    """True if the rows of a tile are in order of its columns."""

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Reads a config.json. Raises ValueError or NotImplementedError for a field that is wrong, or that the tower
        does not implement."""
        for name, only in (("vision_feature_layer", -1), ("vision_feature_select_strategy", "default")):
            if raw.get(name, only) != only:
                raise NotImplementedError(
                    f"config.json: {name} = {shown(raw[name])} is not implemented; implemented: {shown(only)}"
                )
        ratio, name = raw.get("downsample_ratio", 0.5), raw.get("projector_hidden_act", "gelu")
        if type(ratio) not in (int, float) or not 0 < ratio <= 1 or 1 / ratio % 1:
            raise ValueError(f"config.json: downsample_ratio must be 1 / n for a whole number n; got {shown(ratio)}")
        try:
            act = read_activation(name)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"config.json: projector_hidden_act: {error}; got {shown(name)}") from None
        return replace(cls.read(raw.get("vision_config")), merge=int(1 / ratio), projector_act=act)

    def norm(self, name: str) -> LayerNorm | RMSNorm:
        """Makes the norm of a branch."""
        kind = RMSNorm if self.norm_type == "rms_norm" else LayerNorm
        return kind(name, self.hidden_size, self.layer_norm_eps)


@dataclass(frozen=True, kw_only=True)
class ChatFields:
    """Fields of InternVLChatModel outside of `vision_config`, with the defaults of its own code."""

    force_image_size: int | None = count(None, MAX_SIDE, optional=True)
    """Side of a tile in pixels; None for the tower's `image_size`."""
    dynamic_image_size: bool = flag(False)
    """False if every image is one tile."""
    min_dynamic_patch: int = count(1, MAX_TILES)
    max_dynamic_patch: int = count(6, MAX_TILES)
    use_thumbnail: bool = flag(False)
    """True if several tiles are followed by one of the whole image."""
    ps_version: str = choice("v1", ("v1", "v2"))
    """Order of a tile's rows for the text model: "v1" is column by column."""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Reads a config.json. Raises ValueError or NotImplementedError that names the field."""
        for name, allowed in ONLY.items():
            if name in raw and not any(same(raw[name], value) for value in allowed):
                raise NotImplementedError(
                    f"config.json: {name} = {shown(raw[name])} is not implemented; implemented: {shown(allowed[1])}"
                )
        return cls(**read_declared(cls, dict(raw)))


@dataclass(frozen=True, kw_only=True)
class InternVitConfig(InternVLVisionConfig):
    """The same tower as published, with the names and defaults of its own code."""

    model_types: ClassVar[tuple[str, ...]] = ("intern_vit_6b",)
    without_effect: ClassVar[frozenset[str]] = frozenset(
        """capacity_factor drop_path_rate eval_capacity_factor initializer_factor laux_allreduce moe_coeff_ratio
        moe_config moe_intermediate_size moe_output_scale noisy_gate_policy num_experts num_routed_experts
        num_shared_experts shared_expert_intermediate_size use_flash_attn use_moe use_residual use_rts
        use_weighted_residual""".split()
    )
    """How it is trained and run, and sizes of experts, which only count with `use_moe`."""
    names: ClassVar[Mapping[str, str]] = {"qk_normalization": "use_qk_norm", "qkv_bias": "attention_bias"}
    """Name in these checkpoints -> name of the field."""

    hidden_size: int = count(3200, MAX_SIZE)
    intermediate_size: int = count(12800)
    num_hidden_layers: int = count(48, MAX_LAYERS)
    num_attention_heads: int = count(25)
    image_size: int = side(224, MAX_SIZE)
    use_qk_norm: bool = flag(True)
    norm_type: str = choice("rms_norm", ("layer_norm", "rms_norm"))
    joined_qkv: bool = True

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        return replace(super().of(raw), transposed=ChatFields.read(raw).ps_version == "v1")

    @classmethod
    def read(cls, fields: Any) -> Self:
        if isinstance(fields, dict) and fields.get("use_moe"):
            raise NotImplementedError(
                f"config.json: vision_config.use_moe = {shown(fields['use_moe'])} is not implemented"
            )
        if isinstance(fields, dict):
            fields = {cls.names.get(name, name): value for name, value in fields.items()}
        return super().read(fields)


def read_internvl_vision(raw: Mapping[str, Any]) -> InternVLVisionConfig:
    """Reads the tower's config from a config.json in either form. Raises ValueError or NotImplementedError that names
    the field."""
    fields = raw.get("vision_config")
    is_published = isinstance(fields, dict) and fields.get("model_type") in InternVitConfig.model_types
    return (InternVitConfig if is_published else InternVLVisionConfig).of(raw)
