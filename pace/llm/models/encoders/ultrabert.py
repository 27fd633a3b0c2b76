"""UltraBERT: EuroBERT with a window on two of three layers, which rotate differently from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pace.llm.layers import RopeConfig
from pace.llm.models.encoders.encoder import EncoderConfig
from pace.llm.models.encoders.eurobert import DecoderLayers
from pace.llm.models.encoders.heads import PlainHead
from pace.llm.models.families.llama import LlamaForCausalLM
from pace.llm.models.families.windowed import TwoRotationsConfig
from pace.llm.models.layer_types import FULL, SLIDING, every
from pace.llm.models.model_config import MAX_POSITIONS, choice, count, number, token_ids
from pace.llm.models.rope_config import fields_of_layers, read_rope
from pace.naming import shown
from pace.ops.protocol import Ops

FULL_EVERY = 3


@dataclass(frozen=True, kw_only=True)
class UltrabertConfig(TwoRotationsConfig, EncoderConfig):
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)
    sliding_window: int = count(128, MAX_POSITIONS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    classifier_pooling: str = choice("cls", ("cls", "mean"))

    only_here: ClassVar[dict[str, tuple]] = {"is_causal": (None, False)}
    also_read: ClassVar[frozenset[str]] = TwoRotationsConfig.also_read | {"prediction_head_size"}

    @classmethod
    def with_one_spelling(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The first checkpoints list the window and the base of each layer. transformers gives all windows the width of
        the first one."""
        fields = super().with_one_spelling(raw)
        windows = fields.pop("attention_windows", None)
        if windows is not None:
            if not isinstance(windows, list) or not all(w is None or type(w) is int and w >= 0 for w in windows):
                raise ValueError(
                    f"config.json: attention_windows must be a list of integers or null; got {shown(windows)}"
                )
            fields["sliding_window"] = next(filter(None, windows), fields.get("sliding_window", 128))
            if fields.get("layer_types") is None:
                fields["layer_types"] = [SLIDING if window else FULL for window in windows]
        bases = fields.pop("rope_theta", None)
        if bases is not None and fields.get("rope_parameters") is None:
            if not isinstance(bases, list):
                raise ValueError(f"config.json: rope_theta must be a list, one base a layer; got {shown(bases)}")
            types = fields.get("layer_types") or every(FULL_EVERY, len(bases))
            fields["rope_parameters"] = {kind: {"rope_theta": base} for kind, base in zip(types, bases)}
        return fields

    @property
    def types_of_layers(self) -> tuple[str, ...]:
        return self.layer_types or every(FULL_EVERY, self.num_hidden_layers)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return TwoRotationsConfig.derived(self, fields) | EncoderConfig.derived(self, fields)

    def rope_of(self, kind: str, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        # transformers has no base for a kind that rope_parameters leaves out; no layer is of that kind.
        default = {FULL: 2560000.0, SLIDING: 10000.0}[kind] if fields.get("rope_parameters") is None else 10000.0
        own = fields_of_layers(fields, kind)
        return read_rope(own, head_dim, self.max_position_embeddings, default_theta=default)

    def window(self, layer: int) -> int | None:
        """`sliding_window` tokens on each side of a token."""
        return self.sliding_window + 1 if self.slides(layer) else None


class UltrabertModel(DecoderLayers):
    Config = UltrabertConfig
    text_prefixes: ClassVar[dict[str, str]] = {"ultrabert.": "model."}
    outside = ("classifier.", "cls.", "head.")
    ignored_tensors = (*LlamaForCausalLM.ignored_tensors, r"(head|cls)\..*")

    def __init__(self, config: UltrabertConfig, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        if self.num_labels:
            self.head = PlainHead("classifier", config.hidden_size, self.num_labels, (config.classifier_pooling,))
