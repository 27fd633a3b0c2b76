"""Base classes of the configs of towers: `vision_config` or another section of config.json, read strictly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pace.llm.models.model_config import HARMLESS, ModelConfig, declared, read_declared, read_number, same
from pace.naming import shown

MAX_SIZE = 2**16
"""Maximum hidden_size of a tower. The largest known is below 2^13."""


def axial_theta(default: float = 10000.0, kinds: tuple[str, ...] = ("axial",)) -> Any:
    """The base of a rotation by row and column, in an object whose type is one of `kinds`."""

    def read(value: Any) -> float:
        if value is None:
            return default
        if not isinstance(value, dict):
            raise ValueError("an object or null")
        if value.get("rope_type", "axial") not in kinds:
            raise NotImplementedError(f"rope_type = {shown(value['rope_type'])} is not implemented; implemented: axial")
        return read_number(value.get("rope_theta", default), 1e-3, 1e30)

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """A subclass declares the fields of its family. Other fields are ignored."""

    section: ClassVar[str] = "vision_config"
    """Name of the object in config.json."""

    @classmethod
    def read(cls, fields: Any) -> Self:
        """Raises ValueError or NotImplementedError for a field that is wrong, or that the tower does not implement."""
        if not isinstance(fields, dict):
            raise ValueError(f"config.json: {cls.section} must be an object; got {shown(fields)}")
        cls.refuse(fields)
        config = cls(**read_declared(cls, fields, f"{cls.section}."))
        config.check()
        return config

    @classmethod
    def refuse(cls, fields: dict[str, Any]) -> None:
        """Raises NotImplementedError for fields that are not implemented."""

    def check(self) -> None:
        """Raises ValueError if fields contradict each other."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig(TowerConfig):
    """A tower whose unknown fields are refused."""

    model_types: ClassVar[tuple[str, ...]]
    """The family's names in `model_type`."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields of this and of other models around the tower that change none of its rows."""

    @classmethod
    def refuse(cls, fields: dict[str, Any]) -> None:
        """Raises NotImplementedError for a field that is unknown, or has a value that is not implemented."""
        only = ModelConfig.only | {"model_type": (None, *cls.model_types)}
        known = cls.without_effect | {field.name for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            if name in known or (name not in only and HARMLESS.fullmatch(name)):
                continue
            if not any(same(value, allowed) for allowed in only.get(name, ())):
                raise NotImplementedError(f"config.json: {cls.section}.{name} = {shown(value)} is not implemented")
