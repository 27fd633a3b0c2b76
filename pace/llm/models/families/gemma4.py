"""Gemma 4. The last layers see keys and values of earlier ones. Every layer may get an embedding of its own for each
token (E2B, E4B), or have experts next to its MLP (26B-A4B). The rows of an image may see each other, also those after
them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch, Positions, Shares
from pace.llm.layers import (
    Attention,
    Block,
    FeedForward,
    FileEmbedding,
    GatedMLP,
    HeadNorm,
    HeadUnitNorm,
    Layer,
    Linear,
    MixtureOfExperts,
    NoNorm,
    RMSNorm,
    RouterLinear,
    ScaledVectors,
    SharedAttention,
    Vectors,
    expert_stacks,
)
from pace.llm.layers.block import MixerBlocks
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import WANTED_NORM
from pace.llm.models.families.gemma4_config import Gemma4Config, Gemma4UnifiedConfig
from pace.llm.models.families.llama import LlamaForCausalLM, parts
from pace.llm.models.takes_media import TakesMedia
from pace.llm.models.towers.gemma4_audio import Gemma4AudioTower
from pace.llm.models.towers.gemma4_unified import Gemma4UnifiedAudioTower, Gemma4UnifiedTower
from pace.llm.models.towers.gemma4_vision import Gemma4VisionTower
from pace.llm.models.towers.tower import Tower
from pace.ops.protocol import ForwardOps, Ops


class LayerInputs(Layer):
    """Embeddings of tokens for each layer, `[T, layers * P]`: `(norm(projection(x)) + table[token]) / sqrt(2)`, for the
    ordinary embeddings `x [T, hidden]`."""

    def __init__(self, config: Gemma4Config, dtype: torch.dtype):
        self.num_layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        size = self.num_layers * self.width
        self.table = FileEmbedding("model.embed_tokens_per_layer", config.vocab_size_per_layer_input, size)
        self.projection = Linear({"model.per_layer_model_projection": size}, config.hidden_size)
        self.norm = HeadNorm("model.per_layer_projection_norm", self.width, config.rms_norm_eps)
        self.table_scale = rounded_root(self.width, dtype)

    def __call__(self, ops: ForwardOps, tokens: Tensor, x: Tensor) -> Tensor:
        of_context = self.projection(ops, x)
        ops.scale_(of_context, self.projection.k**-0.5)
        self.norm(ops, of_context.unflatten(1, (self.num_layers, self.width)))
        of_token = self.table(ops, tokens)
        ops.scale_(of_token, self.table_scale)
        both = of_context + of_token
        ops.scale_(both, 2**-0.5)
        return both


class LayerInjection(Layer):
    """`x + norm(projection(act(gate(x)) * layer_input))`."""

    def __init__(self, name: str, config: Gemma4Config):
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.gate = Linear({f"{name}.per_layer_input_gate": width}, hidden)
        self.projection = Linear({f"{name}.per_layer_projection": hidden}, width)
        self.norm = RMSNorm(f"{name}.post_per_layer_input_norm", hidden, config.rms_norm_eps)
        self.activation = config.hidden_act

    def __call__(self, ops: ForwardOps, x: Tensor, layer_input: Tensor) -> Tensor:
        y = self.gate(ops, x, self.activation)
        ops.gate_(y, layer_input, None)
        return x + self.norm(ops, self.projection(ops, y))


class MixtureAndMLP(MixtureOfExperts):
    """`norm_1(mlp(pre_norm(x))) + norm_2(w1 f1(pre_norm_2(x)) + ...)` of the residual stream x, which the router reads
    as well. The MLP is `shared`."""

    def __init__(self, name: str, config: Gemma4Config, mlp: GatedMLP):
        hidden, count = config.hidden_size, config.num_experts
        super().__init__(
            RouterLinear({f"{name}.router.proj": count}, hidden),
            config.router,
            *expert_stacks(f"{name}.experts", count, hidden, config.moe_intermediate_size),
            config.hidden_act,
            shared=mlp,
            expert_scale=Vectors({f"{name}.router.per_expert_scale": count}),
        )

        def norm(kind: str) -> RMSNorm:
            return RMSNorm(f"{name}.{kind}", hidden, config.rms_norm_eps)

        self.mlp_norms = [norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm_1")]
        self.expert_norms = [norm("pre_feedforward_layernorm_2"), norm("post_feedforward_layernorm_2")]
        self.router_norm = RMSNorm("", hidden, config.rms_norm_eps)
        self.router_norm.weight = ScaledVectors({f"{name}.router.scale": hidden}, [(hidden, hidden**-0.5)])

    @property
    def readers(self) -> list[Linear]:
        """None reads the same input as another."""
        return []

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        before, after = self.mlp_norms
        of_all = after(ops, self.shared(ops, before(ops, x)))
        routing = self.route(ops, self.router_norm(ops, x))
        before, after = self.expert_norms
        of_experts = after(ops, self.routed(ops, before(ops, x), routing, None))
        y = of_all + of_experts
        return y if residual is None else residual + y


class Gemma4Block(Block):
    """A block whose output is multiplied by a number, after an optional injection of the layer's own embeddings."""

    def __init__(self, *branches: Layer, scalar: str, injection: LayerInjection | None, **norms: RMSNorm):
        """`branches`, `norms`: the arguments of `Block`. `scalar`: name of a tensor with one element."""
        super().__init__(*branches, **norms)
        self.injection = injection
        self.scalar = Vectors({scalar: 1})

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: MixerBlocks,
        layer_input: Tensor | None = None,
    ) -> Tensor:
        """`layer_input`: `[T, P]`, for a block with an injection."""
        x = super().__call__(ops, x, angles, batch, kv)
        if self.injection is not None:
            x = self.injection(ops, x, layer_input)
        factor = self.scalar.values.item()
        if not math.isfinite(factor):
            raise ValueError(f"the tensor {next(iter(self.scalar.lengths))} is {factor}; it must be finite")
        if factor != 1.0:
            ops.scale_(x, factor)
        return x


TEXT_PREFIXES = {
    "language_model.lm_head.": "lm_head.",
    "language_model.model.": "model.",
    "language_model.": "model.",
    "model.language_model.": "model.",
}


class Gemma4ForConditionalGeneration(TakesMedia, LlamaForCausalLM):
    """Gemma 4 with images and sound; `Gemma4ForCausalLM` is the same model without towers."""

    Config = Gemma4Config
    Tower: ClassVar[type[Tower]] = Gemma4VisionTower
    AudioTower: ClassVar[type[Tower]] = Gemma4AudioTower
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES | {
        "model.vision_tower.": "vision_tower.",
        "model.embed_vision.": "vision_tower.embed_vision.",
        "embed_vision.": "vision_tower.embed_vision.",
        "model.audio_tower.": "audio_tower.",
        "model.embed_audio.": "audio_tower.embed_audio.",
        "embed_audio.": "audio_tower.embed_audio.",
    }
    other_parts = tuple(
        f"{prefix}{part}."
        for prefix in ("", "model.")
        for part in ("vision_tower", "audio_tower", "embed_vision", "vision_embedder", "embed_audio")
    )

    def __init__(self, config: Gemma4Config, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.layer_inputs = LayerInputs(config, dtype) if config.hidden_size_per_layer_input else None
        self.whole_media = config.use_bidirectional_attention == "vision"
        self.sees_beyond_windows = config.sees_beyond_windows
        self.stand_ins = dict(config.stand_ins)
        if config.audio is not None:
            self.towers.append(self.AudioTower(config.audio, config.hidden_size, config.audio_token_id))

    def make_tower(self) -> Tower:
        return self.Tower(self.config.vision, self.config.hidden_size, self.config.image_token_id)

    def ignored(self) -> Iterator[str]:
        """Adds tensors that make keys and values in layers that share those of another layer."""
        yield from super().ignored()
        for layer in range(self.config.num_hidden_layers):
            if self.config.source(layer) is not None:
                yield rf"model\.layers\.{layer}\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"

    @property
    def num_tail_layers(self) -> int:
        return self.config.num_kv_shared_layers

    @property
    def stages(self) -> tuple[FirstLayers, TailLayers] | None:
        needs_all = set(self.taps) - {WANTED_NORM}
        return (FirstLayers(self), TailLayers(self)) if self.num_tail_layers and not needs_all else None

    @property
    def hidden_elements(self) -> int:
        return super().hidden_elements + self.config.hidden_size_per_layer_input * len(self.layers)

    def layer_arguments(self, ops: ForwardOps, embeddings: Tensor, batch: ForwardBatch) -> list[tuple[Tensor, ...]]:
        if self.layer_inputs is None:
            return super().layer_arguments(ops, embeddings, batch)
        inputs, width = self.layer_inputs(ops, batch.tokens, embeddings), self.layer_inputs.width
        return [(inputs[:, index * width : (index + 1) * width],) for index in range(len(self.layers))]

    def add_mtp(self) -> None:
        raise NotImplementedError(
            'spec_config="mtp" is not implemented for Gemma 4, whose checkpoints have no layer that drafts; give its '
            'assistant, such as DraftModelConfig("google/gemma-4-E2B-it-assistant")'
        )

    def make_layer(self, name: str, index: int) -> Gemma4Block:
        config = self.config
        mlp: FeedForward = self.make_mlp(f"{name}.mlp", config.inner_size(index))
        mlp_norm: RMSNorm | NoNorm = self.make_norm(f"{name}.pre_feedforward_layernorm")
        if config.enable_moe_block:
            mlp, mlp_norm = MixtureAndMLP(name, config, mlp), NoNorm()
        return Gemma4Block(
            self.make_norm(f"{name}.input_layernorm"),
            self.make_attention(f"{name}.self_attn", index),
            mlp_norm,
            mlp,
            mixer_post_norm=self.make_norm(f"{name}.post_attention_layernorm"),
            mlp_post_norm=self.make_norm(f"{name}.post_feedforward_layernorm"),
            scalar=f"{name}.layer_scalar",
            injection=LayerInjection(name, config) if config.hidden_size_per_layer_input else None,
        )

    def make_attention(self, name: str, index: int) -> Attention:
        attention = self._attention(name, index)
        attention.causal = not (self.config.slides(index) or self.config.sees_beyond_windows)
        return attention

    def _attention(self, name: str, index: int) -> Attention:
        config, source = self.config, self.config.source(index)
        hidden, num_heads, (kv_heads, dim) = config.hidden_size, config.num_attention_heads, config.heads(index)
        positions = Positions(kv_heads, dim, dim, config.window(index))
        output = Linear({f"{name}.o_proj": hidden}, num_heads * dim, config.attention_bias)
        query_norm = self.make_query_norm(name, dim)
        if source is not None:
            query = Linear({f"{name}.q_proj": num_heads * dim}, hidden, config.attention_bias)
            rotary, scale = self.rotary(index), config.attention_scale
            return SharedAttention(query, output, num_heads, positions, Shares(source), rotary, query_norm, scale)
        are_keys = config.values_are_keys(index)
        rows = [num_heads * dim, kv_heads * dim] + ([] if are_keys else [kv_heads * dim])
        return Attention(
            Linear(parts(name, self.qkv_names[: len(rows)], rows), hidden, config.attention_bias),
            output,
            num_heads,
            positions,
            self.rotary(index),
            query_norm,
            HeadNorm(f"{name}.k_norm", dim, config.rms_norm_eps),
            config.attention_scale,
            value_norm=HeadUnitNorm(dim, config.rms_norm_eps),
            keys_are_values=are_keys,
        )

    def make_query_norm(self, name: str, dim: int) -> HeadNorm:
        return HeadNorm(f"{name}.q_norm", dim, self.config.rms_norm_eps)

    @property
    def embedding_scale(self) -> float:
        return rounded_root(self.config.hidden_size, self.dtype)


def rounded_root(size: int, dtype: torch.dtype) -> float:
    """The factor of embeddings of this width: its square root, rounded to the weights' dtype, as `transformers`
    does."""
    return torch.tensor(size**0.5).to(dtype).item()


@dataclass(frozen=True, eq=False)
class FirstLayers:
    """The layers that keep keys and values."""

    model: Gemma4ForConditionalGeneration

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        """Returns `[T, hidden]`. With towers, the embeddings follow, `[T, 2 * hidden]`: they have the rows of media,
        which the tail is not given."""
        model = self.model
        embeddings = model.embed(ops, batch)
        layers = range(len(model.layers) - model.num_tail_layers)
        x = model.run_layers(ops, embeddings, embeddings, angles, batch, layers)
        return ops.concatenate(x, embeddings) if model.towers and model.layer_inputs else x


@dataclass(frozen=True, eq=False)
class TailLayers:
    """The layers that share keys and values, and the head."""

    model: Gemma4ForConditionalGeneration

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        """Returns the logits of outputs of `FirstLayers`, which are the given rows."""
        model = self.model
        tail = range(len(model.layers) - model.num_tail_layers, len(model.layers))
        rows, size = batch.given.rows, model.config.hidden_size
        x = embeddings = ops.given_rows(rows[:, :size])
        if model.layer_inputs:
            embeddings = ops.given_rows(rows[:, size : 2 * size]) if model.towers else model.embed(ops, batch)
        x = model.run_layers(ops, x, embeddings, angles, batch, tail)
        return model.logits(ops, model.last_rows(ops, batch, x))


class Gemma4UnifiedForConditionalGeneration(Gemma4ForConditionalGeneration):
    """Gemma 4 12B with images and sound; `Gemma4UnifiedForCausalLM` is the same model without them."""

    Config = Gemma4UnifiedConfig
    Tower: ClassVar[type[Tower]] = Gemma4UnifiedTower
    AudioTower: ClassVar[type[Tower]] = Gemma4UnifiedAudioTower
    text_prefixes: ClassVar[dict[str, str]] = TEXT_PREFIXES | {
        "model.vision_embedder.": "embed_vision.",
        "vision_embedder.": "embed_vision.",
        "model.embed_vision.embedding_projection.": "embed_vision.multimodal_embedder.embedding_projection.",
        "embed_vision.embedding_projection.": "embed_vision.multimodal_embedder.embedding_projection.",
        "model.embed_vision.": "embed_vision.",
        "model.embed_audio.": "embed_audio.",
    }
