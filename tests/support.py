"""Helpers for several tests: batches over a small cache, backends, checkpoints in memory, processes with a time limit,
and errors raised at any line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, ForwardBatch, LayerBlocks, Spans
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model_list import read_config
from pace.states import SlotSpec, StateSpans
from tests.waiting import PATIENCE


def backends() -> list[str]:
    """Names of the implementations of `pace.ops` that can run a model here: the reference, and the kernels if they are
    built."""
    try:
        native = importlib.import_module("pace.ops.native")
    except ImportError:
        return ["reference"]
    return ["reference", "native"] if hasattr(native, "attention") else ["reference"]


def isas_of_floats() -> list[str]:
    """Instruction sets with separate float kernels. Those with AVX-VNNI differ from avx2 only in products of codes."""
    from pace import _C

    return [isa for isa in _C.available_isas() if not isa.startswith("avx2_")]


def backend(name: str) -> ModuleType:
    return importlib.import_module(f"pace.ops.{name}")


class TensorDict:
    """A checkpoint in memory, with the interface that `load_weights` reads."""

    def __init__(self, state: dict[str, Tensor]):
        self.state = state
        self.tensors = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}

    def row_ranges(self, name: str) -> list[tuple[int, int]]:
        """Splits a tensor into pieces of 24 rows, so that pieces end within tensors and within panels of 16 rows."""
        count = self._rows(name).shape[0]
        return (
            [(start, min(start + 24, count)) for start in range(0, count, 24)]
            if len(self.tensors[name][1]) > 1
            else [(0, count)]
        )

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        return self._rows(name)[start:stop]

    def _rows(self, name: str) -> Tensor:
        tensor = self.state[name]
        if not tensor.shape:
            tensor = tensor[None]
        return tensor.flatten(0, -2) if len(tensor.shape) > 2 else tensor

    def release(self, name: str, start: int = 0, stop: int | None = None) -> None:
        pass

    def keep(self, name: str) -> None:
        pass


def load_model(folder: Path, dtype: torch.dtype, ops: ModuleType, media: bool = False) -> BaseModelForCausalLM:
    """Loads the model of a folder with one safetensors file; with its towers if `media`."""
    from safetensors.torch import load_file

    model_class, config = read_config(json.loads((folder / "config.json").read_text()), media=media)
    model = model_class(config, dtype, ops)
    model.load_weights(TensorDict(load_file(folder / "model.safetensors")))
    return model


def poison(kv: LayerBlocks) -> None:
    """Fills a cache with NaN, so that a read before the first write shows. In an int8 cache the scales are NaN."""
    for tensor in kv.tensors if kv else ():
        tensor.fill_(torch.nan if tensor.is_floating_point() else 99)


class Slots:
    """Two slots for the states of each sequence. They start as NaN. Sequences with an even number write the slot that
    they do not read, the others write in place."""

    def __init__(self, spec: SlotSpec, num_sequences: int):
        memory = spec.reserve(2 * num_sequences).fill_(torch.nan)
        self.of_layers = spec.views(memory)
        self.read = [-1] * num_sequences
        self.replay = [0] * num_sequences
        """Drafts of the last step that were accepted."""

    def spans(self, lengths: dict[int, int], drafts: dict[int, int]) -> StateSpans:
        """A step of `lengths[s]` tokens of each sequence s. The last `drafts[s]` of them are drafts. None is accepted
        until `replay` is set."""
        read, replay = [self.read[s] for s in lengths], [self.replay[s] for s in lengths]
        for s in lengths:
            first = 2 * s
            self.read[s] = first + 1 if s % 2 == 0 and self.read[s] == first else first
            self.replay[s] = 0
        write, certain = [self.read[s] for s in lengths], [length - drafts.get(s, 0) for s, length in lengths.items()]
        starts, no_marks = torch.tensor([0, *lengths.values()]).cumsum(0), [[0] * (len(lengths) + 1), [], []]
        return StateSpans(starts.int(), *(torch.tensor(part, dtype=torch.int32)
                                          for part in (read, replay, write, certain, *no_marks)))  # fmt: skip


class Runner:
    """A model, its cache and a few sequences: `step` appends tokens to some of them and returns their logits.

    The blocks of a sequence are scattered over the cache. It starts as NaN, so that a read before a write shows."""

    def __init__(self, model: BaseModelForCausalLM, num_sequences: int, max_length: int, max_drafts: int = 0):
        self.model = model
        blocks_each = -(-max_length // BLOCK_SIZE)
        self.kv = model.kv_spec.allocate(num_sequences * blocks_each)
        for layer in self.kv:
            poison(layer)
        self.states = Slots(model.kv_spec.slots(max_drafts), num_sequences) if model.kv_spec.has_states else None
        if self.states:
            self.kv = [kv or state for kv, state in zip(self.kv, self.states.of_layers, strict=True)]
        order = torch.randperm(num_sequences * blocks_each, generator=torch.Generator().manual_seed(1))
        tables = order.view(num_sequences, blocks_each)
        self.tables = tables.to(torch.int32)
        self.slots = (tables[:, :, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
        self.positions = torch.arange(blocks_each * BLOCK_SIZE + 1)
        self.lengths = [0] * num_sequences

    def step(
        self,
        chunks: dict[int, Tensor],
        prompt_lengths: dict[int, int] | None = None,
        newest: Callable[[Tensor], Tensor] | None = None,
        drafts: dict[int, int] | None = None,
        routes: dict[int, list[tuple[int, float]]] | None = None,
    ) -> dict[int, Tensor]:
        """Appends `chunks[s]` to each sequence s. `prompt_lengths[s]` is a lower bound of the length that rope scaling
        uses; by default there is none. `newest` maps the positions of a chunk to the newest that each of them sees.
        The last `drafts[s]` tokens of a chunk are drafts, to be followed by `accept`. `routes[s]`: slot and weight of
        each adapter of a sequence."""
        positions, rope_lengths, slots, starts, kv_len = [], [], [], [0], []
        for s, chunk in chunks.items():
            begin, end = self.lengths[s], self.lengths[s] + len(chunk)
            self.lengths[s] = end
            positions.append(self.positions[begin:end])
            lengths, least = self.positions[begin + 1 : end + 1], (prompt_lengths or {}).get(s, 0)
            rope_lengths.append(lengths.clamp(min=least) if least > begin + 1 else lengths)
            slots.append(self.slots[s, begin:end])
            starts.append(starts[-1] + len(chunk))
            kv_len.append(end)
        seen = torch.cat([newest(part) for part in positions]).int() if newest else None
        spans = Spans(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(kv_len, dtype=torch.int32),
            self.tables[list(chunks)],
            seen,
        )
        batch = ForwardBatch(
            torch.cat(list(chunks.values())),
            torch.cat(positions),
            torch.cat(rope_lengths),
            spans,
            torch.cat(slots),
            torch.arange(starts[-1]),
            self.kv,
            routing=_routing({s: len(chunk) for s, chunk in chunks.items()}, routes) if routes else None,
            states=self.states and self.states.spans({s: len(chunk) for s, chunk in chunks.items()}, drafts or {}),
        )
        logits = self.model.forward(batch)
        return {s: logits[starts[i] : starts[i + 1]] for i, s in enumerate(chunks)}

    def accept(self, s: int, accepted: int, drafts: int) -> None:
        """Keeps the first `accepted` of the `drafts` of the last step of sequence s."""
        self.lengths[s] -= drafts - accepted
        if self.states:
            self.states.replay[s] = accepted


def _routing(lengths: dict[int, int], routes: dict[int, list[tuple[int, float]]]) -> Tensor:
    """Returns `ForwardBatch.routing` of sequences with these numbers of tokens."""
    per_row, rows = max(map(len, routes.values())), []
    for s, count in lengths.items():
        found = routes.get(s, [])
        absent = per_row - len(found)
        row = [float(slot) for slot, _ in found] + [-1.0] * absent + [weight for _, weight in found] + [0.0] * absent
        rows.append(torch.tensor([row]).expand(count, -1))
    return torch.cat(rows)


def prefill(model: BaseModelForCausalLM, ids: Tensor, chunk: int | None = None) -> Tensor:
    """Logits `[T, V]` of one sequence `ids [T]`, computed at once or in chunks; the whole text is the prompt."""
    runner = Runner(model, 1, len(ids))
    chunks = ids.split(chunk or len(ids))
    return torch.cat([runner.step({0: part}, {0: len(ids)})[0] for part in chunks])


def finish(process: subprocess.Popen, timeout: float = PATIENCE) -> tuple[str, str]:
    """Waits for a process to end, and returns the rest of its stdout and stderr. If it does not end in `timeout`
    seconds, it is killed, and an AssertionError shows its output."""
    try:
        return process.communicate(timeout=timeout)
    except BaseException as error:
        process.kill()
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise AssertionError(
                f"{process.args} did not end in {timeout} s, and wrote {out!r}, and to stderr {err!r}"
            ) from None
        raise


def exit_code_in_fork(check: Callable[[], bool], timeout: int = int(PATIENCE)) -> int:
    """Exit code of a child forked here that runs `check`: 0 if `check` returns true, 1 if it returns false or raises.
    If it hangs for `timeout` seconds, for example on a lock of its parent, the code is -SIGALRM."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(
                signal.SIGALRM, signal.SIG_DFL
            )  # a Python handler, such as pytest-timeout's, would wait for the call that hangs
            signal.alarm(timeout)
            code = 0 if check() else 1
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def raises_before_line(
    number: int, error: Exception, function: Callable[[], object], within: Callable[[CodeType], bool]
) -> bool:
    """Runs `function`, and raises `error` before the `number`-th line executed in functions for which `within` is true.
    Returns False if fewer lines are executed. The error is raised only once, not again while it is handled."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "call":
            return trace if within(frame.f_code) else None
        if event == "line":
            count += 1
            if count == number:
                raise error
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    except Exception as raised:
        if raised is not error:
            raise
    finally:
        sys.settrace(before)
    return count >= number
