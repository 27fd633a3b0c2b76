"""Apertus 8B and 70B, and the text part of Apertus 1.5: Llama with normalised query and key heads. MLPs have no gates,
and their activation is xIELU, whose numbers are in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import FeedForward, Linear, LMHead, PlainMLP, RopeConfig, TiedLMHead, XieluMLP
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_POSITIONS, count, declared, number, read_activation, read_number, token_ids
from pace.llm.models.rope_config import read_rope
from pace.ops.experts import Xielu

PUBLISHED_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The rotation if config.json has none."""

XIELU = "xielu"


def xielu_or_activation() -> Any:
    """The name of an activation, or xielu."""
    return declared(XIELU, lambda value: value if value == XIELU else read_activation(value))


def numbers_of_layers() -> Any:
    """A list of four numbers for each layer, or null."""

    def read(value: Any) -> tuple[tuple[float, ...], ...] | None:
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(row, list) and len(row) == 4 for row in value):
            raise ValueError("a list of four numbers for each layer, or null")
        return tuple(tuple(read_number(number, -1e6, 1e6) for number in row) for row in value)

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class ApertusConfig(LlamaConfig):
    vocab_size: int = count(131072)
    intermediate_size: int = count(14336)
    max_position_embeddings: int = count(65536, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    hidden_act: str = xielu_or_activation()
    xielu: tuple[tuple[float, ...], ...] | None = numbers_of_layers()
    """alpha_p, alpha_n, beta and eps of each layer, in GGUF files; they have no tensors for them."""
    pad_token_id: int | tuple[int, ...] | None = token_ids(3)

    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}

    def check(self) -> None:
        super().check()
        if self.xielu is not None and len(self.xielu) != self.num_hidden_layers:
            raise ValueError(
                f"config.json: xielu must have numbers for {self.num_hidden_layers} layers; got {len(self.xielu)}"
            )

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        if not fields.get("rope_scaling") and not fields.get("rope_parameters"):
            fields = fields | {"rope_parameters": PUBLISHED_ROPE}
        return read_rope(fields, head_dim, self.max_position_embeddings, default_theta=12000000.0)


class ApertusForCausalLM(LlamaForCausalLM):
    Config = ApertusConfig
    norm_names = ("attention_layernorm", "feedforward_layernorm")
    head_norm = True

    def make_feed_forward(self, name: str, index: int) -> FeedForward:
        config = self.config
        up = Linear({f"{name}.mlp.up_proj": config.intermediate_size}, config.hidden_size)
        down = Linear({f"{name}.mlp.down_proj": config.hidden_size}, config.intermediate_size)
        if config.hidden_act != XIELU:
            return PlainMLP(up, down, config.hidden_act)
        if config.xielu is None:
            return XieluMLP(up, down, f"{name}.mlp.act_fn")
        return PlainMLP(up, down, Xielu.from_raw(*config.xielu[index]))


@dataclass(frozen=True, kw_only=True)
class Apertus1p5Config(ApertusConfig):
    vocab_size: int = count(266752)
    output_vocab_size: int | None = count(None, optional=True)
    """Number of rows of the LM head; null for the vocabulary."""

    beside_text: ClassVar[frozenset[str]] = frozenset(
        """vision_config audio_config image_token_id audio_token_id image_token_offset audio_token_offset""".split()
    )

    def check(self) -> None:
        super().check()
        if self.output_vocab_size is not None and self.output_vocab_size > self.vocab_size:
            raise ValueError(
                f"config.json: output_vocab_size must be at most vocab_size = {self.vocab_size}; got "
                f"{self.output_vocab_size}"
            )
        if self.tie_word_embeddings and self.output_vocab_size not in (None, self.vocab_size):
            raise NotImplementedError("config.json: output_vocab_size with tie_word_embeddings is not implemented")


class Apertus1p5ForConditionalGeneration(ApertusForCausalLM):
    Config = Apertus1p5Config
    text_prefixes: ClassVar[dict[str, str]] = {"model.language_model.": "model."}
    other_parts: ClassVar[tuple[str, ...]] = ("model.vision_tokenizer.", "model.audio_tokenizer.")

    @property
    def vocab_size(self) -> int:
        return self.config.output_vocab_size or self.config.vocab_size

    def make_head(self, k: int, bias: bool = False) -> LMHead | TiedLMHead:
        if self.config.tie_word_embeddings:
            return super().make_head(k, bias)
        return LMHead("lm_head", self.vocab_size, k, bias)
