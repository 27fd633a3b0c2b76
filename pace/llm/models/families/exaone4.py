"""EXAONE 4 and 4.5: norms after each branch as in OLMo 2, and normalised query and key heads. If there are windows,
three layers with one alternate with one without, which does not rotate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import HeadNorm
from pace.llm.models.families.olmo import Olmo2ForCausalLM
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import FULL, SLIDING, every
from pace.llm.models.model_config import MAX_LAYERS, count, declared, number, token_ids

LETTERS = {"L": SLIDING, "G": FULL}


def pattern(default: int | str | None) -> Any:
    """The period of layers without a window, a string of a letter for each layer of a period, or null for no
    windows."""

    def read(value: Any) -> int | str | None:
        if value is None or (type(value) is int and 0 <= value <= MAX_LAYERS):
            return value
        if isinstance(value, str) and value and set(value) <= LETTERS.keys():
            return value
        raise ValueError(f"an integer in 0..{MAX_LAYERS}, a string of L and G, or null")

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class PatternConfig(WindowedConfig):
    """Config of layers with a window, which rotate, and others, which rotate only if no layer has a window."""

    sliding_window_pattern: int | str | None = pattern(4)

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        pattern, layers = self.sliding_window_pattern, self.num_hidden_layers
        if self.layer_types:
            return self.layer_types
        if self.sliding_window is None or not pattern:
            return (FULL,) * layers
        if isinstance(pattern, int):
            return every(pattern, layers)
        # The last layer never has a window.
        return (*(LETTERS[pattern[layer % len(pattern)]] for layer in range(layers - 1)), FULL)

    def rotation(self, layer: int) -> int | None:
        return 0 if self.sliding_window is None or self.slides(layer) else None


@dataclass(frozen=True, kw_only=True)
class Exaone4Config(PatternConfig):
    vocab_size: int = count(102400)
    intermediate_size: int = count(16384)
    num_key_value_heads: int | None = count(32)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (False,), "mlp_bias": (False,)}
    beside_text: ClassVar[frozenset[str]] = frozenset({"vision_config", "image_token_id", "video_token_id"})


class Exaone4ForCausalLM(Olmo2ForCausalLM):
    """EXAONE 4 for text; `Exaone4_5_ForConditionalGeneration` is the same model."""

    Config = Exaone4Config
    head_norm = True
    text_prefixes: ClassVar[dict[str, str]] = {"model.language_model.": "model."}
    other_parts = ("model.visual.", "visual.")
    # Layers that predict further tokens, which drafting could use.
    ignored_tensors: ClassVar[tuple[str, ...]] = (*Olmo2ForCausalLM.ignored_tensors, r"(model\.)?mtp\..*")

    def make_head_norm(self, name: str, num_heads: int) -> HeadNorm:
        return HeadNorm(name, self.config.head_dim, self.config.rms_norm_eps)
