"""HyperCLOVA X Think: Granite with norms after each branch, too. The logits are multiplied by their factor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pace.llm.models.families.granite import GraniteConfig, GraniteForCausalLM
from pace.llm.models.model_config import flag, number


@dataclass(frozen=True, kw_only=True)
class HyperClovaXConfig(GraniteConfig):
    attention_multiplier: float | None = number(None, 1e-9, 1e9, optional=True)
    use_post_norm: bool = flag(True)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        values = super().derived(fields)
        usual = values["head_dim"] ** -0.5
        return values | {
            "attention_multiplier": usual if self.attention_multiplier is None else self.attention_multiplier
        }

    @property
    def logits_scale(self) -> float:
        return self.logits_scaling


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    Config = HyperClovaXConfig

    @property
    def post_norm_names(self) -> tuple[str, ...]:
        return ("post_norm1", "post_norm2") if self.config.use_post_norm else ()
