"""Mixtures of experts on symbols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from pace import _C
from pace.graph.instructions import Columns, Instruction, Places, Value
from pace.graph.symbols import Rows
from pace.ops.experts import Router
from pace.ops.kernels import experts as expert_kernels
from pace.ops.kernels.norm import NormParameters
from pace.ops.protocol import ExpertOptions


@dataclass(eq=False)
class Route(Instruction):
    """out `[T, 2 top_k]` = the routing of each row of logits."""

    operations = ("route",)
    operator = "mlp"
    out: Value
    logits: Columns
    router: Router
    choice_bias: Tensor | None
    expert_scale: Tensor | None

    def lower(self, program: _C.Program, places: Places) -> None:
        vectors = self.choice_bias, self.expert_scale
        program.route(places.value(self.out), places.columns(self.logits), self.router, *vectors)


def route(logits: Rows, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None) -> Rows:
    if logits.columns.count != router.num_experts:
        raise ValueError(f"logits must be float32 [T, {router.num_experts}]; got {logits.columns.count} columns")
    expert_kernels.check_router_vectors(router, choice_bias, expert_scale)
    out = logits.like(2 * router.top_k)
    return logits.recording.rows(Route(out, logits.columns, router, choice_bias, expert_scale))


@dataclass(eq=False)
class Experts(Instruction):
    """out = residual + the chosen experts of norm(x). `choices` is a routing, or with `router`, the logits from which
    it is computed. Choices and residual must be whole values."""

    operations = ("experts",)
    operator = "mlp"
    out: Value
    x: Columns
    gate_up: expert_kernels.ExpertStack
    down: expert_kernels.ExpertStack
    choices: Columns
    options: ExpertOptions
    residual: Columns | None
    norm: NormParameters | None = None
    router: Router | None = None
    choice_bias: Tensor | None = None
    expert_scale: Tensor | None = None

    def lower(self, program: _C.Program, places: Places) -> None:
        program.experts(
            places.value(self.out),
            places.columns(self.x),
            self.norm,
            places.value(self.choices.value),
            self.router,
            self.choice_bias,
            self.expert_scale,
            len(self.gate_up),
            self.gate_up,
            self.down,
            self.options,
            self.residual and places.value(self.residual.value),
        )

    def operators(self, of_weight: Mapping[int, str]) -> Iterator[str]:
        yield "mlp"
        if self.router:
            yield "mlp"
        if self.norm:
            yield "norm"


def experts(
    x: Rows,
    gate_up: expert_kernels.ExpertStack,
    down: expert_kernels.ExpertStack,
    routing: Rows,
    options: ExpertOptions,
    residual: Rows | None = None,
) -> Rows:
    expert_kernels.check_stacks(gate_up, down, options)
    if x.columns.count != gate_up.k:
        raise ValueError(f"x must be float32 [T, {gate_up.k}]; got {x.columns.count} columns")
    added = residual and residual.columns
    if added and added.count != down.n:
        raise ValueError(f"residual must be float32 [T, {down.n}]; got {added.count} columns")
    if not routing.columns.is_whole or (added and not added.is_whole):
        raise NotImplementedError("routing and residual of recorded experts are whole matrices")
    out = Value(down.n, x.columns.value.per_token)
    return x.recording.rows(Experts(out, x.columns, gate_up, down, routing.columns, options, added))
