"""Text models whose prompts may have images: rows of a tower take the place of embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.towers.tower import Tower
from pace.naming import shown
from pace.ops.protocol import ForwardOps, Ops

UNKNOWN_ID = -1
"""Id of a placeholder that only the tokenizer knows."""


@dataclass(frozen=True, kw_only=True)
class TakesMediaConfig:
    """Mixin of the configs of text models that take images. `read_media` reads the fields outside the text part."""

    vision: Any = None
    """Config of the tower; None for only text."""
    image_token_id: int = UNKNOWN_ID
    """Id of the token that stands for a row of an image."""

    def with_media(self, raw: dict[str, Any]) -> Any:
        """This config with that of the tower, from a parsed config.json; itself if there is no tower. Raises ValueError
        or NotImplementedError, which name the field and the way to load only the text model."""
        if raw.get("vision_config") is None:
            return self
        try:
            return self.read_media(raw)
        except (ValueError, NotImplementedError) as error:
            raise type(error)(f"{error}; media=False loads only the text model") from None

    def read_media(self, raw: dict[str, Any]) -> Any:
        """`with_media` for a config.json that has a tower."""
        raise NotImplementedError


def read_token_id(raw: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    """The id of a placeholder: the first field of these names, or `default`. Raises ValueError if it is no id."""
    name = next((name for name in names if raw.get(name) is not None), names[0])
    number = raw.get(name, default)
    if default == UNKNOWN_ID and raw.get(name) is None:
        return default
    if type(number) is not int or number < 0:
        raise ValueError(f"config.json: {name} must be a token's id; got {shown(number)}")
    return number


class TakesMedia(BaseModelForCausalLM):
    """A text model with towers. Rows of an image replace the embeddings of its placeholders, after these are scaled.
    Further columns of the rows are added to the outputs of the first layers (deepstack). Rows of sound have zeros
    there."""

    family: ClassVar[str]
    """Its name in errors, for an architecture with several kinds of text."""
    MediaConfig: ClassVar[type[TakesMediaConfig]]
    """Its fields about media, for such an architecture."""
    of_text: ClassVar[Mapping[str, type[BaseModelForCausalLM]]] = {}
    """model_type of the text -> class, for such an architecture. The first one is the default."""

    def __init__(self, config: Any, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if config.vision is not None:
            self.towers = [self.make_tower()]

    def make_tower(self) -> Tower:
        """Makes the tower for images."""
        raise NotImplementedError

    @classmethod
    def of(cls, text: type[BaseModelForCausalLM]) -> type[BaseModelForCausalLM]:
        """Makes the class for a kind of text, from that of the text alone."""
        name = f"{cls.family}Of{text.__name__.removesuffix('ForCausalLM')}"
        config = type(f"{name}Config", (cls.MediaConfig, text.Config), {"__module__": cls.__module__})
        config = dataclass(frozen=True, kw_only=True)(config)
        return type(name, (cls, text), {"__module__": cls.__module__, "Config": config})

    @classmethod
    def variant(cls, raw: dict[str, Any]) -> type[BaseModelForCausalLM]:
        text = raw.get("text_config")
        kind = text.get("model_type") if isinstance(text, dict) else None
        if kind is None or not cls.of_text:
            return next(iter(cls.of_text.values()), cls)
        if str(kind) not in cls.of_text:
            raise NotImplementedError(
                f"config.json: text_config.model_type = {shown(kind)} is not implemented for {cls.family}; "
                f"implemented: {', '.join(cls.of_text)}"
            )
        return cls.of_text[str(kind)]

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        x = super().embed(ops, batch)
        self._place(ops, batch, x, 0, add=False)
        return x

    def after_layer(self, ops: ForwardOps, batch: ForwardBatch, x: Tensor, index: int) -> None:
        super().after_layer(ops, batch, x, index)
        self._place(ops, batch, x, index + 1, add=True)

    def _place(self, ops: ForwardOps, batch: ForwardBatch, x: Tensor, part: int, add: bool) -> None:
        """Places part `part` of the columns of given rows in x, if the tower has it and rows are given."""
        size = self.config.hidden_size
        if batch.given is not None and size * part < max((tower.width for tower in self.towers), default=0):
            ops.place_rows_(x, batch.given.rows[:, size * part : size * (part + 1)], batch.given.at, add)
