"""What the configs of mixtures of experts have in common."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.models.model_config import ModelConfig, count
from pace.ops.experts import MAX_EXPERTS, Router


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """A config with experts; a family adds it to the config of the family that it is otherwise like."""

    num_experts: int = count(8, MAX_EXPERTS)
    num_experts_per_tok: int = count(2, MAX_EXPERTS)

    def check(self) -> None:
        super().check()
        try:
            _ = self.router
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None

    @property
    def router(self) -> Router:
        """How a token chooses. Raises ValueError for fields that do not fit together."""
        raise NotImplementedError
