"""Runs a loaded model's forward pass as a `Program`."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph import Program
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.towers.tower import Slice
from pace.llm.operators import OPERATORS, OperatorReport, OperatorRun
from pace.llm.runners.eager import product_operators
from pace.llm.runners.runner import ModelRunner


class ProgramRunner(ModelRunner):
    """Runs a program; `forward` returns the same bits as the model's own forward on the native kernels."""

    def __init__(self, model: BaseModelForCausalLM, optimise: bool = True):
        """Records the forward pass; without `optimise`, one instruction per operation (`Program`)."""
        super().__init__(model)
        self.program = Program(model, model.kv_spec.layers, [rotary.half for rotary in model.rotaries], optimise)
        self.num_steps = 0
        self._slices: dict[Slice, Program] = {}
        """Programs of the towers, recorded on first use."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        logits = self.program.run(batch, self.model.angles(batch))
        self.num_steps += 1
        return logits

    def run_slice(self, piece: Slice, batch: ForwardBatch, angles: Angles) -> Tensor:
        program = self._slices.get(piece)
        if program is None:
            program = Program(piece, piece.caches, piece.angle_halves, neighbour=self.program)
            self._slices[piece] = program
        rows = program.run(batch, angles)
        program.release()  # the next image has another scratch
        return rows

    def operator_report(self) -> OperatorReport:
        """Calls are counted by instruction, because all of them run in every step. Seconds are only measured while the
        program is profiled (`program.set_profiling(True)`). They count for the first of the operators that an
        instruction fuses."""
        calls: Counter[str] = Counter()
        seconds: dict[str, float] = {}
        products = product_operators(self.model)
        for instruction, (_, timed_runs, spent) in zip(self.program.instructions, self.program.timings(), strict=True):
            parts = list(instruction.operators(products))
            calls.update(parts)
            if parts and timed_runs:
                seconds[parts[0]] = seconds.get(parts[0], 0.0) + spent
        runs = [
            OperatorRun(name, "native", self.num_steps * calls[name], seconds.get(name))
            for name in OPERATORS
            if name in calls
        ]
        return OperatorReport("as a program", runs if self.num_steps else [])
