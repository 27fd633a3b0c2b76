"""Families close to DeepSeek-V3: A.X K1, Sarvam 105B, and DeepSeek-V3.2 and GLM-5 for short texts. These two choose the
positions that a token sees. Up to `index_topk` of them it sees all, as DeepSeek-V3 does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Block, MixtureOfExperts, RopeConfig, Vectors
from pace.llm.models.families.deepseek_v3 import DeepseekV3Config, DeepseekV3ForCausalLM
from pace.llm.models.families.mixture_config import ListedMixturesConfig
from pace.llm.models.layer_types import layer_types
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, number, token_ids
from pace.ops.experts import MAX_EXPERTS


@dataclass(frozen=True, kw_only=True)
class ListedLatentConfig(ListedMixturesConfig, DeepseekV3Config):
    """A DeepSeek-V3 whose config may list the layers with experts."""

    num_attention_heads: int = count(64)

    @property
    def num_dense(self) -> int:
        return self.first_k_dense_replace


@dataclass(frozen=True, kw_only=True)
class AXK1Config(ListedLatentConfig):
    vocab_size: int = count(163840)
    num_experts: int = count(192, MAX_EXPERTS)
    first_k_dense_replace: int = count(1, MAX_LAYERS, minimum=0)
    max_position_embeddings: int = count(32768, MAX_POSITIONS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(163691)
    eos_token_id: int | tuple[int, ...] | None = token_ids(163691)


class AXK1ForCausalLM(DeepseekV3ForCausalLM):
    """The outputs of mixtures are normalised. Published checkpoints have no bias for the choice of experts."""

    Config = AXK1Config
    other_names: ClassVar[dict[str, str]] = {r"(layers\.\d+)\.post_mlp_layernorm\.": r"\1.mlp.post_mlp_layernorm."}

    def make_layer(self, name: str, index: int) -> Block:
        block = super().make_layer(name, index)
        if self.config.has_experts(index):
            block.mlp_post_norm = self.make_norm(f"{name}.mlp.post_mlp_layernorm")
        return block

    def ignored(self) -> Iterator[str]:
        yield from super().ignored()
        for layer, block in enumerate(self.layers):
            if not isinstance(block.mlp, MixtureOfExperts):
                yield rf"model\.layers\.{layer}\.mlp\.post_mlp_layernorm\..*"

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        super().choose(tensors)
        for block in self.layers:
            if isinstance(block.mlp, MixtureOfExperts) and not block.mlp.choice_bias.targets().keys() <= tensors.keys():
                block.mlp.choice_bias = Vectors({})


@dataclass(frozen=True, kw_only=True)
class SarvamMLAConfig(DeepseekV3Config):
    vocab_size: int = count(262144)
    hidden_size: int = count(4096)
    intermediate_size: int = count(16384)
    num_hidden_layers: int = count(32, MAX_LAYERS)
    num_attention_heads: int = count(64)
    num_experts: int = count(128, MAX_EXPERTS)
    q_lora_rank: int | None = count(None, optional=True)
    n_group: int = count(1, MAX_EXPERTS)
    topk_group: int = count(1, MAX_EXPERTS)
    first_k_dense_replace: int = count(1, MAX_LAYERS, minimum=0)
    num_nextn_predict_layers: int = count(0, MAX_LAYERS, minimum=0)

    aliases: ClassVar[dict[str, str]] = DeepseekV3Config.aliases | {"num_shared_experts": "n_shared_experts"}
    also_read: ClassVar[frozenset[str]] = DeepseekV3Config.also_read | {"q_head_dim"}

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> RopeConfig:
        """`deepseek_yarn` is another name for yarn."""
        scaling = fields.get("rope_scaling")
        if isinstance(scaling, dict) and "deepseek_yarn" in (scaling.get("type"), scaling.get("rope_type")):
            kept = {name: value for name, value in scaling.items() if name != "type"}
            fields = fields | {"rope_scaling": kept | {"rope_type": "yarn"}}
        return super().read_rope(fields, head_dim)


class SarvamMLAForCausalLM(DeepseekV3ForCausalLM):
    Config = SarvamMLAConfig
    saved_as = "DeepseekV3ForCausalLM"


@dataclass(frozen=True, kw_only=True)
class DeepseekV32Config(ListedLatentConfig):
    num_attention_heads: int = count(128)
    max_position_embeddings: int = count(163840, MAX_POSITIONS)
    index_topk: int = count(2048, MAX_POSITIONS)
    """Number of positions that a token sees, and the maximum length of a sequence here."""
    layer_types: tuple[str, ...] | None = layer_types(("indexed_attention",))

    also_read: ClassVar[frozenset[str]] = DeepseekV3Config.also_read.union(
        """index_head_dim index_n_heads index_skip_topk_offset index_topk_freq index_topk_pattern
        indexer_rope_interleave indexer_types""".split()
    )

    @property
    def rotates_neighbours(self) -> bool:
        """True: transformers does not read `rope_interleave` here."""
        return True

    @property
    def max_length(self) -> int:
        return min(self.index_topk, super().max_length)

    @property
    def length_field(self) -> str:
        return "index_topk" if self.index_topk < super().max_length else super().length_field


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    Config = DeepseekV32Config
    ignored_tensors = (*DeepseekV3ForCausalLM.ignored_tensors, r".*\.self_attn\.indexer\..*")


@dataclass(frozen=True, kw_only=True)
class GlmMoeDsaConfig(DeepseekV32Config):
    vocab_size: int = count(154880)
    hidden_size: int = count(6144)
    intermediate_size: int = count(12288)
    num_hidden_layers: int = count(78, MAX_LAYERS)
    num_attention_heads: int = count(64)
    q_lora_rank: int | None = count(2048, optional=True)
    qk_nope_head_dim: int = count(192)
    v_head_dim: int = count(256)
    n_group: int = count(1, MAX_EXPERTS)
    topk_group: int = count(1, MAX_EXPERTS)
    max_position_embeddings: int = count(202752, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5. Layers may share the positions that an earlier one chose."""

    Config = GlmMoeDsaConfig
