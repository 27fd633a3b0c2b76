"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and a sliding window on the upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count, declared, flag, token_ids

LAYER_TYPES = ("full_attention", "sliding_attention")


def layer_types() -> Any:
    """A list with the kind of attention of each layer, or null."""

    def read(value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError("a list of strings or null")
        if other := sorted(set(value) - set(LAYER_TYPES)):
            raise NotImplementedError(f"{other[0]!r} is not implemented; implemented: {', '.join(LAYER_TYPES)}")
        return tuple(value)

    return declared(None, read)


def check_layer_types(types: tuple[str, ...] | None, num_layers: int) -> None:
    """Raises ValueError where `layer_types` is given and does not name all layers."""
    if types is not None and len(types) != num_layers:
        raise ValueError(f"config.json: layer_types must name all {num_layers} layers; got {len(types)}")


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    vocab_size: int = count(151936)
    intermediate_size: int = count(22016)
    num_key_value_heads: int | None = count(32, optional=True)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    use_sliding_window: bool = flag(False)
    sliding_window: int | None = count(4096, MAX_POSITIONS, optional=True)
    max_window_layers: int = count(28, MAX_POSITIONS, minimum=0)
    layer_types: tuple[str, ...] | None = layer_types()
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)

    only_here: ClassVar[dict[str, tuple]] = {"attention_bias": (True,), "mlp_bias": (False,)}
    qkv_bias: ClassVar[bool] = True
    output_bias: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        check_layer_types(self.layer_types, self.num_hidden_layers)
        if "sliding_attention" in (self.layer_types or ()) and self.effective_window is None:
            raise ValueError(
                "config.json: layer_types asks for sliding_attention, but use_sliding_window is false or sliding_window is null"
            )

    @property
    def effective_window(self) -> int | None:
        return self.sliding_window if self.use_sliding_window else None

    def window(self, layer: int) -> int | None:
        if self.layer_types is not None:
            return self.effective_window if self.layer_types[layer] == "sliding_attention" else None
        return self.effective_window if layer >= self.max_window_layers else None


class Qwen2ForCausalLM(LlamaForCausalLM):
    Config = Qwen2Config
