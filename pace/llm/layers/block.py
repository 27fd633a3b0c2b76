"""A decoder layer: a mixer of positions and a feed-forward, each a branch of the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor

from pace.batch import ForwardBatch, LayerBlocks, LayerCache
from pace.llm.layers.base import Layer
from pace.llm.layers.linear import Linear
from pace.llm.layers.norm import LayerNorm, LayerScale, NoNorm, RMSNorm, UnitNorm
from pace.llm.layers.rotary import Angles
from pace.ops.protocol import ForwardOps

Norm = RMSNorm | LayerNorm | UnitNorm | NoNorm
PostNorm = Norm | LayerScale

MixerBlocks = LayerBlocks | tuple[LayerBlocks, ...]
"""The cache of a mixer, in the form of its `cache`."""


class Mixer(Protocol):
    """Protocol of a `Layer` that combines each position with those before it, such as attention."""

    cache: LayerCache | tuple[LayerCache, ...]
    """What it caches for each position; a tuple for a mixer that is several, each with a cache of its own."""

    @property
    def readers(self) -> list[Linear]:
        """All matrix products that read its input."""

    def __call__(
        self,
        ops: ForwardOps,
        x: Tensor,
        angles: Angles,
        batch: ForwardBatch,
        kv: MixerBlocks,
        residual: Tensor | None = None,
    ) -> Tensor: ...


class FeedForward(Protocol):
    """Layer that processes each position independently. A `Layer`."""

    @property
    def readers(self) -> list[Linear]: ...

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class NoMixer(Layer):
    """Null object for a block that is only a feed-forward: adds nothing."""

    cache: LayerCache = None
    readers: ClassVar[list[Linear]] = []

    def __call__(
        self, ops: ForwardOps, x: Tensor, angles: Angles, batch: ForwardBatch, kv: MixerBlocks, residual: Tensor
    ) -> Tensor:
        return residual


class NoFeedForward(Layer):
    """Null object for a block that is only a mixer: adds nothing."""

    readers: ClassVar[list[Linear]] = []

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor) -> Tensor:
        return residual


class Block(Layer):
    """`x + mixer(norm(x))`, then `x + mlp(norm(x))`, with these options:

    - `mixer_norm`, `mlp_norm`: norm of each branch's input. Either may be NoNorm.
    - `mixer_post_norm`, `mlp_post_norm`: norm of a branch's output, before it is added (Gemma 2, OLMo 2, GLM-4), or a
      `LayerScale` of it (InternVL).
    - `norms_sum`: the post norms apply to the sum `x + branch` instead (the OPT of 350m, BERT).
    - `parallel`: both branches read the layer's input x (GPT-NeoX). If `mlp_norm` is None, both read the same
      normalised x (Phi, GPT-J, Cohere).
    - `branch_scale`: factor of a branch's output, before it is added (Granite, MiniCPM).
    - `adds_to_norms`: a branch is added to the norm of x, in place of x (an option of BLOOM)."""

    def __init__(
        self,
        mixer_norm: Norm,
        mixer: Mixer,
        mlp_norm: Norm | None,
        mlp: FeedForward,
        *,
        mixer_post_norm: PostNorm | None = None,
        mlp_post_norm: PostNorm | None = None,
        norms_sum: bool = False,
        parallel: bool = False,
        branch_scale: float = 1.0,
        adds_to_norms: bool = False,
    ):
        if mlp_norm is None and not parallel:
            raise ValueError("a feed-forward after the mixer reads a norm of its own, or NoNorm")
        if norms_sum and (parallel or branch_scale != 1.0):
            raise ValueError("norms of the sum need branches in sequence, added without a scale")
        if adds_to_norms and parallel:
            raise ValueError("branches that are added to norms must run in sequence")
        self.mixer_norm = mixer_norm
        self.mixer = mixer
        self.mixer_post_norm = mixer_post_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_post_norm = mlp_post_norm
        self.norms_sum = norms_sum
        self.parallel = parallel
        self.branch_scale = branch_scale
        self.adds_to_norms = adds_to_norms

    @property
    def cache(self) -> LayerCache | tuple[LayerCache, ...]:
        """What the layer caches for each position."""
        return self.mixer.cache

    @classmethod
    def of_mixer(cls, norm: Norm, mixer: Mixer) -> Block:
        """Makes the block `x + mixer(norm(x))`."""
        return cls(norm, mixer, NoNorm(), NoFeedForward())

    @classmethod
    def of_feed_forward(cls, norm: Norm, mlp: FeedForward) -> Block:
        """Makes the block `x + mlp(norm(x))`."""
        return cls(NoNorm(), NoMixer(), norm, mlp)

    def norm_readers(self) -> list[tuple[Layer, list[Layer]]]:
        if self.adds_to_norms:
            return []
        if self.mlp_norm is None:
            found = [(self.mixer_norm, [*self.mixer.readers, *self.mlp.readers])]
        else:
            found = [(self.mixer_norm, self.mixer.readers), (self.mlp_norm, self.mlp.readers)]
        return [(norm, readers) for norm, readers in found if not isinstance(norm, NoNorm)]

    def __call__(self, ops: ForwardOps, x: Tensor, angles: Angles, batch: ForwardBatch, kv: MixerBlocks) -> Tensor:
        normed = self.mixer_norm(ops, x)
        mixer = partial(self.mixer, ops, normed, angles, batch, kv)
        if self.parallel:
            if self.mlp_norm is not None:
                normed = self.mlp_norm(ops, x)
            x = self._add(ops, x, mixer, self.mixer_post_norm)
        else:
            x = self._add(ops, normed if self.adds_to_norms else x, mixer, self.mixer_post_norm)
            normed = self.mlp_norm(ops, x)
            x = normed if self.adds_to_norms else x
        return self._add(ops, x, partial(self.mlp, ops, normed), self.mlp_post_norm)

    def _add(self, ops: ForwardOps, x: Tensor, branch: Callable[..., Tensor], post_norm: PostNorm | None) -> Tensor:
        """Adds a branch to x. `branch(residual)` returns `residual + branch`, or only the branch without a residual."""
        if post_norm is not None and self.norms_sum:
            return post_norm(ops, branch(residual=x))
        if post_norm is None and self.branch_scale == 1.0:
            return branch(residual=x)
        y = branch()
        if post_norm is not None:
            y = post_norm(ops, y)
        if self.branch_scale != 1.0:
            ops.scale_(y, self.branch_scale)
        return x + y
