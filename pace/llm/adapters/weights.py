"""The weights of a LoRA adapter, as its file has them. A module of the base model has a pair of matrices, and so have
all experts of a mixture. Some modules were trained in full."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AdapterModule:
    """What an adapter adds to the product of one module: `scale * (B (A x) + bias)`. To row t of an embedding, it adds
    `scale * B A[:, t]`."""

    a: Tensor
    """A `[r, K]`, of any float dtype; finite."""
    b: Tensor
    """B `[N, r]`, rows in the order of the base's tensor `[N, K]`."""
    bias: Tensor | None
    """`[N]`, inside of the scale."""
    scale: float
    """alpha / r, or alpha / sqrt(r), with this module's own alpha and r. Finite."""
    of_embedding: bool = False
    """True for a table `[K, N]` of K tokens."""

    def __post_init__(self) -> None:
        (r, k), (n, columns) = self.a.shape, self.b.shape
        if columns != r or r < 1 or (self.bias is not None and self.bias.shape != (n,)):
            bias = "" if self.bias is None else f" and a bias {list(self.bias.shape)}"
            raise ValueError(
                f"an adapter's module is A [r, {k}], B [{n}, r] and a bias [{n}] or None; got A {list(self.a.shape)}, "
                f"B {list(self.b.shape)}{bias}"
            )

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class ExpertMatrices:
    """What an adapter adds to one tensor with a matrix `[N, K]` of each of E experts."""

    a: Tensor
    """`[E r, K]`: A of the first expert, then of the next."""
    b: Tensor
    """`[N, r E]`: a column of each expert, then the next column of each."""
    scale: Callable[[str, int], float]
    """Returns the scale, given the path of the tensor and r."""
    tensor: str = ""
    """Name of the tensor below the module of all experts, such as "up_proj.weight"; empty if the shapes say it."""

    def fits(self, num_experts: int, n: int, k: int) -> bool:
        """True if these are adapters of experts with matrices `[n, k]`."""
        (rows, width), (height, columns) = self.a.shape, self.b.shape
        return (height, width) == (n, k) and rows == columns and rows % num_experts == 0

    def of_expert(self, expert: int, num_experts: int, path: str) -> AdapterModule:
        """The adapter of one expert. `path` is that of the tensor."""
        rank = self.a.shape[0] // num_experts
        a = self.a[expert * rank : (expert + 1) * rank]
        return AdapterModule(a, self.b[:, expert::num_experts], None, self.scale(path, rank))


@dataclass(frozen=True, eq=False)
class AdapterWeights:
    """An adapter that was read and checked, but is not loaded."""

    name: str
    """For messages."""
    modules: Mapping[str, AdapterModule]
    """Module path -> its weights. A path is the name of the base's tensor without ".weight", in the base's class as it
    was trained: "model.layers.0.self_attn.q_proj"."""
    experts: Mapping[str, Sequence[ExpertMatrices]] = field(default_factory=dict)
    """Path of a mixture's experts -> their adapters, of one tensor each. Where the shapes say which, gate and up come
    before down. Only for merging."""
    wholes: Mapping[str, Tensor] = field(default_factory=dict)
    """Name of a tensor -> what it becomes, for modules that were trained in full. Only for merging."""

    @property
    def rank(self) -> int:
        """The largest rank of a module; 0 if none has one."""
        return max((module.rank for module in self.modules.values()), default=0)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of modules, shapes, scales and values, in hexadecimal: equal for equal adapters under any name."""
        digest = hashlib.sha256()

        def add(what: tuple[object, ...], parts: Sequence[Tensor]) -> None:
            shapes = [(str(part.dtype), tuple(part.shape)) for part in parts]
            digest.update(repr((*what, shapes)).encode())
            for part in parts:
                digest.update(part.contiguous().view(-1).view(torch.uint8).numpy())

        for path, module in sorted(self.modules.items()):
            parts = [module.a, module.b, *([] if module.bias is None else [module.bias])]
            add((path, float(module.scale), module.of_embedding), parts)
        for path, of_tensors in sorted(self.experts.items()):
            for matrices in of_tensors:
                scales = matrices.scale(path, 1), matrices.scale(path, 2)
                add(("experts", path, matrices.tensor, scales), [matrices.a, matrices.b])
        for name, whole in sorted(self.wholes.items()):
            add(("whole", name), [whole])
        return digest.hexdigest()
