"""EmbeddingGemma: the layers of Gemma 3, in which tokens also see those after them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.encoders.encoder import EncoderConfig
from pace.llm.models.encoders.eurobert import DecoderLayers
from pace.llm.models.families.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration


@dataclass(frozen=True, kw_only=True)
class GemmaEmbeddingConfig(Gemma3Config, EncoderConfig):
    only_here: ClassVar[dict[str, tuple]] = {"use_bidirectional_attention": (True,)}

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return Gemma3Config.derived(self, fields) | EncoderConfig.derived(self, fields)

    def window(self, layer: int) -> int | None:
        """`sliding_window` is the width of the whole window, on both sides of a token."""
        return self.sliding_window // 2 + 1 if self.slides(layer) else None


class GemmaEmbeddingModel(DecoderLayers):
    Config = GemmaEmbeddingConfig
    Decoder = Gemma3ForConditionalGeneration
    text_prefixes: ClassVar[dict[str, str]] = Gemma3ForConditionalGeneration.text_prefixes
    ignored_tensors = (*Gemma3ForConditionalGeneration.ignored_tensors, r"lm_head\..*")

    @classmethod
    def describes(cls, raw: Mapping[str, Any]) -> bool:
        """Other checkpoints of this architecture are causal."""
        return bool(raw.get("use_bidirectional_attention"))
