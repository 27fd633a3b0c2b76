"""A mixture of experts: a router chooses some of many feed-forwards for each token, and their results are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from pace.llm.layers.base import Layer, Vectors
from pace.llm.layers.linear import FloatLinear, GatedLinear, Linear
from pace.llm.layers.mlp import GatedMLP, PlainMLP
from pace.llm.layers.weight_target import RowRange, TensorSource
from pace.ops.experts import ClampedSwiglu, Router
from pace.ops.protocol import ExpertOptions, ForwardOps, Stack, WeightOps
from pace.ops.weight_layout import AnyLayout, WeightLayout, parts_of

Parts = dict[str, int | TensorSource]
Form = Callable[[int], Parts]
"""Expert -> the parts of its matrix; one of the layouts of a stack in checkpoints."""


class RouterLinear(FloatLinear):
    """Logits of experts `[T, E]`. Stored in float32, because a small error chooses another expert; quantised only if
    the checkpoint's is."""

    def storage(self, dtype: torch.dtype) -> AnyLayout:
        return super().storage(torch.promote_types(dtype, torch.float32))


class ExpertLinear(Layer):
    """One matrix `W [n, k]` for each expert, in one block of memory.

    `forms` are the possible layouts in checkpoints. The first one is used until `choose` gets the names of tensors. All
    experts are stored in the same way."""

    def __init__(self, count: int, k: int, *forms: Form, glu: bool = False, bias: bool = False):
        self.count = count
        self.k = k
        self.forms = forms
        self.glu = glu
        self.has_bias = bias
        self.stack: Stack | None = None
        self.in_file: Stack | None = None
        """Experts that need no memory because they are in a file. May be set until `allocate`."""
        self.biases: Tensor | None = None
        """float32 `[E, n]`."""
        self.experts = self.in_form(forms[0])

    def in_form(self, form: Form) -> list[Linear]:
        """Returns the experts with the tensors of a form."""
        kind = GatedLinear if self.glu else Linear
        return [kind(form(expert), self.k, self.has_bias) for expert in range(self.count)]

    def choose(self, tensors: Mapping[str, tuple[int, ...]]) -> None:
        """Uses the first form whose tensors have these names and shapes, or else the first with these names; without
        one, changes nothing."""
        named: list[list[Linear]] = []
        for form in self.forms:
            experts = self.in_form(form)
            wanted = {name: found[0].stored_shape for expert in experts for name, found in expert.targets().items()}
            if wanted.keys() <= tensors.keys():
                named.append(experts)
                if all(tensors[name] == shape for name, shape in wanted.items()):
                    self.experts = experts
                    return
        if named:
            self.experts = named[0]

    def apart(self) -> list[Linear]:
        """Returns the experts in the form in which each part has its own tensor. Raises NotImplementedError if there is
        no such form."""
        for form in self.forms:
            experts = self.in_form(form)
            if not any(expert.sources for expert in experts):
                return experts
        raise NotImplementedError(f"{next(iter(self.experts[0].parts))} is never in a tensor of its own")

    def stacks(self) -> Iterator[ExpertLinear]:
        yield self

    @property
    def n(self) -> int:
        return self.experts[0].n

    def storage(self, dtype: torch.dtype) -> AnyLayout:
        """The layout of each expert; their plans are equal by then."""
        return self.experts[0].storage(dtype)

    @property
    def is_quantised(self) -> bool:
        """True if all of it is stored as codes, which are the same bytes for every instruction set."""
        return all(isinstance(layout, WeightLayout) for _, layout in parts_of(self.storage(torch.float32), self.n))

    def tensors(self) -> set[str]:
        """The names of the tensors that hold its matrices."""
        return {expert.tensor(part) for expert in self.experts for part in expert.parts}

    def allocate(self, ops: WeightOps, dtype: torch.dtype) -> None:
        if self.has_bias:
            self.biases = torch.zeros(self.count, self.n, dtype=torch.promote_types(dtype, torch.float32))
        self.hold(ops, self.in_file or ops.empty_stack(self.count, self.n, self.k, self.storage(dtype), self.glu))

    def hold(self, ops: WeightOps, stack: Stack) -> None:
        """Uses a stack as its weights."""
        self.stack = stack
        for index, (expert, weight) in enumerate(zip(self.experts, stack.experts, strict=True)):
            expert.hold(ops, weight, self.biases[index] if self.biases is not None else None)

    def matrix_nbytes(self, ops: WeightOps, dtype: torch.dtype) -> int:
        """Bytes of the matrices, without biases."""
        return ops.stack_nbytes(self.count, self.n, self.k, self.storage(dtype), self.glu)

    def planned_nbytes(self, ops: WeightOps, dtype: torch.dtype) -> int:
        of_biases = sum(expert.bias.planned_nbytes(ops, dtype) for expert in self.experts)
        return of_biases + self.matrix_nbytes(ops, dtype)

    @property
    def nbytes(self) -> int:
        of_biases = 0 if self.biases is None else self.biases.nbytes
        return of_biases + (0 if self.stack is None else self.stack.nbytes)


class MixtureOfExperts(Layer):
    """Mixture of experts: `residual + w1 f1(x) + w2 f2(x) + ... + shared(x)`. `router` chooses the experts by the
    logits `gate(x)` and an optional `choice_bias`. Experts are gated if `gate_up` is made with `glu`, else `gate_up` is
    only their up. `shared` is an optional feed-forward of all tokens, which an optional `shared_gate` multiplies by
    `sigmoid(shared_gate(x))`."""

    operator = "mlp"

    def __init__(
        self,
        gate: RouterLinear,
        router: Router,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: str | ClampedSwiglu,
        choice_bias: Vectors | None = None,
        shared: GatedMLP | PlainMLP | None = None,
        shared_gate: RouterLinear | None = None,
        weigh_inputs: bool = False,
        softcap: float | None = None,
        expert_scale: Vectors | None = None,
    ):
        """`weigh_inputs`: the experts are f1(w1 x), f2(w2 x), ... `softcap`: logits become
        `softcap * tanh(logit / softcap)`. `expert_scale`: a factor of each expert's weight."""
        self.gate = gate
        self.choice_bias = choice_bias or Vectors({})
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.shared = shared
        self.shared_gate = shared_gate
        self.weigh_inputs = weigh_inputs
        self.softcap = softcap
        self.expert_scale = expert_scale or Vectors({})

    @property
    def readers(self) -> list[Linear]:
        of_shared = self.shared.readers if self.shared else []
        return [self.gate, *self.gate_up.experts, *of_shared, *([self.shared_gate] if self.shared_gate else [])]

    def __call__(self, ops: ForwardOps, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self.routed(ops, x, self.route(ops, x), residual)
        if self.shared is None:
            return y
        if self.shared_gate is None:
            return self.shared(ops, x, residual=y)
        of_all = self.shared(ops, x)
        ops.gate_(of_all, self.shared_gate(ops, x))
        return y + of_all

    def route(self, ops: ForwardOps, x: Tensor) -> Tensor:
        """Returns the routing of rows that the router reads, as `ForwardOps.route`."""
        logits = self.gate(ops, x)
        if self.softcap is not None:
            ops.softcap_(logits, self.softcap)
        return ops.route(logits, self.router, self.choice_bias.values, self.expert_scale.values)

    def routed(self, ops: ForwardOps, x: Tensor, routing: Tensor, residual: Tensor | None) -> Tensor:
        """Returns `residual + w1 f1(x) + w2 f2(x) + ...`."""
        options = ExpertOptions(self.activation, self.gate_up.biases, self.down.biases, self.weigh_inputs)
        return ops.experts(x, self.gate_up.stack, self.down.stack, routing, options, residual)


class LatentMixture(MixtureOfExperts):
    """A mixture whose experts run in a narrower space: `residual + up(w1 f1(down(x)) + ...) + shared(x)`, with the two
    products `to_latent` and `from_latent` as down and up. Router and shared MLP read x."""

    def __init__(self, to_latent: Linear, from_latent: Linear, *parts: Any, **options: Any):
        """`parts`, `options`: the arguments of `MixtureOfExperts`."""
        super().__init__(*parts, **options)
        self.to_latent = to_latent
        self.from_latent = from_latent

    @property
    def readers(self) -> list[Linear]:
        of_experts = set(self.gate_up.experts)
        return [self.to_latent, *(reader for reader in super().readers if reader not in of_experts)]

    def routed(self, ops: ForwardOps, x: Tensor, routing: Tensor, residual: Tensor | None) -> Tensor:
        y = super().routed(ops, self.to_latent(ops, x), routing, None)
        return self.from_latent(ops, y, residual=residual)


# -- layouts of a stack in checkpoints


def one_by_one(name: str, tensors: tuple[str, ...], rows: int) -> Form:
    """A tensor for each part of each expert: `{name}.{expert}.{tensor}.weight [rows, k]`."""
    return lambda expert: {f"{name}.{expert}.{tensor}": rows for tensor in tensors}


def stacked(name: str, tensors: tuple[str, ...], rows: int, count: int, k: int) -> Form:
    """A tensor for each part of all experts, as in GGUF: `{name}.{tensor}.weight [E, rows, k]`, biases `[E, rows]`."""
    return lambda expert: {
        f"{name}.{expert}.{tensor}": TensorSource(
            (count, rows, k), (RowRange(expert * rows, rows),), f"{name}.{tensor}.weight", f"{name}.{tensor}.bias"
        )
        for tensor in tensors
    }


def fused(
    tensor: str,
    rows: int,
    count: int,
    k: int,
    transposed: bool = False,
    interleaved: bool = False,
    quantised: bool = False,
    flat: bool = False,
) -> Form:
    """One tensor: `{tensor} [E, rows, k]`, or `[E, k, rows]` if `transposed`; biases `{tensor}_bias [E, rows]`. With
    `interleaved`, rows of gate and up alternate. With `quantised`, the name ends in ".weight". With `flat`, the experts
    are one matrix, one below the other."""
    shape = (count, k, rows) if transposed else (count, rows, k)

    def form(expert: int) -> Parts:
        first = expert * rows
        taken = (RowRange(first, rows),)
        if interleaved:
            taken = (RowRange(first, rows // 2, 1, 2), RowRange(first + 1, rows // 2, 1, 2))
        name, _, part = tensor.rpartition(".")
        matrix = f"{tensor}.weight" if quantised else tensor
        source = TensorSource(shape, taken, matrix, f"{tensor}_bias", transposed, is_flat=flat)
        return {f"{name}.{expert}.{part}": source}

    return form


def expert_stacks(
    name: str,
    count: int,
    hidden: int,
    inner: int,
    *,
    bias: bool = False,
    transposed: bool = False,
    interleaved: bool = False,
) -> tuple[ExpertLinear, ExpertLinear]:
    """Gate and up, and down, of `count` experts below `name`. Their tensors are gate_proj, up_proj and down_proj of
    each expert or of all, or gate_up_proj and down_proj of all. `transposed` and `interleaved` describe the latter;
    transformers saves some transposed ones as they are."""
    gate_up, down, forms = ("gate_proj", "up_proj"), ("down_proj",), dict.fromkeys((transposed, False))
    return (
        ExpertLinear(
            count,
            hidden,
            one_by_one(name, gate_up, inner),
            *(fused(f"{name}.gate_up_proj", 2 * inner, count, hidden, form, interleaved) for form in forms),
            stacked(name, gate_up, inner, count, hidden),
            glu=True,
            bias=bias,
        ),
        ExpertLinear(
            count,
            inner,
            one_by_one(name, down, hidden),
            *(fused(f"{name}.down_proj", hidden, count, inner, form) for form in forms),
            stacked(name, down, hidden, count, inner),
            bias=bias,
        ),
    )


def plain_expert_stacks(name: str, count: int, hidden: int, inner: int) -> tuple[ExpertLinear, ExpertLinear]:
    """Up and down of `count` experts without gates below `name`. Their tensors are up_proj and down_proj of each expert
    or of all."""

    def forms(tensor: str, rows: int, k: int) -> tuple[Form, ...]:
        one = (tensor,)
        return (
            one_by_one(name, one, rows),
            fused(f"{name}.{tensor}", rows, count, k),
            stacked(name, one, rows, count, k),
        )

    return (
        ExpertLinear(count, hidden, *forms("up_proj", inner, hidden)),
        ExpertLinear(count, inner, *forms("down_proj", hidden, inner)),
    )
