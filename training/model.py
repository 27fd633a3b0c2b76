"""A Llama in plain torch whose state dict has the names of the Hugging Face checkpoint."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Shape:
    vocab_size: int = 2048
    hidden_size: int = 256
    num_hidden_layers: int = 5
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 640
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


SHAPES = {"tiny": Shape(), "draft": Shape(hidden_size=128, num_hidden_layers=2, head_dim=32, intermediate_size=384)}


class Norm(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))
        self.eps = shape.rms_norm_eps

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, shape.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.head_dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = rotate(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(shape), Attention(shape)
        self.post_attention_layernorm, self.mlp = Norm(shape), MLP(shape)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """ids [B, T] -> logits [B, T, vocab]; the output matrix is the embedding."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.model.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.model.norm = Norm(shape)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 if "embed" in name else p.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)  # each layer begins as the identity
        frequencies = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_position_embeddings), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids):
        t = ids.shape[1]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, self.cos[:t], self.sin[:t])
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def config(self):
        """config.json of the checkpoint."""
        s = self.shape
        return dict(
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            vocab_size=s.vocab_size,
            hidden_size=s.hidden_size,
            intermediate_size=s.intermediate_size,
            num_hidden_layers=s.num_hidden_layers,
            num_attention_heads=s.num_attention_heads,
            num_key_value_heads=s.num_key_value_heads,
            head_dim=s.head_dim,
            hidden_act="silu",
            rms_norm_eps=s.rms_norm_eps,
            max_position_embeddings=s.max_position_embeddings,
            rope_parameters=dict(rope_type="default", rope_theta=s.rope_theta),
            attention_bias=False,
            mlp_bias=False,
            attention_dropout=0.0,
            tie_word_embeddings=True,
            initializer_range=0.02,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=[7, 2],
            use_cache=True,
            dtype="bfloat16",
        )
