"""Reference models of families without a class in transformers, written from their published code or description."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.llm.models.references.bailing import BailingMoeV2
from tests.llm.models.references.reference import Reference


class ChatGLM(Reference):
    """ChatGLM2, ChatGLM3 and GLM-4-9B, following their `modeling_chatglm.py`, with angles in float32."""

    NAMES: ClassVar[dict[str, str]] = {
        "vocab_size": "padded_vocab_size",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "max_position_embeddings": "seq_length",
    }
    """Maps the field names of other families to ChatGLM's."""

    def __init__(self, fields: dict[str, Any]):
        given = {self.NAMES.get(name, name): value for name, value in fields.items()}
        super().__init__(
            {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "dtype": "float32"}
            | {"add_bias_linear": False, "rope_ratio": 1, "original_rope": True, "layernorm_epsilon": 1e-5}
            | given
        )
        config = self.config
        self.transformer = nn.Module()
        self.transformer.embedding = nn.Module()
        self.transformer.embedding.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.transformer.encoder = nn.Module()
        self.transformer.encoder.layers = nn.ModuleList(self._layer() for _ in range(config.num_layers))
        self.transformer.encoder.final_layernorm = self._norm()
        self.transformer.output_layer = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)

    def _norm(self) -> nn.RMSNorm:
        return nn.RMSNorm(self.config.hidden_size, self.config.layernorm_epsilon)

    def _layer(self) -> nn.Module:
        config, layer = self.config, nn.Module()
        hidden, inner, bias = config.hidden_size, config.ffn_hidden_size, config.add_bias_linear
        queries, groups = config.num_attention_heads * config.kv_channels, config.multi_query_group_num
        layer.input_layernorm, layer.post_attention_layernorm = self._norm(), self._norm()
        layer.self_attention = nn.Module()
        rows = queries + 2 * groups * config.kv_channels
        layer.self_attention.query_key_value = nn.Linear(hidden, rows, bias=bias or config.add_qkv_bias)
        layer.self_attention.dense = nn.Linear(queries, hidden, bias=bias)
        layer.mlp = nn.Module()
        layer.mlp.dense_h_to_4h = nn.Linear(hidden, 2 * inner, bias=bias)
        layer.mlp.dense_4h_to_h = nn.Linear(inner, hidden, bias=bias)
        return layer

    def logits(self, ids: Tensor) -> Tensor:
        x = self.transformer.embedding.word_embeddings(ids)
        for layer in self.transformer.encoder.layers:
            x = x + self._attend(layer.self_attention, layer.input_layernorm(x))
            gate, up = layer.mlp.dense_h_to_4h(layer.post_attention_layernorm(x)).chunk(2, dim=-1)
            x = x + layer.mlp.dense_4h_to_h(functional.silu(gate) * up)
        return self.transformer.output_layer(self.transformer.encoder.final_layernorm(x))

    def _attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        config, dim = self.config, self.config.kv_channels
        heads, groups = config.num_attention_heads, config.multi_query_group_num
        q, k, v = layer.query_key_value(x).split([heads * dim, groups * dim, groups * dim], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, dim)).transpose(0, 1) for part in (q, k, v))  # [heads, T, dim]
        q, k = self._rotated(q), self._rotated(k)
        k, v = (part.repeat_interleave(heads // groups, dim=0) for part in (k, v))
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return layer.dense(context.transpose(0, 1).flatten(1))

    def _rotated(self, x: Tensor) -> Tensor:
        """Rotates the first half of each head. Pairs are neighbours, or without `original_rope` elements of its two
        halves."""
        rotated, rest = x.chunk(2, dim=-1)
        num = rotated.shape[-1]
        frequencies = 1.0 / (10000 * self.config.rope_ratio) ** (torch.arange(0, num, 2) / num)
        angles = torch.outer(torch.arange(x.shape[1]).float(), frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        pairs = rotated.unflatten(-1, (-1, 2) if self.config.original_rope else (2, -1))
        axis = -1 if self.config.original_rope else -2
        a, b = pairs.unbind(axis)
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=axis)
        return torch.cat([turned.flatten(-2), rest], dim=-1)


class MiniCPM(Reference):
    """MiniCPM 1 and 2, following their `modeling_minicpm.py`, with angles in float32."""

    def __init__(self, fields: dict[str, Any]):
        super().__init__(
            {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "dtype": "float32"}
            | {"tie_word_embeddings": True, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
            | fields
        )
        config = self.config
        hidden, inner, dim = (
            config.hidden_size,
            config.intermediate_size,
            config.hidden_size // config.num_attention_heads,
        )
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(config.num_hidden_layers))
        self.model.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        for layer in self.model.layers:
            layer.self_attn, layer.mlp = nn.Module(), nn.Module()
            for name, heads in (
                ("q", config.num_attention_heads),
                ("k", config.num_key_value_heads),
                ("v", config.num_key_value_heads),
            ):
                setattr(layer.self_attn, f"{name}_proj", nn.Linear(hidden, heads * dim, bias=False))
            layer.self_attn.o_proj = nn.Linear(hidden, hidden, bias=False)
            layer.mlp.gate_proj, layer.mlp.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
            layer.mlp.down_proj = nn.Linear(inner, hidden, bias=False)
            layer.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
            layer.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def logits(self, ids: Tensor) -> Tensor:
        config = self.config
        branch = config.scale_depth / config.num_hidden_layers**0.5
        x = self.model.embed_tokens(ids) * config.scale_emb
        for layer in self.model.layers:
            x = x + self._attend(layer.self_attn, layer.input_layernorm(x)) * branch
            mlp, y = layer.mlp, layer.post_attention_layernorm(x)
            x = x + mlp.down_proj(functional.silu(mlp.gate_proj(y)) * mlp.up_proj(y)) * branch
        x = self.model.norm(x) / (config.hidden_size / config.dim_model_base)
        return functional.linear(x, self.model.embed_tokens.weight) if config.tie_word_embeddings else self.lm_head(x)

    def _attend(self, layer: nn.Module, x: Tensor) -> Tensor:
        config = self.config
        dim, group = (
            config.hidden_size // config.num_attention_heads,
            config.num_attention_heads // config.num_key_value_heads,
        )
        q, k, v = (
            project(x).unflatten(-1, (-1, dim)).transpose(0, 1)
            for project in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        frequencies = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(len(x)).float(), frequencies).repeat(1, 2)

        def rotated(heads: Tensor) -> Tensor:
            first, second = heads.float().chunk(2, dim=-1)
            return (heads.float() * angles.cos() + torch.cat([-second, first], -1) * angles.sin()).to(x.dtype)

        k, v = (part.repeat_interleave(group, dim=0) for part in (rotated(k), v))
        context = functional.scaled_dot_product_attention(rotated(q), k, v, is_causal=True)
        return layer.o_proj(context.transpose(0, 1).flatten(1))


MODELS: dict[str, type[Reference]] = {"bailing_moe_v2": BailingMoeV2, "chatglm": ChatGLM, "minicpm": MiniCPM}
"""Reference classes by model_type."""
