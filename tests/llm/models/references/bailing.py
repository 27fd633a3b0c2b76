"""Ling 2 and Ring 2, following their `modeling_bailing_moe_v2.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.llm.models.references.reference import Reference


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Gate(nn.Module):
    def __init__(self, count: int, hidden: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, hidden))
        self.expert_bias = nn.Parameter(torch.empty(count))


class Mixture(nn.Module):
    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = Gate(config.num_experts, hidden)
        self.experts = nn.ModuleList(MLP(hidden, inner) for _ in range(config.num_experts))
        if config.num_shared_experts is not None:
            self.shared_experts = MLP(hidden, inner * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        """Each row is computed alone, for clarity."""
        rows = [self._routed(row) for row in x]
        y = torch.stack(rows)
        return y if self.config.num_shared_experts is None else y + self.shared_experts(x)

    def _routed(self, x: Tensor) -> Tensor:
        config = self.config
        wide = torch.promote_types(x.dtype, torch.float32)
        scores = torch.sigmoid(self.gate.weight.to(wide) @ x.to(wide))
        keys = (scores + self.gate.expert_bias).view(config.n_group, -1)
        kept = keys.topk(2, -1).values.sum(-1).topk(config.topk_group).indices
        outside = torch.ones(config.n_group, dtype=torch.bool)
        outside[kept] = False
        chosen = keys.masked_fill(outside[:, None], -torch.inf).flatten().topk(config.num_experts_per_tok).indices
        weights = scores[chosen]
        if config.num_experts_per_tok > 1:
            weights = weights / (weights.sum() + 1e-20)
        weights = weights * config.routed_scaling_factor
        return sum(weight * self.experts[expert](x) for weight, expert in zip(weights, chosen.tolist(), strict=True))


class BailingMoeV2(Reference):
    def __init__(self, fields: dict[str, Any]):
        super().__init__(
            {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "dtype": "float32"}
            | {"num_shared_experts": 1, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "rope_theta": 6e5}
            | {"routed_scaling_factor": 1.0, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-6, "use_qk_norm": True}
            | {"use_qkv_bias": False, "use_bias": False, "tie_word_embeddings": False, "head_dim": 128}
            | fields
        )
        config = self.config
        hidden = config.hidden_size
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, hidden)
        self.model.layers = nn.ModuleList(self._layer(index) for index in range(config.num_hidden_layers))
        self.model.norm = self._norm(hidden)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def _norm(self, size: int) -> nn.RMSNorm:
        return nn.RMSNorm(size, self.config.rms_norm_eps)

    def _layer(self, index: int) -> nn.Module:
        config, layer, attention = self.config, nn.Module(), nn.Module()
        hidden, dim, heads = config.hidden_size, config.head_dim, config.num_attention_heads
        rows = (heads + 2 * config.num_key_value_heads) * dim
        attention.query_key_value = nn.Linear(hidden, rows, bias=config.use_qkv_bias)
        attention.dense = nn.Linear(heads * dim, hidden, bias=config.use_bias)
        if config.use_qk_norm:
            attention.query_layernorm, attention.key_layernorm = self._norm(dim), self._norm(dim)
        layer.attention = attention
        layer.input_layernorm, layer.post_attention_layernorm = self._norm(hidden), self._norm(hidden)
        is_dense = index < config.first_k_dense_replace
        layer.mlp = MLP(hidden, config.intermediate_size) if is_dense else Mixture(config)
        return layer

    def logits(self, ids: Tensor) -> Tensor:
        x = self.model.word_embeddings(ids)
        for layer in self.model.layers:
            x = x + self._attend(layer.attention, layer.input_layernorm(x))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.lm_head(self.model.norm(x))

    def _attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        config = self.config
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        q, k, v = layer.query_key_value(x).unflatten(-1, (-1, config.head_dim)).split([heads, groups, groups], 1)
        if config.use_qk_norm:
            q, k = layer.query_layernorm(q), layer.key_layernorm(k)
        q, k, v = (part.transpose(0, 1) for part in (self._rotated(q), self._rotated(k), v))  # [heads, T, dim]
        k, v = (part.repeat_interleave(heads // groups, dim=0) for part in (k, v))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return layer.dense(context.transpose(0, 1).flatten(1))

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotates the first part of each head of `x [T, heads, dim]`, in pairs of elements of its two halves."""
        num = int(self.config.head_dim * self.config.partial_rotary_factor)
        frequencies = 1.0 / self.config.rope_theta ** (torch.arange(0, num, 2) / num)
        angles = torch.outer(torch.arange(len(x)).float(), frequencies)[:, None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split([num // 2, num // 2, x.shape[-1] - num], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
