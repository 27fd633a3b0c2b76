"""Base class of the configs of towers: `vision_config` or another section of config.json, read strictly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pace.llm.models.model_config import HARMLESS, ModelConfig, read_declared, same
from pace.naming import shown

MAX_SIZE = 2**16
"""Maximum hidden_size of a tower. The largest known is below 2^13."""


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """A subclass declares the fields of its family."""

    model_types: ClassVar[tuple[str, ...]]
    """The family's names in `model_type`."""
    section: ClassVar[str] = "vision_config"
    """Name of the object in config.json."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields of this and of other models around the tower that change none of its rows."""

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
        """Raises NotImplementedError for a field that is unknown, or has a value that is not implemented."""
        only = ModelConfig.only | {"model_type": (None, *cls.model_types)}
        known = cls.without_effect | {field.name for field in dataclasses.fields(cls)}
        for name, value in fields.items():
            if name in known or (name not in only and HARMLESS.fullmatch(name)):
                continue
            if not any(same(value, allowed) for allowed in only.get(name, ())):
                raise NotImplementedError(f"config.json: {cls.section}.{name} = {shown(value)} is not implemented")

    def check(self) -> None:
        """Raises ValueError if fields contradict each other."""
