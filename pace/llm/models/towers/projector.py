"""What Mistral 3 and LLaVA say about the rows that the text model gets of a tower: fields of config.json outside of
`vision_config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pace.llm.layers import NoNorm
from pace.llm.models.model_config import activation, choice, count, declared, flag, read_declared
from pace.llm.models.towers.parts import RowMLP
from pace.llm.models.towers.siglip import SiglipVisionConfig
from pace.naming import shown

PROJECTOR = "vision_tower.projector"
"""Prefix of the projector's tensors here; `multi_modal_projector` in checkpoints."""
TEXT_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "language_model.": "model.",
    "model.language_model.": "model.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "vision_tower.vision_model.": "vision_tower.",
    "model.multi_modal_projector.": f"{PROJECTOR}.",
    "multi_modal_projector.": f"{PROJECTOR}.",
}
"""Prefixes in checkpoints of LLaVA's kind (also of Gemma 3), and those used here."""
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def feature_layers(default: int) -> Any:
    """A layer, or a list of layers."""

    def read(value: Any) -> tuple[int, ...]:
        layers = value if isinstance(value, list) else [value]
        if not layers or not all(type(layer) is int for layer in layers):
            raise ValueError("the number of a layer, or a list of such numbers")
        return tuple(layers)

    return declared((default,), read)


@dataclass(frozen=True, kw_only=True)
class ProjectorConfig:
    """Fields of LLaVA; the defaults are those of transformers."""

    projector_hidden_act: str = activation("gelu")
    vision_feature_select_strategy: str = choice("default", ("default", "full"))
    """ "default" leaves out the first row, which CLIP adds to those of patches."""
    vision_feature_layer: tuple[int, ...] = feature_layers(-2)
    """Layers whose rows are taken, side by side: 0 is the input of the first block, and -1 the output of the last."""
    multimodal_projector_bias: bool = flag(True)
    spatial_merge_size: int = 1
    """Side of the square of patches that becomes one row."""
    out_hidden_size: int = 0
    """The text's hidden_size."""
    eps: float = 0.0
    """Added to the mean square in the norm of patches, if there is one."""

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        """Reads the fields of a config.json. Raises ValueError or NotImplementedError that names the field."""
        return cls(**read_declared(cls, dict(raw)))

    def between(self, vision: SiglipVisionConfig, text: Any) -> Self:
        """These fields with those of the text's config. Raises ValueError if the tower lacks a feature layer."""
        self.layers(vision.num_hidden_layers)
        return dataclasses.replace(self, out_hidden_size=text.hidden_size, eps=text.rms_norm_eps)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """The feature layers, counted from 0 in a tower of `num_layers` blocks. Raises ValueError for a layer that it
        does not have."""
        for layer in self.vision_feature_layer:
            if not -num_layers - 1 <= layer <= num_layers:
                raise ValueError(
                    f"config.json: vision_feature_layer must be in {-num_layers - 1}..{num_layers}; got {layer}"
                )
        return tuple(layer % (num_layers + 1) for layer in self.vision_feature_layer)

    def unused(self, blocks: str, num_layers: int) -> tuple[str, ...]:
        """Regular expressions of the tensors of blocks after the last feature layer."""
        used = max(self.layers(num_layers))
        return tuple(rf"{blocks}\.{index}\..*" for index in range(used, num_layers))

    def make_mlp(self, size: int) -> RowMLP:
        """`linear_2(act(linear_1(x)))` of rows `[T, size]`."""
        out = self.out_hidden_size
        names = [{f"{PROJECTOR}.linear_{number}": out} for number in (1, 2)]
        return RowMLP(NoNorm(), *names, size, self.projector_hidden_act, self.multimodal_projector_bias)


@dataclass(frozen=True, kw_only=True)
class Mistral3ProjectorConfig(ProjectorConfig):
    vision_feature_select_strategy: str = "full"
    vision_feature_layer: tuple[int, ...] = feature_layers(-1)
    multimodal_projector_bias: bool = flag(False)
    spatial_merge_size: int = count(2, 16)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Self:
        config = super().read(raw)
        if len(config.vision_feature_layer) > 1:
            raise NotImplementedError(
                f"config.json: vision_feature_layer = {shown(raw['vision_feature_layer'])} is not implemented for "
                "Mistral3; implemented: one layer"
            )
        return config
