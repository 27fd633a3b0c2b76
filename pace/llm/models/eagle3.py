"""EAGLE-3 (arXiv 2503.01840): a layer that drafts from rows of three layers of the target model.

Checkpoints have the names of the paper's code (`midlayer.`) or those of speculators (`layers.0.`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.reader import CheckpointReader
from pace.llm.layers import Attention, Block, Embedding, GatedMLP, Linear, LMHead, RMSNorm
from pace.llm.layers.block import MixerBlocks, Norm
from pace.llm.layers.rotary import Angles
from pace.llm.loading.fill import TensorReader
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.drafter import DraftHeadModel
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import count, declared, flag
from pace.llm.models.towers.tower import Slice, rows_batch
from pace.naming import shown
from pace.ops.protocol import ForwardOps, Ops

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
NESTED = "transformer_layer_config"
"""The object with the fields of the layer, in the form of speculators."""
NUM_TAPS = 3
"""Number of layers of the target whose inputs are read."""


def layer_ids() -> Any:
    """The layers of the target whose inputs are read; null or [] for the default ones."""

    def read(value: Any) -> tuple[int, ...] | None:
        if value is None or value == []:
            return None
        if not isinstance(value, list) or len(value) != NUM_TAPS or not all(type(item) is int for item in value):
            raise ValueError(f"a list of {NUM_TAPS} layers of the target model, or null")
        return tuple(value)

    return declared(None, read)


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """True if a config.json describes an EAGLE-3 drafter."""
    names = raw.get("architectures")
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(LlamaConfig):
    num_hidden_layers: int = count(1, 1)
    draft_vocab_size: int | None = count(None, optional=True)
    """Number of tokens that it can draft; None for all of the target's."""
    target_hidden_size: int | None = count(None, optional=True)
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = layer_ids()
    norm_before_residual: bool = flag(False)
    norm_before_fc: bool = flag(False)

    only_here: ClassVar[dict[str, tuple]] = {"hidden_act": ("silu", "swish")}
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read | {"eagle_config", "speculators_config"}

    @classmethod
    def of_target(cls, raw: dict[str, Any], target: BaseModelForCausalLM) -> Eagle3Config:
        """Reads the config.json of a drafter for `target`. A drafter runs at any position of its target.

        Raises the errors of `from_dict`, and ValueError for the drafter of another model."""
        fields = {name: value for name, value in raw.items() if name != NESTED} | (raw.get(NESTED) or {})
        fields |= raw.get("eagle_config") or {}
        fields["max_position_embeddings"] = max(
            target.max_position_embeddings, fields.get("max_position_embeddings") or 0
        )
        config = cls.from_dict(fields)
        hidden, ours = config.target_hidden_size or config.hidden_size, target.hidden_size
        if hidden != ours:
            raise ValueError(
                f"this EAGLE-3 drafter is for models of hidden_size {hidden}, and {type(target).__name__} has {ours}; "
                "give a drafter that was trained for this model"
            )
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"this EAGLE-3 drafter is for models of vocab_size {config.vocab_size}, and {type(target).__name__} "
                f"has {target.vocab_size}; give a drafter that was trained for this model"
            )
        return config

    def taps(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target with `num_layers` whose inputs are read. Raises ValueError if it has too few."""
        taps = self.eagle_aux_hidden_state_layer_ids or (2, num_layers // 2, num_layers - 3)
        if not all(0 <= layer <= num_layers for layer in taps):
            raise ValueError(
                f"this EAGLE-3 drafter reads the inputs of layers {shown(list(taps))}, and the model has "
                f"{num_layers} layers; give a drafter that was trained for this model"
            )
        return taps


class Eagle3Inputs(Slice):
    """Joins the rows of three layers of the target into one."""

    def __init__(self, config: Eagle3Config, target_hidden: int):
        width = NUM_TAPS * target_hidden
        self.norm = RMSNorm("input_norm", width, config.rms_norm_eps) if config.norm_before_fc else None
        self.matrix = Linear({"fc": config.hidden_size}, width)

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        x = ops.given_rows(batch.given.rows[:, : self.matrix.k])
        return self.matrix(ops, x if self.norm is None else self.norm(ops, x))


class Eagle3Block(Block):
    """A decoder layer whose attention reads the norms of an embedding and of a given row, side by side. The residual is
    the given row, or its norm."""

    def __init__(
        self, embedding_norm: Norm, row_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: GatedMLP, normed: bool
    ):
        """`normed`: the residual is the norm of the given row."""
        super().__init__(embedding_norm, attention, mlp_norm, mlp)
        self.row_norm = row_norm
        self.normed = normed

    def __call__(self, ops: ForwardOps, x: Tensor, angles: Angles, batch: ForwardBatch, kv: MixerBlocks) -> Tensor:
        """`x`: embeddings."""
        row = ops.given_rows(batch.given.rows[:, : self.mlp.readers[0].k])
        normed = self.row_norm(ops, row)
        both = ops.concatenate(self.mixer_norm(ops, x), normed)
        x = self.mixer(ops, both, angles, batch, kv, residual=normed if self.normed else row)
        return self.mlp(ops, self.mlp_norm(ops, x), residual=x)


class Eagle3ForCausalLM(DraftHeadModel, LlamaForCausalLM):
    """An EAGLE-3 drafter. It is loaded by itself; `of_target` adds what it shares with its target."""

    Config = Eagle3Config
    prefix = ""
    ignored_tensors = (*BaseModelForCausalLM.ignored_tensors, "d2t", "t2d")
    other_names: ClassVar[Mapping[str, str]] = {r"^model\.": "", r"^layers\.0\.": "midlayer."}

    def __init__(self, config: Eagle3Config, dtype: torch.dtype, ops: Ops, target_hidden: int, num_layers: int):
        """`target_hidden` and `num_layers` are the width and the number of layers of the target."""
        BaseModelForCausalLM.__init__(self, config, dtype, ops)
        self.rotaries = self.make_rotaries()
        self.embedding = Embedding("embed_tokens", config.vocab_size, config.hidden_size)
        self.inputs = Eagle3Inputs(config, target_hidden)
        self.layers = [self.make_layer("midlayer", 0)]
        self.final_norm = self.make_norm("norm")
        self.lm_head = LMHead("lm_head", config.draft_vocab_size or config.vocab_size, config.hidden_size)
        self.taps = (len(self.layers),)
        self.target_taps = config.taps(num_layers)
        self.target_ids: Tensor | None = None
        """int64 `[draft_vocab_size]`, the token of each logit; None if it is the same."""

    def make_layer(self, name: str, index: int) -> Eagle3Block:
        config = self.config
        attention = self.make_attention(f"{name}.self_attn", index)
        attention.qkv = Linear(attention.qkv.parts, 2 * config.hidden_size, config.qkv_bias)
        return Eagle3Block(
            self.make_norm(f"{name}.input_layernorm"),
            self.make_norm(f"{name}.hidden_norm"),
            attention,
            self.make_norm(f"{name}.post_attention_layernorm"),
            self.make_mlp(f"{name}.mlp"),
            config.norm_before_residual,
        )

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    # -- loading

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Drops an embedding and a head that a checkpoint does not have."""
        if "embed_tokens.weight" not in tensors:
            self.embedding = None
        if "lm_head.weight" not in tensors and self.config.draft_vocab_size in (None, self.config.vocab_size):
            self.lm_head = None
        super().choose(tensors)

    def load_weights(
        self, reader: TensorReader, workers: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        super().load_weights(reader, workers, progress)
        if self.lm_head is not None and self.lm_head.n < self.config.vocab_size:
            self.target_ids = read_target_ids(reader, self.lm_head.n, self.config.vocab_size)

    def of_target(self, target: BaseModelForCausalLM) -> Eagle3ForCausalLM:
        """Returns this drafter, loaded, with the embedding and the head of the target where it has none. Raises
        ValueError if these have another width."""
        model = copy.copy(self)
        model.embedding, model.lm_head = self.embedding or target.embedding, self.lm_head or target.lm_head
        if self.hidden_size != target.hidden_size and not (self.embedding and self.lm_head):
            raise ValueError(
                f"this EAGLE-3 drafter of hidden_size {self.hidden_size} has no embed_tokens or no lm_head, and those "
                f"of the model have hidden_size {target.hidden_size}; give a drafter that was trained for this model"
            )
        return model

    # -- drafting

    def encode(self, run: Callable[[Slice, ForwardBatch, Angles], Tensor], rows: Tensor) -> Tensor:
        return run(self.inputs, rows_batch(rows.contiguous()), ())

    def to_target(self, logits: Tensor) -> Tensor:
        if self.target_ids is None:
            return logits
        whole = logits.new_full((logits.shape[0], self.config.vocab_size), -torch.inf)
        return whole.index_copy_(1, self.target_ids, logits)


def read_target_ids(reader: TensorReader, count: int, vocab_size: int) -> Tensor:
    """Reads `d2t`, the difference between the token and the number of each logit. Raises ValueError unless it gives
    `count` different tokens."""
    if not isinstance(reader, (CheckpointReader, GgufCheckpoint)) or "d2t" not in reader.tensors:
        raise ValueError(
            f"this EAGLE-3 drafter has logits of {count} of {vocab_size} tokens, and no tensor d2t of them"
        )
    differences = reader.read_integers("d2t")
    if differences.shape != (count,):
        raise ValueError(f"d2t has shape {list(differences.shape)}, and the drafter has {count} logits")
    ids = torch.arange(count) + differences
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size or len(ids.unique()) < count:
        raise ValueError(f"d2t must give {count} different tokens of 0 to {vocab_size - 1}")
    return ids
