"""Config of Gemma 4. Layers with a window and layers without differ in their heads and rotations."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from pace.llm.layers import RopeConfig
from pace.llm.models.families.windowed import WindowedConfig
from pace.llm.models.layer_types import FULL, SLIDING
from pace.llm.models.model_config import (
    MAX_COUNT,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    count,
    declared,
    flag,
    number,
    token_ids,
)
from pace.llm.models.rope_config import fields_of_layers, read_rope
from pace.llm.models.takes_media import TakesMediaConfig, read_token_id
from pace.llm.models.towers.gemma4_audio import Gemma4AudioConfig
from pace.llm.models.towers.gemma4_unified import Gemma4UnifiedAudioConfig, Gemma4UnifiedVisionConfig
from pace.llm.models.towers.gemma4_vision import Gemma4VisionConfig
from pace.llm.models.towers.vision_config import VisionConfig
from pace.naming import shown
from pace.ops.experts import MAX_EXPERTS, Router

logger = logging.getLogger("pace")

DEFAULT_ROPES: dict[str, dict[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
"""The rotations of a config.json without `rope_parameters`."""


class Heads(NamedTuple):
    """Key and value heads of a layer: their number and width. Query heads have the same width."""

    num_key_value_heads: int
    head_dim: int


def layer_overrides() -> Any:
    """The field `per_layer_config`: the fields of `Heads` that differ in a layer, for each such layer."""

    def read(value: Any) -> dict[int, dict[str, int]]:
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(
            str(layer).isdecimal() and isinstance(fields, dict) for layer, fields in value.items()
        ):
            raise ValueError("an object that has an object of fields for each number of a layer, or null")
        found = {}
        for layer, fields in value.items():
            given = {name: field for name, field in fields.items() if (name, field) != ("skip", [])}
            if other := sorted(given.keys() - set(Heads._fields)):
                raise NotImplementedError(
                    f"{other[0]} of layer {layer} is not implemented; implemented: {', '.join(Heads._fields)}"
                )
            limits = {"num_key_value_heads": MAX_COUNT, "head_dim": MAX_HEAD_DIM}
            for name, field in given.items():
                if type(field) is not int or not 1 <= field <= limits[name]:
                    raise ValueError(f"an object whose {name} of layer {layer} is an integer in 1..{limits[name]}")
            found[int(layer)] = given
        return found

    return declared(None, read)


def sight(default: str | None) -> Any:
    """The field `use_bidirectional_attention`: "vision" if the rows of an image see each other."""

    def read(value: Any) -> str | None:
        if value not in (None, "vision"):
            raise NotImplementedError(f'{shown(value)} is not implemented; implemented: null, "vision"')
        return value

    return declared(default, read)


@dataclass(frozen=True, kw_only=True)
class Gemma4Config(TakesMediaConfig, WindowedConfig):
    vocab_size: int = count(262144)
    hidden_size: int = count(2304)
    intermediate_size: int = count(9216)
    num_hidden_layers: int = count(30, MAX_LAYERS)
    num_attention_heads: int = count(8)
    num_key_value_heads: int | None = count(4)
    head_dim: int | None = count(256, MAX_HEAD_DIM)
    hidden_activation: str = activation("gelu_tanh")
    max_position_embeddings: int = count(131072, MAX_POSITIONS)
    sliding_window: int | None = count(512, MAX_POSITIONS)
    final_logit_softcapping: float | None = number(None, 1e-6, 1e9, optional=True)
    tie_word_embeddings: bool = flag(True)
    bos_token_id: int | tuple[int, ...] | None = token_ids(2)
    eos_token_id: int | tuple[int, ...] | None = token_ids(1)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    global_head_dim: int = count(512, MAX_HEAD_DIM)
    """Width of heads in layers without a window."""
    num_global_key_value_heads: int | None = count(None, optional=True)
    """Key heads in layers without a window. In a config.json, without effect unless attention_k_eq_v is true."""
    per_layer_config: dict[int, dict[str, int]] | None = layer_overrides()
    """Overrides both in a config.json. None once it is read."""
    attention_k_eq_v: bool = flag(False)
    """True if values are keys in layers without a window."""
    num_kv_shared_layers: int = count(0, MAX_LAYERS, minimum=0)
    """Number of the last layers that see the keys and values of earlier ones."""
    use_double_wide_mlp: bool = flag(False)
    """True if the MLPs of these layers are twice as wide."""
    vocab_size_per_layer_input: int = count(262144)
    hidden_size_per_layer_input: int = count(256, minimum=0)
    """Width of a token's embedding for each layer; 0 for none."""
    enable_moe_block: bool = flag(False)
    num_experts: int | None = count(None, MAX_EXPERTS, optional=True)
    top_k_experts: int | None = count(None, MAX_EXPERTS, optional=True)
    moe_intermediate_size: int | None = count(None, optional=True)
    use_bidirectional_attention: str | None = sight(None)
    stand_ins: tuple[tuple[int, int], ...] = ()
    """Placeholders of media, each with the token of padding that it is read as."""
    audio: Any = None
    """Config of the tower for sound; None for no sound."""
    audio_token_id: int = -1

    Vision: ClassVar[type[VisionConfig]] = Gemma4VisionConfig
    Audio: ClassVar[type[VisionConfig]] = Gemma4AudioConfig
    sees_beyond_windows: ClassVar[bool] = False
    """True if rows of an image that see each other do so in all layers, and beyond windows. Otherwise, it is within the
    windows of layers that have one."""
    only_here: ClassVar[dict[str, tuple]] = {"mlp_bias": (False,)}
    also_read: ClassVar[frozenset[str]] = frozenset({"rope_parameters"})
    beside_text: ClassVar[frozenset[str]] = frozenset(
        {"vision_config", "audio_config", "vision_soft_tokens_per_image", "eoa_token_index",
         *(f"{name}_token_id" for name in ("boi", "eoi", "image", "video", "boa", "eoa", "audio"))}
    )  # fmt: skip

    def read_media(self, raw: dict[str, Any]) -> Any:
        text, audio = raw.get("text_config") or {}, raw.get("audio_config")
        defaults = {"image": 258880, "audio": 258881, "video": 258884}
        ids = {kind: read_token_id(raw, (f"{kind}_token_id",), number) for kind, number in defaults.items()}
        return replace(
            self,
            vision=self.Vision.read(raw["vision_config"]),
            image_token_id=ids["image"],
            stand_ins=tuple((number, read_token_id(text, ("pad_token_id",), 0)) for number in ids.values()),
            audio=None if audio is None else self.Audio.read(audio),
            audio_token_id=ids["audio"],
        )

    @property
    def full_every(self) -> int:
        return 6

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        """The last layer sees all positions, even if `layer_types` gives it a window."""
        return (*super().types_of_layers[:-1], FULL)

    def check(self) -> None:
        super().check()
        if self.layer_types is not None and self.layer_types[-1] != FULL:
            logger.warning("config.json: the last layer is a %s layer, as in transformers, not %s", FULL, SLIDING)
        self.check_sharing()
        for layer in self.per_layer_config or {}:
            if layer >= self.num_hidden_layers:
                raise ValueError(
                    f"config.json: per_layer_config has a layer {layer}, but there are {self.num_hidden_layers}"
                )
        for kind in set(self.types_of_layers):
            if self.num_attention_heads % self.heads_of(kind).num_key_value_heads:
                raise ValueError(
                    f"config.json: num_attention_heads must be a multiple of the key heads of {kind}; got "
                    f"{self.num_attention_heads} and {self.heads_of(kind).num_key_value_heads}"
                )
        if self.hidden_size_per_layer_input and self.vocab_size_per_layer_input < self.vocab_size:
            raise ValueError(
                "config.json: vocab_size_per_layer_input must be at least vocab_size; got "
                f"{self.vocab_size_per_layer_input} and {self.vocab_size}"
            )
        if self.enable_moe_block:
            for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
                if getattr(self, name) is None:
                    raise ValueError(f"config.json: {name} is missing, but enable_moe_block is true")
            try:
                _ = self.router
            except ValueError as error:
                raise ValueError(f"config.json: num_experts and top_k_experts: {error}") from None

    def check_sharing(self) -> None:
        """Raises ValueError if a layer that shares keys and values has none to share."""
        types, shared = self.types_of_layers, self.num_kv_shared_layers
        if lacking := sorted(set(types) - set(types[: self.num_hidden_layers - shared])):
            raise ValueError(
                f"config.json: num_kv_shared_layers = {shared} leaves no layer of {lacking[0]} whose keys and values "
                "the last ones could share"
            )

    def heads_of(self, kind: str) -> Heads:
        """Returns the key and value heads of a kind of layer, from the fields of a config.json. Raises ValueError if
        two of its layers differ."""
        usual = Heads(self.num_key_value_heads, self.head_dim)
        if self.per_layer_config is None:
            if kind == SLIDING:
                return usual
            num_heads = self.attention_k_eq_v and self.num_global_key_value_heads or self.num_key_value_heads
            return Heads(num_heads, self.global_head_dim)
        layers = [layer for layer, other in enumerate(self.types_of_layers) if other == kind]
        found = {usual._replace(**self.per_layer_config.get(layer, {})) for layer in layers} or {usual}
        if len(found) > 1:
            raise ValueError(
                f"config.json: per_layer_config must be the same for all layers of {kind}; got {sorted(found)}"
            )
        return found.pop()

    def heads(self, layer: int) -> Heads:
        """Returns the key and value heads of a layer."""
        if self.slides(layer):
            return Heads(self.num_key_value_heads, self.head_dim)
        return Heads(self.num_global_key_value_heads, self.global_head_dim)

    def source(self, layer: int) -> int | None:
        """The layer whose keys and values a layer sees; None for its own."""
        first = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < first:
            return None
        return max(other for other in range(first) if self.layer_types[other] == self.layer_types[layer])

    def values_are_keys(self, layer: int) -> bool:
        return self.attention_k_eq_v and not self.slides(layer)

    def inner_size(self, layer: int) -> int:
        """Width of a layer's MLP."""
        return self.intermediate_size * (2 if self.use_double_wide_mlp and self.source(layer) is not None else 1)

    @property
    def router(self) -> Router:
        return Router(self.num_experts, self.top_k_experts, normalise=True)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        usual, of_all = self.heads_of(SLIDING), self.heads_of(FULL)
        return super().derived(fields) | {
            "hidden_act": self.hidden_activation,
            "local_rope": self.rope_of(fields, SLIDING),
            "num_key_value_heads": usual.num_key_value_heads,
            "head_dim": usual.head_dim,
            "num_global_key_value_heads": of_all.num_key_value_heads,
            "global_head_dim": of_all.head_dim,
            "per_layer_config": None,
        }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        return self.rope_of(fields, FULL)

    def rope_of(self, fields: dict[str, Any], kind: str) -> RopeConfig:
        """Reads the rotation of a kind of layer. Raises ValueError if the config has such layers, and other rotations,
        but not theirs."""
        given = fields.get("rope_parameters")
        if given is None or kind not in self.types_of_layers:
            given = DEFAULT_ROPES
        elif isinstance(given, dict) and given.get(kind) is None:
            raise ValueError(f"config.json: rope_parameters has no rotation for {kind}; got {shown(given)}")
        own = fields_of_layers({"rope_parameters": given}, kind)
        return read_rope(own, self.heads_of(kind).head_dim, self.max_position_embeddings)

    @property
    def max_length(self) -> int:
        return self.max_position_embeddings

    @property
    def attention_scale(self) -> float:
        return 1.0

    @property
    def logits_softcap(self) -> float | None:
        return self.final_logit_softcapping


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedConfig(Gemma4Config):
    """The 12B: no embeddings for layers, and no experts."""

    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    sliding_window: int | None = count(1024, MAX_POSITIONS)
    hidden_size_per_layer_input: int = count(0, minimum=0)
    use_bidirectional_attention: str | None = sight("vision")

    Vision: ClassVar[type[VisionConfig]] = Gemma4UnifiedVisionConfig
    Audio: ClassVar[type[VisionConfig]] = Gemma4UnifiedAudioConfig
    sees_beyond_windows: ClassVar[bool] = True
    without_effect: ClassVar[dict[str, tuple]] = {
        "hidden_size_per_layer_input": (None, 0),
        "enable_moe_block": (None, False),
    }
