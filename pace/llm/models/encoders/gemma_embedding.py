"""EmbeddingGemma: the layers of Gemma 3, in which tokens also see those after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.encoders.encoder import EncoderConfig
from pace.llm.models.encoders.eurobert import DecoderLayers
from pace.llm.models.families.gemma3 import Gemma3Config, Gemma3ForConditionalGeneration
from pace.llm.models.model_config import flag


@dataclass(frozen=True, kw_only=True)
class GemmaEmbeddingConfig(Gemma3Config, EncoderConfig):
    use_bidirectional_attention: bool = flag(False)

    def check(self) -> None:
        super().check()
        if not self.use_bidirectional_attention:
            raise NotImplementedError(
                "config.json: use_bidirectional_attention = false is not implemented for encoders of Gemma 3"
            )

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return Gemma3Config.derived(self, fields) | EncoderConfig.derived(self, fields)

    def window(self, layer: int) -> int | None:
        """`sliding_window` is the width of the whole window, on both sides of a token."""
        return self.sliding_window // 2 + 1 if self.slides(layer) else None


class GemmaEmbeddingModel(DecoderLayers):
    Config = GemmaEmbeddingConfig
    Decoder = Gemma3ForConditionalGeneration
    text_prefixes: ClassVar[dict[str, str]] = Gemma3ForConditionalGeneration.text_prefixes
    ignored_tensors: ClassVar[tuple[str, ...]] = (r".*\.rotary_emb\.inv_freq", r"lm_head\..*")
