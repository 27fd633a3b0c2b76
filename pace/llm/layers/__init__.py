"""Layers that models are made of. Each declares its tensors by their names in the checkpoint, and computes through
`ops`."""

from pace.llm.layers.attention import Attention, SharedAttention, alibi_slopes
from pace.llm.layers.base import Layer, ScaledVectors, Vectors
from pace.llm.layers.block import Block, FeedForward, Mixer
from pace.llm.layers.convolution import Convolution, ShortConvolution
from pace.llm.layers.embedding import Embedding, FileEmbedding, LMHead, SplitLMHead, TiedLMHead
from pace.llm.layers.experts import (
    ExpertLinear,
    LatentMixture,
    MixtureOfExperts,
    RouterLinear,
    expert_stacks,
    fused,
    one_by_one,
    plain_expert_stacks,
    stacked,
)
from pace.llm.layers.latent_attention import LatentAttention, head_projections
from pace.llm.layers.linear import AddedVector, FloatLinear, GatedLinear, Linear, NormedLinear, WeightPlan
from pace.llm.layers.mamba import Gate, Mamba, ParallelMixers
from pace.llm.layers.mlp import GatedMLP, PlainMLP, ScaledMLP, XieluMLP
from pace.llm.layers.norm import (
    GatedNorm,
    HeadLayerNorm,
    HeadNorm,
    HeadUnitNorm,
    LayerNorm,
    LayerScale,
    NoHeadNorm,
    NoNorm,
    RMSNorm,
    SharedHeadLayerNorm,
    UnitNorm,
    WholeNorm,
)
from pace.llm.layers.recurrence import DeltaNet, Rates
from pace.llm.layers.rotary import NoRotary, RopeConfig, Rotary, Temperature
from pace.llm.layers.weight_target import RowRange, TensorSource, WeightTarget

__all__ = [
    "AddedVector",
    "Attention",
    "Block",
    "Convolution",
    "DeltaNet",
    "Embedding",
    "ExpertLinear",
    "FeedForward",
    "FileEmbedding",
    "FloatLinear",
    "Gate",
    "GatedLinear",
    "GatedMLP",
    "GatedNorm",
    "HeadLayerNorm",
    "HeadNorm",
    "HeadUnitNorm",
    "LMHead",
    "LatentAttention",
    "LatentMixture",
    "Layer",
    "LayerNorm",
    "LayerScale",
    "Linear",
    "Mamba",
    "Mixer",
    "MixtureOfExperts",
    "NoHeadNorm",
    "NoNorm",
    "NoRotary",
    "NormedLinear",
    "ParallelMixers",
    "PlainMLP",
    "RMSNorm",
    "Rates",
    "RopeConfig",
    "Rotary",
    "RouterLinear",
    "RowRange",
    "ScaledMLP",
    "ScaledVectors",
    "SharedAttention",
    "SharedHeadLayerNorm",
    "ShortConvolution",
    "SplitLMHead",
    "Temperature",
    "TensorSource",
    "TiedLMHead",
    "UnitNorm",
    "Vectors",
    "WeightPlan",
    "WeightTarget",
    "WholeNorm",
    "XieluMLP",
    "alibi_slopes",
    "expert_stacks",
    "fused",
    "head_projections",
    "one_by_one",
    "plain_expert_stacks",
    "stacked",
]
