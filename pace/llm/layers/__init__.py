"""The parts that models are made of. Each knows its tensors by their names in the checkpoint, and computes through
`ops`."""

from pace.llm.layers.attention import Attention
from pace.llm.layers.base import Layer, Slot
from pace.llm.layers.embedding import Embedding, LMHead, TiedLMHead
from pace.llm.layers.linear import GatedLinear, Linear, WeightPlan
from pace.llm.layers.mlp import GatedMLP, PlainMLP
from pace.llm.layers.norm import HeadNorm, LayerNorm, NoHeadNorm, NoNorm, RMSNorm
from pace.llm.layers.rotary import NoRotary, RopeConfig, Rotary

__all__ = [
    "Attention",
    "Embedding",
    "GatedLinear",
    "GatedMLP",
    "HeadNorm",
    "LMHead",
    "Layer",
    "LayerNorm",
    "Linear",
    "NoHeadNorm",
    "NoNorm",
    "NoRotary",
    "PlainMLP",
    "RMSNorm",
    "RopeConfig",
    "Rotary",
    "Slot",
    "TiedLMHead",
    "WeightPlan",
]
