"""A loaded model whose forward pass runs as a `Program`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType

from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph import Program
from pace.graph import instructions as ir
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.operators import OPERATORS, OperatorReport, OperatorRun
from pace.llm.runners.eager import product_operators
from pace.llm.runners.runner import ModelRunner


class ProgramRunner(ModelRunner):
    """`forward` gives the bits that the model's own forward gives on the native kernels."""

    def __init__(self, model: BaseModelForCausalLM):
        """Records the forward pass."""
        super().__init__(model)
        self.program = Program(model, model.config.num_hidden_layers, model.rotary.half)
        self.num_steps = 0

    def forward(self, ops: ModuleType, batch: ForwardBatch) -> Tensor:
        logits = self.program.run(batch, self.model.angles(batch))
        self.num_steps += 1
        return logits

    def operator_report(self) -> OperatorReport:
        """Calls are those of the instructions, all of which run in every step; seconds are known while the program is
        profiled (`program.set_profiling(True)`), and count for the first of the operators that an instruction fuses."""
        calls: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        products = product_operators(self.model)
        for instruction, (_, timed_runs, spent) in zip(self.program.instructions, self.program.timings(), strict=True):
            parts = list(operators_in(instruction, products))
            calls.update(parts)
            if parts and timed_runs:
                seconds[parts[0]] = seconds.get(parts[0], 0.0) + spent
        runs = [
            OperatorRun(name, "native", self.num_steps * calls[name], seconds.get(name))
            for name in OPERATORS
            if name in calls
        ]
        return OperatorReport("as a program", runs if self.num_steps else [])


def operators_in(instruction: ir.Instruction, products: Mapping[int, str]) -> Iterator[str]:
    """The operator of each operation that an instruction does, the main one first; `products` as `product_operators`
    makes it."""
    match instruction:
        case ir.Embedding():
            yield "embedding"
        case ir.Norm():
            yield "norm"
        case ir.Linear():
            yield products[id(instruction.weight)]
            if instruction.norm:
                yield "norm"
        case ir.Attention(preparation=None) | ir.StoreKv():
            yield "attention"
        case ir.Attention(preparation=before):
            yield from ["attention", "attention"]  # stores keys and values, and looks at them
            yield from ["norm" for norm in (before.query_norm, before.key_norm) if norm]
            yield from ["rotary", "rotary"] if before.rotation else []
        case ir.GatherRows() | ir.Add():
            pass  # what models do to tensors outside of `pace.ops`
        case _:
            raise NotImplementedError(f"no operator is known for {instruction}")
