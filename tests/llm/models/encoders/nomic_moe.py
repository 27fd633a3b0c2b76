"""A tiny random nomic-embed-text-v2-moe in the spelling of the Hub, and its forward pass in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

HIDDEN, INNER, HEADS, LAYERS, EXPERTS, TOP, THETA = 32, 48, 4, 4, 5, 2, 900.0
EPS = 1e-5
CONFIG = {
    "activation_function": "gelu", "architectures": ["NomicBertModel"], "attn_pdrop": 0.0, "causal": False,
    "dense_seq_output": True, "expert_choice_router": False, "ffn_div": 1, "fused_bias_fc": True,
    "fused_dropout_add_ln": True, "layer_norm_epsilon": EPS, "max_trained_positions": 2048, "mlp_fc1_bias": True,
    "mlp_fc2_bias": True, "model_type": "nomic_bert", "moe_every_n_layers": 2, "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False, "moe_resid_pdrop": 0.0, "moe_top_k": TOP, "n_embd": HIDDEN, "n_head": HEADS,
    "n_inner": INNER, "n_layer": LAYERS, "n_positions": 2048, "num_experts": EXPERTS, "num_shared_experts": 0,
    "pad_token_id": 1, "prenorm": False, "qkv_proj_bias": True, "rotary_emb_base": THETA, "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False, "rotary_emb_scale_base": None, "rotary_scaling_factor": None,
    "router_aux_loss_coef": 0.1, "type_vocab_size": 1, "use_rms_norm": None, "vocab_size": 99,
}  # fmt: skip


def random_tensors(bias: float = 1.0) -> dict[str, Tensor]:
    """`bias`: spread of the vectors after the experts."""
    torch.manual_seed(0)
    found = {
        "embeddings.word_embeddings.weight": torch.randn(99, HIDDEN),
        "embeddings.token_type_embeddings.weight": torch.randn(1, HIDDEN),
        "emb_ln.weight": 1 + 0.3 * torch.randn(HIDDEN),
        "emb_ln.bias": 0.3 * torch.randn(HIDDEN),
    }
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}"
        products = {"attn.Wqkv": (3 * HIDDEN, HIDDEN), "attn.out_proj": (HIDDEN, HIDDEN)}
        if layer % 2 == 0:
            products |= {"mlp.fc1": (INNER, HIDDEN), "mlp.fc2": (HIDDEN, INNER)}
        else:
            found[f"{name}.mlp.router.layer.weight"] = torch.randn(EXPERTS, HIDDEN)
            for part in ("w1", "w2"):
                found[f"{name}.mlp.experts.mlp.{part}"] = 0.3 * torch.randn(EXPERTS * INNER, HIDDEN)
            found[f"{name}.mlp.experts.bias"] = bias * torch.randn(HIDDEN)
        for product, shape in products.items():
            found |= {
                f"{name}.{product}.weight": 0.3 * torch.randn(shape),
                f"{name}.{product}.bias": torch.randn(shape[0]),
            }
        for norm in ("norm1", "norm2"):
            found |= {
                f"{name}.{norm}.weight": 1 + 0.3 * torch.randn(HIDDEN),
                f"{name}.{norm}.bias": torch.randn(HIDDEN),
            }
    return found


def save_nomic_moe(folder: Path, tensors: dict[str, Tensor], **fields: object) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))


def rows(tensors: dict[str, Tensor], tokens: tuple[int, ...]) -> Tensor:
    """Returns the rows `[T, hidden]` of a text, in float64."""
    state = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (HIDDEN,), state[f"{name}.weight"], state[f"{name}.bias"], EPS)

    ids = torch.tensor(tokens)
    x = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][0]
    x = norm("emb_ln", x)
    for layer in range(LAYERS):
        name = f"encoder.layers.{layer}"
        x = norm(f"{name}.norm1", x + linear(f"{name}.attn.out_proj", attention(linear(f"{name}.attn.Wqkv", x))))
        if layer % 2 == 0:
            y = linear(f"{name}.mlp.fc2", functional.gelu(linear(f"{name}.mlp.fc1", x)))
        else:
            y = mixture(state, f"{name}.mlp", x)
        x = norm(f"{name}.norm2", x + y)
    return x


def attention(qkv: Tensor) -> Tensor:
    """Full attention with rotated halves. `qkv [T, 3 hidden]`: queries, keys and values one after the other."""
    count, dim = len(qkv), HIDDEN // HEADS
    angles = torch.arange(count)[:, None] / THETA ** (torch.arange(0, dim, 2).double() / dim)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    q, k, v = (part.view(count, HEADS, dim) for part in qkv.chunk(3, -1))
    found = functional.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (rotated(q), rotated(k), v)))
    return found.transpose(0, 1).flatten(1)


def mixture(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """The weights of the chosen experts are those of the softmax over all. The bias comes once, without a weight."""
    weights = functional.linear(x, state[f"{name}.router.layer.weight"]).softmax(-1)
    first, second = (state[f"{name}.experts.mlp.{part}"].view(EXPERTS, INNER, HIDDEN) for part in ("w1", "w2"))
    y = torch.zeros_like(x)
    for token, row in enumerate(weights):
        for weight, expert in zip(*row.topk(TOP)):
            y[token] += weight * (functional.gelu(first[expert] @ x[token]) @ second[expert])
    return y + state[f"{name}.experts.bias"]
