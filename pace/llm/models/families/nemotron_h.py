"""Nemotron-H and Nemotron 3: each layer is one of Mamba-2, attention without positions, an MLP without a gate, or a
mixture of such MLPs."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import (
    Block,
    LatentMixture,
    Linear,
    MixtureOfExperts,
    PlainMLP,
    RouterLinear,
    Vectors,
    plain_expert_stacks,
)
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mamba_config import (
    MambaForm,
    hybrid_layer_types,
    make_mamba,
    step_limits,
)
from pace.llm.models.families.mixture_config import BiasedChoiceConfig
from pace.llm.models.layer_types import FULL, LINEAR
from pace.llm.models.model_config import (
    MAX_HEAD_DIM,
    MAX_KERNEL,
    MAX_LAYERS,
    MAX_POSITIONS,
    activation,
    check_divides,
    count,
    declared,
    flag,
    number,
    token_ids,
)
from pace.ops.experts import MAX_EXPERTS, Router

logger = logging.getLogger("pace")

MLP, MIXTURE = "mlp", "moe"
LETTERS = {"M": LINEAR, "*": FULL, "-": MLP, "E": MIXTURE}
"""Letters of `hybrid_override_pattern`, one for each layer."""


def letters() -> Any:
    """A string of `LETTERS`, or null."""

    def read(value: Any) -> tuple[str, ...] | None:
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise ValueError("a string with a letter for each layer, or null")
        if other := sorted(set(value) - LETTERS.keys()):
            raise NotImplementedError(f"the letter {other[0]!r} is not implemented; implemented: {', '.join(LETTERS)}")
        return tuple(LETTERS[letter] for letter in value)

    return declared(None, read)


@dataclass(frozen=True, kw_only=True)
class NemotronHConfig(BiasedChoiceConfig, LlamaConfig):
    vocab_size: int = count(131072)
    intermediate_size: int = count(21504)
    num_hidden_layers: int | None = count(None, MAX_LAYERS, optional=True)
    """The number of kinds of layers."""
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int = count(128, MAX_HEAD_DIM)
    max_position_embeddings: int = count(4096, MAX_POSITIONS)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    hidden_act: str = activation("relu2")
    layer_norm_epsilon: float = number(1e-5, 0.0, 1.0)
    layer_types: tuple[str, ...] | None = hybrid_layer_types(LINEAR, FULL, MLP, MIXTURE)
    hybrid_override_pattern: tuple[str, ...] | None = letters()
    """The kinds of layers, if `layer_types` is not given."""

    mamba_num_heads: int = count(128)
    mamba_head_dim: int = count(64)
    n_groups: int = count(8)
    ssm_state_size: int = count(128)
    conv_kernel: int = count(4, MAX_KERNEL)
    use_bias: bool = flag(False)
    """True if the products of Mamba have biases."""
    use_conv_bias: bool = flag(True)
    time_step_limit: tuple[float, float] = step_limits()

    num_experts: int = count(8, MAX_EXPERTS)
    moe_intermediate_size: int = count(7688)
    moe_shared_expert_intermediate_size: int = count(7688)
    moe_latent_size: int | None = count(None, optional=True)
    """Elements of the experts' inputs and outputs; None for those of a layer."""

    aliases: ClassVar[dict[str, str]] = {
        "attention_head_dim": "head_dim",
        "layers_block_type": "layer_types",
        "mlp_hidden_act": "hidden_act",
        "n_routed_experts": "num_experts",
        "num_local_experts": "num_experts",
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_dt_limit": "time_step_limit",
    }
    only_here: ClassVar[dict[str, tuple]] = {"mamba_hidden_act": ("silu", "swish")}
    without_effect: ClassVar[dict[str, tuple]] = {
        "attention_bias": (False,),
        "mamba_proj_bias": (False,),
        "mamba_ssm_cache_dtype": ("float32",),
        "moe_shared_expert_overlap": (True, False),
        "n_shared_experts": (1,),
        "norm_eps": (1e-5,),
        "partial_rotary_factor": (1.0,),
        "residual_in_fp32": (True, False),
        "rms_norm_eps": (1e-5,),
        "sliding_window": (None,),
        "use_mamba_kernels": (True, False),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read.union(
        """chunk_size expand mamba_chunk_size mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_expand
        mtp_hybrid_override_pattern mtp_layers_block_type num_logits_to_keep num_nextn_predict_layers
        rescale_prenorm_residual time_step_floor time_step_max time_step_min""".split()
    )
    ropes = ()

    def check(self) -> None:
        super().check()
        check_divides(self, "n_groups", "mamba_num_heads")
        pattern = self.hybrid_override_pattern
        if self.layer_types and pattern and self.layer_types != pattern:
            raise ValueError("config.json: hybrid_override_pattern contradicts layers_block_type")
        if not {LINEAR, FULL} & set(self.kinds):
            raise NotImplementedError(
                f"config.json: layers_block_type needs a layer that keeps something: {LINEAR} or {FULL}"
            )
        if self.num_hidden_layers not in (None, len(self.kinds)):
            logger.warning(
                "config.json: num_hidden_layers = %d is ignored, as transformers does for NemotronH: %d layers have "
                "a kind",
                self.num_hidden_layers,
                len(self.kinds),
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer."""
        return self.layer_types or self.hybrid_override_pattern or (LINEAR, MIXTURE, FULL, MLP)

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        return super().derived(fields) | {
            "layer_types": self.kinds,
            "hybrid_override_pattern": None,
            "num_hidden_layers": len(self.kinds),
            "rms_norm_eps": self.layer_norm_epsilon,
        }

    def read_rope(self, fields: dict[str, Any], head_dim: int) -> None:
        """Attention has no positions; the fields of a rotation have no effect."""

    @property
    def mamba(self) -> MambaForm:
        """The form of the Mamba-2 layers."""
        return MambaForm(
            hidden=self.hidden_size,
            heads=self.mamba_num_heads,
            head_dim=self.mamba_head_dim,
            groups=self.n_groups,
            state_dim=self.ssm_state_size,
            kernel=self.conv_kernel,
            eps=self.layer_norm_epsilon,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            step_limits=self.time_step_limit,
        )

    @property
    def router(self) -> Router | None:
        return super().router if MIXTURE in self.kinds else None


class NemotronHForCausalLM(LlamaForCausalLM):
    Config = NemotronHConfig
    text_prefixes: ClassVar[dict[str, str]] = {"backbone.": "model."}
    other_names: ClassVar[dict[str, str]] = {
        r"^model\.embeddings\.": "model.embed_tokens.",
        r"^model\.norm_f\.": "model.norm.",
    }
    # Layers that predict further tokens, which drafting could use.
    ignored_tensors: ClassVar[tuple[str, ...]] = (*LlamaForCausalLM.ignored_tensors, r"mtp\..*")

    def make_layer(self, name: str, index: int) -> Block:
        config, norm, mixer = self.config, self.make_norm(f"{name}.norm"), f"{name}.mixer"
        match config.layer_types[index]:
            case "linear_attention":
                return Block.of_mixer(norm, make_mamba(mixer, config.mamba))
            case "full_attention":
                return Block.of_mixer(norm, self.make_attention(mixer, index))
            case "mlp":
                return Block.of_feed_forward(norm, self.make_plain_mlp(mixer, config.intermediate_size))
            case _:
                return Block.of_feed_forward(norm, self.make_mixture(mixer))

    def make_plain_mlp(self, name: str, inner: int) -> PlainMLP:
        hidden, bias = self.config.hidden_size, self.config.mlp_bias
        return PlainMLP.named(f"{name}.up_proj", f"{name}.down_proj", hidden, inner, self.config.hidden_act, bias=bias)

    def make_mixture(self, name: str) -> MixtureOfExperts:
        config = self.config
        count, hidden, latent = config.num_experts, config.hidden_size, config.moe_latent_size
        gate = RouterLinear({f"{name}.gate": count}, hidden)
        stacks = plain_expert_stacks(f"{name}.experts", count, latent or hidden, config.moe_intermediate_size)
        options = {
            "choice_bias": Vectors({f"{name}.gate.e_score_correction_bias": count}),
            "shared": self.make_plain_mlp(f"{name}.shared_experts", config.moe_shared_expert_intermediate_size),
        }
        if latent is None:
            return MixtureOfExperts(gate, config.router, *stacks, config.hidden_act, **options)
        return LatentMixture(
            Linear({f"{name}.fc1_latent_proj": latent}, hidden, config.mlp_bias),
            Linear({f"{name}.fc2_latent_proj": hidden}, latent, config.mlp_bias),
            gate,
            config.router,
            *stacks,
            config.hidden_act,
            **options,
        )
