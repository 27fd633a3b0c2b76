"""The assistant of Gemma 4: a small model that drafts from the model's last row, and sees the model's own keys and
values. It has none, so it reads no prompt.

A draft is computed at the position of the last token, whichever draft it is, and sees the positions before. Its input
is the model's embedding of the token before, next to a row: the model's, or for further drafts the assistant's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch, KVSpec, Positions
from pace.checkpoints.reader import CheckpointReader
from pace.llm.layers import Attention, Embedding, Linear, SharedAttention
from pace.llm.layers.rotary import Angles
from pace.llm.loading.fill import TensorReader
from pace.llm.models.base_model import WANTED_NORM, BaseModelForCausalLM
from pace.llm.models.drafter import DraftHeadModel
from pace.llm.models.families.gemma4 import Gemma4ForConditionalGeneration
from pace.llm.models.families.gemma4_config import Gemma4Config, Gemma4UnifiedConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, flag
from pace.ops.protocol import ForwardOps, Ops

ORDERING = "masked_embedding.token_ordering"
WITHOUT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
}
"""Fields of the text part that an assistant has only with these values."""


@dataclass(frozen=True, kw_only=True)
class Gemma4AssistantConfig(Gemma4Config):
    backbone_hidden_size: int = count(1536)
    """Width of the target's rows."""
    use_ordered_embeddings: bool = flag(False)
    """True if only tokens of the best clusters get logits."""
    num_centroids: int = count(2048)
    """Number of clusters."""
    centroid_intermediate_top_k: int = count(32)
    """Number of best clusters."""
    num_kv_shared_layers: int = count(0, MAX_LAYERS, minimum=0)
    hidden_size_per_layer_input: int = count(0, minimum=0)
    vocab_size_per_layer_input: int = count(0, minimum=0)

    own_fields: ClassVar[tuple[str, ...]] = (
        "backbone_hidden_size",
        "use_ordered_embeddings",
        "num_centroids",
        "centroid_intermediate_top_k",
    )
    """Fields outside of `text_config`."""

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        own = {name: raw[name] for name in cls.own_fields if name in raw}
        return super().text_part({name: value for name, value in raw.items() if name not in own}) | own

    @classmethod
    def of_target(cls, raw: dict[str, Any], target: BaseModelForCausalLM) -> Gemma4AssistantConfig:
        """Reads the config.json of an assistant for `target`. Raises the errors of `from_dict`, and ValueError for the
        assistant of another model."""
        config = cls.from_dict(raw)
        if not isinstance(target, Gemma4ForConditionalGeneration):
            raise ValueError(
                f"this is an assistant of Gemma 4, and the model is {type(target).__name__}; give a drafter that was "
                "trained for this model"
            )
        for name, ours, theirs in (
            ("hidden_size", target.hidden_size, config.backbone_hidden_size),
            ("vocab_size", target.vocab_size, config.vocab_size),
        ):
            if ours != theirs:
                raise ValueError(
                    f"this assistant is for models of {name} {theirs}, and this {type(target).__name__} has {ours}; "
                    "give the assistant that was trained for this model"
                )
        for kind in sorted(set(config.types_of_layers)):
            layer, own = last_of(kind, target.config), config.heads(config.layer_types.index(kind))
            if layer is None or target.config.heads(layer) != own:
                found = "none" if layer is None else str(tuple(target.config.heads(layer)))
                raise ValueError(
                    f"this assistant sees key heads of {kind} of the number and width {tuple(own)}, and the model has "
                    f"{found}; give the assistant that was trained for this model"
                )
        return config

    def check_sharing(self) -> None:
        """All layers share keys and values: those of the target."""
        if self.num_kv_shared_layers not in (0, self.num_hidden_layers):
            raise ValueError(
                f"config.json: num_kv_shared_layers of an assistant must be all {self.num_hidden_layers} layers; got "
                f"{self.num_kv_shared_layers}"
            )
        for name, value in WITHOUT.items():
            if getattr(self, name) != value:
                raise ValueError(f"config.json: {name} of an assistant must be {value}; got {getattr(self, name)}")
        if self.use_ordered_embeddings and self.vocab_size % self.num_centroids:
            raise ValueError(
                f"config.json: vocab_size must be a multiple of num_centroids; got {self.vocab_size} and "
                f"{self.num_centroids}"
            )
        if self.use_ordered_embeddings and self.centroid_intermediate_top_k > self.num_centroids:
            raise ValueError(
                f"config.json: centroid_intermediate_top_k must be at most num_centroids; got "
                f"{self.centroid_intermediate_top_k} and {self.num_centroids}"
            )

    def source(self, layer: int) -> int | None:
        """A layer has no keys and values on disk. Those in older files are ignored."""
        return layer

    @property
    def logits_softcap(self) -> float | None:
        """None: transformers does not limit the logits of an assistant."""
        return None


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedAssistantConfig(Gemma4AssistantConfig):
    """The assistant of the 12B."""

    backbone_hidden_size: int = count(3840)
    max_position_embeddings: int = count(262144, MAX_POSITIONS)
    sliding_window: int | None = count(1024, MAX_POSITIONS)

    without_effect: ClassVar[dict[str, tuple]] = Gemma4UnifiedConfig.without_effect


CONFIGS: dict[str, type[Gemma4AssistantConfig]] = {
    "Gemma4AssistantForCausalLM": Gemma4AssistantConfig,
    "Gemma4UnifiedAssistantForCausalLM": Gemma4UnifiedAssistantConfig,
}
"""The config of each architecture."""


def is_gemma4_assistant(raw: Mapping[str, Any]) -> bool:
    """True if a config.json describes an assistant of Gemma 4."""
    return _architecture(raw) is not None


def assistant_config(raw: dict[str, Any], target: BaseModelForCausalLM) -> Gemma4AssistantConfig:
    """Reads the config.json of an assistant for `target`, as `of_target`."""
    return CONFIGS[_architecture(raw) or "Gemma4AssistantForCausalLM"].of_target(raw, target)


def _architecture(raw: Mapping[str, Any]) -> str | None:
    names = raw.get("architectures")
    return next((name for name in names if name in CONFIGS), None) if isinstance(names, list) else None


def last_of(kind: str, config: Gemma4Config) -> int | None:
    """The last layer of a kind with keys and values of its own; None if there is none."""
    layers = range(config.num_hidden_layers - config.num_kv_shared_layers)
    return max((layer for layer in layers if config.layer_types[layer] == kind), default=None)


class Gemma4AssistantForCausalLM(DraftHeadModel, Gemma4ForConditionalGeneration):
    """An assistant. It is loaded by itself; `of_target` adds the embedding of its target."""

    Config = Gemma4AssistantConfig
    outside = (*Gemma4ForConditionalGeneration.outside, "pre_projection.", "post_projection.", "masked_embedding.")
    ignored_tensors = (*Gemma4ForConditionalGeneration.ignored_tensors, ORDERING.replace(".", r"\."))
    target_taps = (WANTED_NORM,)

    def __init__(self, config: Gemma4AssistantConfig, dtype: torch.dtype, ops: Ops, target: BaseModelForCausalLM):
        """`target` needs no weights."""
        super().__init__(config, dtype, ops)
        width = config.backbone_hidden_size
        self.target_layers = tuple(last_of(kind, target.config) for kind in config.layer_types)
        if config.sliding_window is not None and target.config.sliding_window is not None:
            # The window of a draft ends one position before that of the target's next token, and has one more.
            self.positions_before = max(0, config.sliding_window + 2 - target.config.sliding_window)
        self.target: tuple[BaseModelForCausalLM, ...] = ()
        """The loaded target, which is no child."""
        self.pre_projection = Linear({"pre_projection": config.hidden_size}, 2 * width)
        self.post_projection = Linear({"post_projection": width}, config.hidden_size)
        self.centroids: Linear | None = None
        self.clusters: Tensor | None = None
        """int64 `[num_centroids, tokens of each]`, once loaded."""
        if config.use_ordered_embeddings:
            self.centroids = Linear({"masked_embedding.centroids": config.num_centroids}, config.hidden_size)
            if not config.tie_word_embeddings:
                self.embedding = Embedding("lm_head", config.vocab_size, config.hidden_size)
            self.lm_head = None

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        if "lm_head" in self.embedding.parts:
            yield r"model\.embed_tokens\.weight"

    @property
    def num_tail_layers(self) -> int:
        return 0

    @property
    def kv_spec(self) -> KVSpec:
        """The form of the keys and values that each layer sees."""
        return KVSpec(tuple(layer.mixer.positions for layer in self.layers), self.kv_dtype)

    def make_attention(self, name: str, index: int) -> Attention:
        config = self.config
        hidden, num_heads, (kv_heads, dim) = config.hidden_size, config.num_attention_heads, config.heads(index)
        window = config.window(index)
        positions = Positions(kv_heads, dim, dim, window and window + 1)
        return SharedAttention(
            Linear({f"{name}.q_proj": num_heads * dim}, hidden, config.attention_bias),
            Linear({f"{name}.o_proj": hidden}, num_heads * dim, config.attention_bias),
            num_heads,
            positions,
            positions,
            self.rotary(index),
            self.make_query_norm(name, dim),
            config.attention_scale,
        )

    # -- loading

    def load_weights(
        self, reader: TensorReader, workers: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        super().load_weights(reader, workers, progress)
        if self.centroids is not None:
            self.clusters = read_clusters(reader, self.config.num_centroids, self.config.vocab_size)

    def of_target(self, target: BaseModelForCausalLM) -> Gemma4AssistantForCausalLM:
        model = copy.copy(self)
        model.target = (target,)
        return model

    # -- drafting

    @property
    def kept_width(self) -> int:
        return self.config.backbone_hidden_size

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        (target,) = self.target
        x = target.embedding(ops, batch.tokens)
        ops.scale_(x, target.embedding_scale)
        return self.pre_projection(ops, ops.concatenate(x, ops.given_rows(batch.given.rows[:, : self.kept_width])))

    def final_rows(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        x = self.embed(ops, batch)
        x = self.final_norm(ops, self.run_layers(ops, x, x, angles, batch, range(len(self.layers))))
        batch.kept[:, : self.kept_width] = self.post_projection(ops, x)
        return x[batch.logit_rows]

    def to_target(self, logits: Tensor) -> Tensor:
        """With clusters, `logits` are rows `[R, hidden]`. All tokens outside of the best clusters of a row get its
        least logit, minus 1."""
        if self.centroids is None:
            return logits
        return torch.stack([self._logits_of(row) for row in logits])

    def _logits_of(self, row: Tensor) -> Tensor:
        best = self.centroids(self.ops, row[None])[0].topk(self.config.centroid_intermediate_top_k).indices
        tokens = self.clusters[best].flatten()
        found = self.embedding(self.ops, tokens) @ row.clone()  # the bits depend on its alignment
        logits = torch.full((self.config.vocab_size,), found.min().item() - 1.0, dtype=found.dtype)
        return logits.index_copy_(0, tokens, found)


def read_clusters(reader: TensorReader, num_clusters: int, vocab_size: int) -> Tensor:
    """Reads the tokens of each cluster, int64 `[num_clusters, vocab_size / num_clusters]`. Raises ValueError unless
    each token is in one cluster."""
    if not isinstance(reader, CheckpointReader) or ORDERING not in reader.tensors:
        raise ValueError(f"this assistant has use_ordered_embeddings, and no tensor {ORDERING} of its tokens")
    tokens = reader.read_integers(ORDERING)
    if tokens.shape != (vocab_size,) or not torch.equal(tokens.sort().values, torch.arange(vocab_size)):
        raise ValueError(f"{ORDERING} must give each token from 0 to {vocab_size - 1} once")
    return tokens.view(num_clusters, -1)
