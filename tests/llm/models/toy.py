"""A model whose layers differ in all properties in which layers may differ, and random weights for it."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from pace.batch import ForwardBatch, LayerBlocks, Positions
from pace.llm.layers import (
    Attention,
    Block,
    Embedding,
    GatedLinear,
    GatedMLP,
    HeadNorm,
    Layer,
    LayerNorm,
    Linear,
    NoNorm,
    PlainMLP,
    RMSNorm,
    RopeConfig,
    Rotary,
)
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model_config import ModelConfig
from tests.support import TensorDict

HIDDEN = 24
CONFIG = ModelConfig(vocab_size=50, max_position_embeddings=256)


class TokenMixer(Layer):
    """A mixer that reads only its own position, and has no cache."""

    cache = None

    def __init__(self, name: str):
        self.product = Linear({f"{name}.product": HIDDEN}, HIDDEN, bias=True)

    @property
    def readers(self) -> list[Linear]:
        return [self.product]

    def __call__(
        self,
        ops: ModuleType,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: LayerBlocks,
        residual: Tensor | None = None,
    ) -> Tensor:
        assert kv is None
        return self.product(ops, x, "gelu", residual)


class ToyForCausalLM(BaseModelForCausalLM):
    """Five layers with different heads, key and value widths, windows and scales. One layer has no cache."""

    def __init__(self, dtype: torch.dtype, ops: ModuleType):
        super().__init__(CONFIG, dtype, ops)
        self.rotaries = (Rotary(RopeConfig("default", 100.0, 8, CONFIG.max_position_embeddings)),)
        self.embedding = Embedding(self.embedding_name, CONFIG.vocab_size, HIDDEN)
        names = [f"model.layers.{index}" for index in range(5)]
        self.layers = [
            self.block(names[0], Positions(2, 12, 12, window=7), 4),
            Block(RMSNorm(f"{names[1]}.norm", HIDDEN, 1e-5), TokenMixer(names[1]), NoNorm(), self.mlp(names[1])),
            self.block(names[2], Positions(3, 20, 33), 6, scale=0.3, softcap=5.0, branch_scale=0.5, head_norm=True),
            self.block(names[3], Positions(1, 40, 9, window=16), 2, parallel=True),
            self.block(names[4], Positions(4, 16, 16), 4, post_norms=True),
        ]
        self.final_norm = LayerNorm("model.norm", HIDDEN, 1e-5)
        self.lm_head = self.make_head(HIDDEN)

    def mlp(self, name: str) -> PlainMLP:
        return PlainMLP(Linear({f"{name}.up": 40}, HIDDEN), Linear({f"{name}.down": HIDDEN}, 40), "relu")

    def block(
        self,
        name: str,
        cache: Positions,
        heads: int,
        scale: float | None = None,
        softcap: float | None = None,
        head_norm: bool = False,
        post_norms: bool = False,
        **options,
    ) -> Block:
        rows = {"q": heads * cache.key_dim, "k": cache.kv_heads * cache.key_dim, "v": cache.kv_heads * cache.value_dim}
        attention = Attention(
            Linear({f"{name}.{part}": count for part, count in rows.items()}, HIDDEN, bias=True),
            Linear({f"{name}.o": HIDDEN}, heads * cache.value_dim),
            heads,
            cache,
            self.rotaries[0],
            *(HeadNorm(f"{name}.{part}_norm", cache.key_dim, 1e-5) for part in "qk" if head_norm),
            scale=scale,
            softcap=softcap,
        )
        gated = GatedMLP(
            GatedLinear({f"{name}.gate": 32, f"{name}.up": 32}, HIDDEN), Linear({f"{name}.down": HIDDEN}, 32), "silu"
        )
        norms = [RMSNorm(f"{name}.norm{i}", HIDDEN, 1e-5) for i in range(4)]
        if post_norms:
            options |= {"mixer_post_norm": norms[2], "mlp_post_norm": norms[3]}
        return Block(norms[0], attention, norms[1], gated, **options)


def random_state(model: BaseModelForCausalLM) -> dict[str, Tensor]:
    """Returns random numbers, exact in bfloat16, for every tensor of the model."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, [target, *_] in model.targets().items():
        values = torch.randn(target.shape, generator=generator)
        values = values * 1.5 / target.shape[-1] ** 0.5 if len(target.shape) > 1 else 1 + 0.3 * values
        state[name] = values.bfloat16().float()
    return state


def load_toy(dtype: torch.dtype, ops: ModuleType) -> ToyForCausalLM:
    model = ToyForCausalLM(dtype, ops)
    model.load_weights(TensorDict(random_state(model)))
    return model
