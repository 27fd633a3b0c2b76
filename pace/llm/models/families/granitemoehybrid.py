"""Granite 4: layers of Mamba-2 and a few of attention, each with a shared MLP and, in most sizes, experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import FeedForward, Mixer, RopeConfig
from pace.llm.models.families.granitemoe import (
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
)
from pace.llm.models.families.mamba_config import MambaConfig, hybrid_layer_types, make_mamba
from pace.llm.models.layer_types import FULL, LINEAR, check_layer_types
from pace.llm.models.model_config import count, declared
from pace.ops.experts import MAX_EXPERTS, Router


def read_position_embedding(value: Any) -> str | None:
    if value not in ("rope", "nope", None):
        raise NotImplementedError(f"{value!r} is not implemented; implemented: 'rope', 'nope' and null")
    return value


@dataclass(frozen=True, kw_only=True)
class GraniteMoeHybridConfig(MambaConfig, GraniteMoeSharedConfig):
    num_experts: int = count(8, MAX_EXPERTS, minimum=0)
    num_experts_per_tok: int = count(2, MAX_EXPERTS, minimum=0)
    shared_intermediate_size: int = count(1024)
    layer_types: tuple[str, ...] | None = hybrid_layer_types(LINEAR, FULL)
    position_embedding_type: str | None = declared(None, read_position_embedding)

    aliases: ClassVar[dict[str, str]] = GraniteMoeConfig.aliases | {"layers_block_type": "layer_types"}
    only_here: ClassVar[dict[str, tuple]] = {"normalization_function": (None, "rmsnorm")}
    also_read: ClassVar[frozenset[str]] = GraniteMoeConfig.also_read | {"init_method", "mamba_chunk_size"}

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {"layer_types": self.layer_types or (LINEAR,) * self.num_hidden_layers}

    @property
    def router(self) -> Router | None:
        return super().router if self.num_experts else None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        return super().ropes if self.position_embedding_type == "rope" else ()

    @property
    def max_length(self) -> int:
        return super().max_length if self.ropes else self.max_position_embeddings


class GraniteMoeHybridForCausalLM(GraniteMoeSharedForCausalLM):
    Config = GraniteMoeHybridConfig

    def make_mixer(self, name: str, index: int) -> Mixer:
        if self.config.layer_types[index] == FULL:
            return super().make_mixer(name, index)
        return make_mamba(f"{name}.mamba", self.config.mamba)

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        return (
            super().make_feed_forward(name, index)
            if self.config.num_experts
            else self.make_shared(f"{name}.shared_mlp")
        )
