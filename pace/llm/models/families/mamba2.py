"""Mamba-2 without attention (Codestral Mamba): a sequence has a state, and no keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from pace.llm.layers import Block, Embedding, RMSNorm
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.families.mamba_config import MambaForm, make_mamba, step_limits
from pace.llm.models.model_config import (
    MAX_KERNEL,
    MAX_LAYERS,
    MAX_POSITIONS,
    ModelConfig,
    check_divides,
    count,
    flag,
    number,
    token_ids,
)
from pace.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(ModelConfig):
    vocab_size: int = count(32768)
    hidden_size: int = count(4096)
    num_hidden_layers: int = count(64, MAX_LAYERS)
    num_heads: int = count(128)
    head_dim: int = count(64)
    state_size: int = count(128)
    n_groups: int = count(8)
    expand: int = count(2)
    conv_kernel: int = count(4, MAX_KERNEL)
    use_bias: bool = flag(False)
    use_conv_bias: bool = flag(True)
    layer_norm_epsilon: float = number(1e-5, 0.0, 1.0)
    time_step_limit: tuple[float, float] = step_limits()
    max_position_embeddings: int = count(2**20, MAX_POSITIONS)
    """Bounds the sequences of the engine; a state has no limit of its own."""
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    eos_token_id: int | tuple[int, ...] | None = token_ids(2)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)

    only_here: ClassVar[dict[str, tuple]] = {"hidden_act": ("silu", "swish"), "rms_norm": (True,)}
    without_effect: ClassVar[dict[str, tuple]] = {
        "norm_before_gate": (True, False),
        "residual_in_fp32": (True, False),
        "rescale_prenorm_residual": (True, False),
    }
    also_read: ClassVar[frozenset[str]] = frozenset(
        """chunk_size intermediate_size time_step_floor time_step_init_scheme time_step_max time_step_min time_step_rank
        time_step_scale""".split()
    )

    @property
    def mamba(self) -> MambaForm:
        """The form of its layers."""
        return MambaForm(
            hidden=self.hidden_size,
            heads=self.num_heads,
            head_dim=self.head_dim,
            groups=self.n_groups,
            state_dim=self.state_size,
            kernel=self.conv_kernel,
            eps=self.layer_norm_epsilon,
            bias=self.use_bias,
            conv_bias=self.use_conv_bias,
            step_limits=self.time_step_limit,
        )

    def check(self) -> None:
        check_divides(self, "n_groups", "num_heads")
        if self.hidden_size * self.expand != self.mamba.inner:
            raise ValueError(
                f"config.json: num_heads * head_dim must be hidden_size * expand; got {self.num_heads} * "
                f"{self.head_dim} and {self.hidden_size} * {self.expand}"
            )


class Mamba2ForCausalLM(BaseModelForCausalLM):
    Config = Mamba2Config
    prefix = "backbone."
    embedding_name = "backbone.embeddings"
    other_names: ClassVar[dict[str, str]] = {r"^backbone\.embedding\.": "backbone.embeddings."}

    def __init__(self, config: Mamba2Config, dtype: torch.dtype, ops: Ops):
        super().__init__(config, dtype, ops)
        self.embedding = Embedding(self.embedding_name, config.vocab_size, config.hidden_size)
        self.layers = [self.make_layer(f"backbone.layers.{i}") for i in range(config.num_hidden_layers)]
        self.final_norm = RMSNorm("backbone.norm_f", config.hidden_size, config.layer_norm_epsilon)
        self.lm_head = self.make_head(config.hidden_size)

    def make_layer(self, name: str) -> Block:
        norm = RMSNorm(f"{name}.norm", self.config.hidden_size, self.config.layer_norm_epsilon)
        return Block.of_mixer(norm, make_mamba(f"{name}.mixer", self.config.mamba))
