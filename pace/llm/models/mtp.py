"""Multi-token prediction: the further layer of a checkpoint that predicts the token after the next."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.layers import Block, Layer, LayerNorm, Linear, RMSNorm
from pace.llm.layers.block import Norm
from pace.llm.models.base_model import FINAL_NORM, BaseModelForCausalLM
from pace.llm.models.drafter import DraftHeadModel
from pace.media.media import MediaSpan
from pace.ops.protocol import ForwardOps

COPIES = r"\.(embed_tokens|shared_head\.head)\..*"
"""Copies of the model's embedding and head. The model's own are used."""


class MultiTokenLayer(Layer):
    """Joins the embedding of a token with the model's row of the token before, and passes both through a block."""

    def __init__(
        self, embedding_norm: Norm, hidden_norm: Norm, projection: Linear, block: Block, norm: RMSNorm | LayerNorm
    ):
        """`projection`: from both, side by side, to the input of the block. `norm`: of the block's output."""
        self.embedding_norm = embedding_norm
        self.hidden_norm = hidden_norm
        self.projection = projection
        self.block = block
        self.norm: RMSNorm | LayerNorm | None = norm
        """None for the final norm of the model."""

    def join(self, ops: ForwardOps, embeddings: Tensor, rows: Tensor) -> Tensor:
        """Returns the input of the block `[T, K]`, from embeddings and rows of the same width."""
        return self.projection(ops, ops.concatenate(self.embedding_norm(ops, embeddings), self.hidden_norm(ops, rows)))

    def choose_norm(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Drops the norm if a checkpoint does not have it."""
        if self.norm is not None and not self.norm.targets().keys() & tensors.keys():
            self.norm = None


class MultiTokenForCausalLM(BaseModelForCausalLM):
    """A model whose checkpoints may have layers for multi-token prediction after its own ones. The first of them drafts
    if that is wanted. The others are ignored."""

    num_further_layers: int = 0
    """Number of such layers that checkpoints of the family have."""
    mtp: MultiTokenLayer | None = None
    """The layer that drafts, once it is wanted."""

    def make_norm(self, name: str) -> RMSNorm | LayerNorm:
        """Makes a norm of the residual stream."""
        raise NotImplementedError

    def make_layer(self, name: str, index: int) -> Block:
        """Makes a decoder layer."""
        raise NotImplementedError

    def make_mtp_block(self, name: str) -> Block:
        """Makes the block of the layer for multi-token prediction: of the kind of the last layer."""
        return self.make_layer(name, len(self.layers) - 1)

    def further_layer(self, number: int) -> str:
        """The prefix of a layer for multi-token prediction."""
        return f"model.layers.{len(self.layers) + number}"

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        drafts = self.mtp is not None
        for number in range(self.num_further_layers):
            yield re.escape(self.further_layer(number)) + (COPIES if drafts and number == 0 else r"\..*")

    def add_mtp(self) -> None:
        name, hidden = self.further_layer(0), self.hidden_size
        self.mtp = MultiTokenLayer(
            self.make_norm(f"{name}.enorm"),
            self.make_norm(f"{name}.hnorm"),
            Linear({f"{name}.eh_proj": hidden}, 2 * hidden),
            self.make_mtp_block(name),
            self.make_norm(f"{name}.shared_head.norm"),
        )

    @property
    def layers_aside(self) -> list[Layer]:
        return [*super().layers_aside, *([self.mtp] if self.mtp is not None else [])]

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        if self.mtp is not None:
            self.mtp.choose_norm(tensors)


class MultiTokenDrafter(DraftHeadModel):
    """The layer of a loaded model for multi-token prediction, as a model of its own. It uses the model's embedding and
    head.

    The given row of a token is the model's row of the token before it, after the final norm. For a further draft, it is
    a row that this drafter has kept."""

    target_taps = (FINAL_NORM,)

    def __init__(self, target: MultiTokenForCausalLM, sees_inputs: bool | None = None):
        """`sees_inputs`: by default, true if the target has towers."""
        super().__init__(target.config, target.dtype, target.ops)
        assert target.mtp is not None, "the layer for multi-token prediction was not loaded"
        self.kv_dtype = target.kv_dtype
        self.rotaries = target.rotaries
        self.mtp = target.mtp
        self.embedding = target.embedding
        self.layers = [target.mtp.block]
        self.final_norm = target.mtp.norm or target.final_norm
        self.lm_head = target.lm_head
        self.taps = (FINAL_NORM,)
        self.sees_inputs = bool(target.towers) if sees_inputs is None else sees_inputs
        if self.sees_inputs:
            self.target_taps = (0, FINAL_NORM)
        self._angle_positions = target.angle_positions

    def of_target(self, target: BaseModelForCausalLM) -> MultiTokenDrafter:
        assert isinstance(target, MultiTokenForCausalLM)
        # Loading may have untied the head, or dropped the towers. The target's taps stay.
        return MultiTokenDrafter(target, self.sees_inputs)

    def resident_bytes(self) -> dict[str, int]:
        """Returns {}: the target counts the weights."""
        return {}

    def weight_counts(self) -> dict[str, int]:
        return {}

    def angle_positions(self, media: Sequence[MediaSpan], start: int, end: int) -> np.ndarray | None:
        positions = self._angle_positions(media, start, end)
        if positions is None:
            return None
        return np.maximum(positions, 0)  # an image at the very start would begin before, without its first token

    def embed(self, ops: ForwardOps, batch: ForwardBatch) -> Tensor:
        given, size = batch.given.rows, self.hidden_size
        inputs = ops.given_rows(given[:, size : 2 * size]) if self.sees_inputs else super().embed(ops, batch)
        return self.mtp.join(ops, inputs, ops.given_rows(given[:, :size]))
