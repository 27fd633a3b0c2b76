"""Runs a loaded model's forward pass as a `Program`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph import Program
from pace.graph.instructions import Instruction
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.towers.tower import Slice
from pace.llm.operators import OPERATORS, OperatorReport, OperatorRun
from pace.llm.runners.eager import product_operators
from pace.llm.runners.runner import ModelRunner
from pace.ops.protocol import ForwardOps


@dataclass(frozen=True, eq=False)
class FinalRows:
    """The forward pass up to the final norm."""

    model: BaseModelForCausalLM

    def compute(self, ops: ForwardOps, batch: ForwardBatch, angles: Angles) -> Tensor:
        return self.model.final_rows(ops, batch, angles)


class ProgramRunner(ModelRunner):
    """Runs a program; `forward` returns the same bits as the model's own forward on the native kernels."""

    def __init__(self, model: BaseModelForCausalLM, optimise: bool = True):
        """Records the forward pass; without `optimise`, one instruction per operation (`Program`)."""
        super().__init__(model)
        layers, halves = model.kv_spec.layers, [rotary.half for rotary in model.rotaries]
        self.program = Program(model, layers, halves, optimise)
        self._stages: list[Program] = []
        """The same in two parts, for steps in which some tokens need no logits."""
        for stage in model.stages or ():
            self._stages.append(Program(stage, layers, halves, optimise, neighbour=self.program))
        self._layers, self._halves = layers, halves
        self._rows = self.program if model.lm_head is None else None
        """The program without the head, recorded on first use."""
        self.num_steps: Counter[Program] = Counter()
        self._slices: dict[Slice, Program] = {}
        """Programs of the towers, recorded on first use."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        if self._stages and len(batch.logit_rows) < len(batch.tokens):
            return self._forward_in_stages(batch)
        return self._run(self.program, batch)

    def _forward_in_stages(self, batch: ForwardBatch) -> Tensor:
        first, tail = self._stages
        x = self._run(first, batch)
        if not len(batch.logit_rows):
            return torch.empty(0, self.vocab_size)
        return self._run(tail, batch.of_wanted_tokens(x))

    def final_rows(self, batch: ForwardBatch) -> Tensor:
        if self._rows is None:
            self._rows = Program(FinalRows(self.model), self._layers, self._halves, neighbour=self.program)
        return self._run(self._rows, batch)

    def logits(self, rows: Tensor) -> Tensor:
        return self.model.logits(self.model.ops, rows)

    def _run(self, program: Program, batch: ForwardBatch) -> Tensor:
        found = program.run(batch, self.model.angles(batch))
        self.num_steps[program] += 1
        return found

    def set_profiling(self, on: bool) -> None:
        """Starts timing every instruction from zero, or stops."""
        for program in (self.program, *self._stages):
            program.set_profiling(on)

    def timings(self) -> list[tuple[Instruction, str, float]]:
        """Returns (instruction, description, seconds over all runs) of every instruction that ran, in order."""
        return [
            (instruction, name, seconds)
            for program in (self.program, *self._stages)
            for instruction, (name, runs, seconds) in zip(program.instructions, program.timings(), strict=True)
            if runs
        ]

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
        for program, num_steps in self.num_steps.items():
            for instruction, (_, timed_runs, spent) in zip(program.instructions, program.timings(), strict=True):
                parts = list(instruction.operators(products))
                calls.update({part: num_steps * parts.count(part) for part in parts})
                if parts and timed_runs:
                    seconds[parts[0]] = seconds.get(parts[0], 0.0) + spent
        runs = [OperatorRun(name, "native", calls[name], seconds.get(name)) for name in OPERATORS if name in calls]
        return OperatorReport("as a program", runs)
