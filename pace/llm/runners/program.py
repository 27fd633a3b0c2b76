"""Runs a loaded model's forward pass as a `Program`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.graph import Program
from pace.graph.instructions import Instruction
from pace.llm.adapters.adapted import AdaptedModel, AdapterTables
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


@dataclass(eq=False)
class Recorded:
    """The programs of a forward pass."""

    whole: Program
    stages: list[Program]
    """The same in two parts, for steps in which some tokens need no logits; empty for models that have no stages."""
    rows: Program | None
    """The program without the head, recorded on first use."""
    tables: AdapterTables = field(default_factory=AdapterTables)
    """The adapters of its products and embeddings."""

    @property
    def programs(self) -> list[Program]:
        return [self.whole, *self.stages]


class ProgramRunner(ModelRunner):
    """Runs a program; `forward` returns the same bits as the model's own forward on the native kernels."""

    def __init__(self, model: BaseModelForCausalLM, optimise: bool = True):
        """Records the forward pass; without `optimise`, one instruction per operation (`Program`)."""
        super().__init__(model)
        self._optimise = optimise
        self._profiles = False
        self._plain = self._record(AdapterTables())
        self._adapted: Recorded | None = None
        """With adapters; recorded for the first step that has any."""
        self.num_steps: Counter[Program] = Counter()
        self._slices: dict[Slice, Program] = {}
        """Programs of the towers, recorded on first use."""

    @property
    def program(self) -> Program:
        """The program of the whole forward pass, without adapters."""
        return self._plain.whole

    def _record(self, tables: AdapterTables) -> Recorded:
        model, neighbour = self.model, None
        layers, halves = model.kv_spec.layers, [rotary.half for rotary in model.rotaries]
        programs: list[Program] = []
        for part in (model, *(model.stages or ())):
            adapted = AdaptedModel(part, tables) if tables else part
            neighbour = programs[0] if programs else self._plain.whole if tables else None
            programs.append(Program(adapted, layers, halves, self._optimise, neighbour))
            programs[-1].set_profiling(self._profiles)
        return Recorded(programs[0], programs[1:], programs[0] if model.lm_head is None else None, tables)

    def _recorded(self, batch: ForwardBatch) -> Recorded:
        """The programs for a step. Without adapters in it, they are those of a model that has none."""
        if batch.routing is None:
            return self._plain
        if self._adapted is None or self._adapted.tables is not self.adapters.tables:
            self._adapted = self._record(self.adapters.tables)
        return self._adapted

    @property
    def _programs(self) -> list[Program]:
        return [*self._plain.programs, *(self._adapted.programs if self._adapted else ())]

    def forward(self, batch: ForwardBatch) -> Tensor:
        recorded = self._recorded(batch)
        if recorded.stages and len(batch.logit_rows) < len(batch.tokens):
            return self._forward_in_stages(recorded.stages, batch)
        return self._run(recorded.whole, batch, finds_largest=True)

    def _forward_in_stages(self, stages: list[Program], batch: ForwardBatch) -> Tensor:
        first, tail = stages
        x = self._run(first, batch)
        if not len(batch.logit_rows):
            return torch.empty(0, self.vocab_size)
        wanted, rows = batch.of_wanted_tokens(x)
        logits = self._run(tail, wanted, finds_largest=True)
        if batch.kept is not None:
            batch.kept[rows] = wanted.kept
        return logits

    def final_rows(self, batch: ForwardBatch) -> Tensor:
        recorded = self._recorded(batch)
        if recorded.rows is None:
            part = FinalRows(self.model)
            adapted = AdaptedModel(part, recorded.tables) if recorded.tables else part
            layers, halves = self.model.kv_spec.layers, [rotary.half for rotary in self.model.rotaries]
            recorded.rows = Program(adapted, layers, halves, neighbour=self.program)
        return self._run(recorded.rows, batch)

    def logits(self, rows: Tensor, routing: Tensor | None = None) -> Tensor:
        return self.model.logits(self.adapted(self.model.ops, routing), rows)

    def _run(self, program: Program, batch: ForwardBatch, finds_largest: bool = False) -> Tensor:
        found = program.run(batch, self.model.angles(batch), finds_largest)
        self.num_steps[program] += 1
        return found

    def set_profiling(self, on: bool) -> None:
        """Starts timing every instruction from zero, or stops."""
        self._profiles = on
        for program in self._programs:
            program.set_profiling(on)

    def timings(self) -> list[tuple[Instruction, str, float]]:
        """Returns (instruction, description, seconds over all runs) of every instruction that ran, in order."""
        return [
            (instruction, name, seconds)
            for program in self._programs
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
