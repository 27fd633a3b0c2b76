"""Falcon-H1: attention and Mamba-2 in parallel in every layer, and factors for nearly everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.layers import Block, Gate, GatedNorm, Mamba, ParallelMixers, ScaledMLP, ScaledVectors
from pace.llm.models.families.bamba import BambaForCausalLM
from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.families.mamba_config import MambaConfig, make_mamba
from pace.llm.models.model_config import MAX_POSITIONS, count, declared, flag, number, read_number, token_ids

LEAST, MOST = 1e-9, 1e9
"""Range of a factor."""


def factor() -> Any:
    return number(1.0, LEAST, MOST)


def factors(length: int) -> Any:
    """A list of factors; null for ones."""
    ones = (1.0,) * length

    def read(value: Any) -> tuple[float, ...]:
        if value is None:
            return ones
        if not isinstance(value, list) or len(value) != length:
            raise ValueError(f"a list of {length} numbers, or null")
        return tuple(read_number(item, LEAST, MOST) for item in value)

    return declared(ones, read)


@dataclass(frozen=True, kw_only=True)
class FalconH1Config(MambaConfig, LlamaConfig):
    vocab_size: int = count(128000)
    intermediate_size: int = count(14336)
    num_key_value_heads: int | None = count(8, optional=True)
    max_position_embeddings: int = count(8192, MAX_POSITIONS)
    rms_norm_eps: float = number(1e-5, 0.0, 1.0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(0)
    mamba_d_ssm: int | None = count(1024, optional=True)
    """Elements of all heads of Mamba; None for `mamba_expand * hidden_size`."""
    mamba_rms_norm: bool = flag(False)
    mamba_norm_before_gate: bool = flag(True)

    embedding_multiplier: float = factor()
    lm_head_multiplier: float = factor()
    key_multiplier: float = factor()
    attention_in_multiplier: float = factor()
    attention_out_multiplier: float = factor()
    ssm_in_multiplier: float = factor()
    ssm_out_multiplier: float = factor()
    ssm_multipliers: tuple[float, ...] = factors(5)
    """Factors of the columns z, x, B, C and dt."""
    mlp_multipliers: tuple[float, ...] = factors(2)
    """Factors of the gate and of the output."""

    only_here: ClassVar[dict[str, tuple]] = {
        "attention_bias": (False,),
        "attn_layer_indices": (None,),
        "mamba_proj_bias": (False,),
        "mamba_use_mlp": (True,),
        "mlp_bias": (False,),
        "projectors_bias": (False,),
    }
    also_read: ClassVar[frozenset[str]] = LlamaConfig.also_read.union(
        """mamba_chunk_size mlp_expansion_factor num_logits_to_keep time_step_floor time_step_max time_step_min
        time_step_rank""".split()
    )

    @property
    def mamba_inner(self) -> int:
        return self.mamba_d_ssm or super().mamba_inner

    @property
    def embedding_scale(self) -> float:
        return self.embedding_multiplier

    @property
    def logits_scale(self) -> float:
        return self.lm_head_multiplier

    @property
    def attention_scale(self) -> float:
        """Includes the factors of queries and keys, which are not biased."""
        return self.head_dim**-0.5 * self.attention_in_multiplier**2 * self.key_multiplier


class FalconH1ForCausalLM(LlamaForCausalLM):
    Config = FalconH1Config
    other_names = BambaForCausalLM.other_names

    def make_layer(self, name: str, index: int) -> Block:
        config, block = self.config, super().make_layer(name, index)
        of_gate, of_output = config.mlp_multipliers
        # The factor of the gate is in the norm. It reaches up, too, and is taken from the output.
        block.mlp_norm.weight = ScaledVectors(block.mlp_norm.weight.lengths, [(config.hidden_size, of_gate)])
        block.mlp = ScaledMLP(block.mlp.gate_up, block.mlp.down, config.hidden_act, of_output / of_gate)
        return block

    def make_mixer(self, name: str, index: int) -> ParallelMixers:
        config = self.config
        return ParallelMixers(
            self.make_attention(f"{name}.self_attn", index),
            self.make_mamba(f"{name}.mamba"),
            config.attention_in_multiplier * config.attention_out_multiplier,
            config.ssm_out_multiplier,
        )

    def make_mamba(self, name: str) -> Mamba:
        """Makes a layer with the factors of x, B and C in the weights of the convolution."""
        config, form = self.config, self.config.mamba
        norm = Gate()
        if config.mamba_rms_norm:
            first = config.mamba_norm_before_gate
            norm = GatedNorm(f"{name}.norm", form.inner, form.eps, form.groups, norm_first=first)
        mamba = make_mamba(name, form, norm)
        z, x, b, c, dt = (multiplier * config.ssm_in_multiplier for multiplier in config.ssm_multipliers)
        mamba.gate_scale, mamba.step_scale = z, dt
        keys, weight = form.groups * form.state_dim, mamba.convolution.weight
        factors = [(rows * form.kernel, factor) for rows, factor in ((form.inner, x), (keys, b), (keys, c))]
        mamba.convolution.weight = ScaledVectors(weight.lengths, factors, weight.sources)
        return mamba
