"""Runs the calibration text through a model, layer by layer, and records the inputs of its matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, ForwardBatch, KVSpec, LayerCache, Shares, Spans
from pace.llm.layers import Layer, Linear
from pace.llm.layers.block import MixerBlocks
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops import native, reference
from pace.ops.reference_parts.experts import sum_of_experts
from pace.states import StateSpans

BATCH_TOKENS = 2048
"""Maximum number of tokens that run through a layer at a time, unless a single window is longer."""

NUM_SAMPLES = 512
"""Inputs of a product that are kept, evenly spread over the text. Channel scales are compared on these."""


class InputStatistics:
    """Statistics of all inputs `x [tokens, K]` of a product, in order of arrival."""

    def __init__(self, k: int, num_tokens: int, with_hessian: bool):
        self.hessian = torch.zeros(k, k) if with_hessian else None
        """Sum of x x', or None if it is not needed."""
        self.squares, self.magnitudes, self.largest = torch.zeros(3, k)
        """Sums of x^2 and |x|, and the largest |x|, by channel `[K]`."""
        self._step = max(1, -(-num_tokens // NUM_SAMPLES))
        self._samples: list[Tensor] = []
        self.count = 0

    def add(self, x: Tensor) -> None:
        if self.hessian is not None:
            self.hessian.addmm_(x.t(), x)
        magnitudes = x.abs()
        self.squares += x.square().sum(0)
        self.magnitudes += magnitudes.sum(0)
        self.largest = torch.maximum(self.largest, magnitudes.amax(0))
        self._samples.append(x[-self.count % self._step :: self._step].clone())
        self.count += len(x)

    @property
    def are_enough(self) -> bool:
        """True if there is at least one input per channel. With fewer, GPTQ overfits: on other inputs its error is up
        to 1.4 times that of rounding to the nearest. With two inputs per channel it is 0.6 times that error."""
        return self.count >= len(self.squares)

    @property
    def samples(self) -> Tensor:
        """A sample of the inputs, `[at most NUM_SAMPLES, K]`."""
        return torch.cat(self._samples)

    def rescale(self, factors: Tensor) -> None:
        """Multiplies channels by `factors [K]`, all positive, as if the inputs had been scaled."""
        if self.hessian is not None:
            self.hessian.mul_(factors).mul_(factors[:, None])
        self.squares *= factors.square()
        self.magnitudes *= factors
        self.largest *= factors
        self._samples = [samples * factors for samples in self._samples]


class RecordingOps:
    """Operations of `pace.ops` that run matrix products in plain torch and everything else on the kernels.

    Matrices may be changed in place. `listeners` maps a weight's id to a function that gets the product's input before
    the product runs."""

    def __init__(self, listeners: Mapping[int, Callable[[Tensor], object]]):
        self._listeners = listeners

    def linear(self, x: Tensor, weight: Any, *arguments: Any, **more: Any) -> Tensor:
        self._tell(x, weight)
        return reference.linear(x, weight, *arguments, **more)

    def linear_glu(self, x: Tensor, weight: Any, *arguments: Any, **more: Any) -> Tensor:
        self._tell(x, weight)
        return reference.linear_glu(x, weight, *arguments, **more)

    def experts(self, x: Tensor, gate_up: Any, down: Any, *arguments: Any, **more: Any) -> Tensor:
        """Passes to each expert's products the rows that chose the expert."""
        return sum_of_experts(self.linear, self.linear_glu, x, gate_up, down, *arguments, **more)

    def heads_linear(self, x: Tensor, weights: Any) -> Tensor:
        return reference.heads_linear(x, weights)

    def _tell(self, x: Tensor, weight: Any) -> None:
        if id(weight) in self._listeners:
            self._listeners[id(weight)](x)

    def __getattr__(self, operation: str) -> Callable:
        return getattr(native, operation)


@dataclass(frozen=True)
class Step:
    """Some windows of the text, one span each, and the rotary angles of their tokens."""

    batch: ForwardBatch
    angles: Angles


class EnoughSeen(Exception):
    """Ends a layer's forward pass once all required inputs are recorded."""


class CalibrationText:
    """Windows of tokens, and their hidden states after the layers so far. `hidden` has one float32 tensor `[tokens,
    hidden]` per step.

    Memory: 4 bytes for each token and channel, plus the memory of one step. Also further arguments of layers
    (`layer_arguments`), and the keys and values that later layers share."""

    def __init__(self, model: BaseModelForCausalLM, windows: Sequence[list[int]]):
        """Needs the weights of the model's embeddings only."""
        self.steps = [self._step(model, group) for group in _in_groups(windows, BATCH_TOKENS)]
        self.hidden = [model.embed(reference, step.batch) for step in self.steps]
        self.num_tokens = sum(len(step.batch.tokens) for step in self.steps)
        self._num_blocks = max(int(step.batch.spans.block_table.max()) + 1 for step in self.steps)
        self._num_slots = max(len(step.batch.spans.kv_len) for step in self.steps)
        self._cache: tuple[LayerCache | tuple[LayerCache, ...], MixerBlocks] = (None, None)  # of the last layer
        self._arguments = [model.layer_arguments(reference, x, step.batch) for step, x in zip(self.steps, self.hidden)]
        self._shared = {cache.layer for cache in model.kv_spec.layers if isinstance(cache, Shares)}
        """Layers whose keys and values others see."""
        self._kept: dict[tuple[int, int], MixerBlocks] = {}
        """Their blocks of each step."""
        self._index = 0
        """Number of layers so far."""

    def record(self, layer: Layer, products: Sequence[Linear], with_hessian: bool) -> list[InputStatistics]:
        """Statistics of the inputs of a layer's products. The forward pass stops after the last of them."""
        found = [InputStatistics(product.k, self.num_tokens, with_hessian) for product in products]
        missing: set[int] = set()

        def listener(product: Linear, statistics: InputStatistics) -> Callable[[Tensor], None]:
            def listen(x: Tensor) -> None:
                statistics.add(x)
                missing.discard(id(product.weight))
                if not missing:
                    raise EnoughSeen

            return listen

        ops = RecordingOps(
            {id(product.weight): listener(product, statistics) for product, statistics in zip(products, found)}
        )
        for number in range(len(self.steps)):
            missing.update(id(product.weight) for product in products)
            try:
                self._run(ops, layer, number)
            except EnoughSeen:
                pass
        return found

    def advance(self, layer: Layer) -> None:
        """Passes `hidden` through the layer."""
        for number in range(len(self.steps)):
            self.hidden[number] = self._run(RecordingOps({}), layer, number)
        self._index += 1

    def _run(self, ops: Any, layer: Layer, number: int) -> Tensor:
        """Runs the next layer on the hidden states of a step."""
        step, x, arguments = self.steps[number], self.hidden[number], self._arguments[number][self._index]
        return layer(ops, x, step.angles, step.batch, self._blocks(layer.cache, number), *arguments)

    def _blocks(self, cache: LayerCache | tuple[LayerCache, ...], number: int) -> MixerBlocks:
        """The blocks and slots of the next layer. Successive layers with equal `cache` reuse the same memory for all
        steps, unless later layers share what it holds."""
        if isinstance(cache, Shares):
            return self._kept[cache.layer, number]
        if self._index in self._shared:
            if (self._index, number) not in self._kept:
                self._kept[self._index, number] = self._allocate(cache)
            return self._kept[self._index, number]
        if cache != self._cache[0]:
            self._cache = None, None  # frees the memory before more is allocated
            self._cache = cache, self._allocate(cache) if cache else None
        return self._cache[1]

    def _allocate(self, cache: LayerCache | tuple[LayerCache, ...]) -> MixerBlocks:
        spec = KVSpec(cache if isinstance(cache, tuple) else (cache,), torch.float32)
        blocks, slots = spec.allocate(self._num_blocks), spec.slots()
        if spec.has_states:
            states = slots.views(slots.reserve(self._num_slots))
            blocks = [of_positions or of_state for of_positions, of_state in zip(blocks, states, strict=True)]
        return tuple(blocks) if isinstance(cache, tuple) else blocks[0]

    @staticmethod
    def _step(model: BaseModelForCausalLM, windows: Sequence[list[int]]) -> Step:
        lengths = [len(window) for window in windows]
        width = -(-max(lengths) // BLOCK_SIZE)
        tables = torch.arange(len(windows) * width, dtype=torch.int32).view(len(windows), width)
        positions = torch.cat([torch.arange(length) for length in lengths])
        slots = torch.cat([span * width * BLOCK_SIZE + torch.arange(length) for span, length in enumerate(lengths)])
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        batch = ForwardBatch(
            tokens=torch.tensor([token for window in windows for token in window]),
            positions=positions,
            rope_lengths=torch.tensor(lengths).repeat_interleave(torch.tensor(lengths)),
            spans=Spans(starts, torch.tensor(lengths, dtype=torch.int32), tables),
            slots=slots,
            logit_rows=torch.empty(0, dtype=torch.int64),
            kv=[],
            states=_fresh_states(starts),
        )
        return Step(batch, model.angles(batch))


def _fresh_states(starts: Tensor) -> StateSpans:
    """A step of whole texts. Span s, the tokens `starts[s] .. starts[s + 1]`, writes slot s."""
    lengths, none = starts.diff(), torch.empty(0, dtype=torch.int32)
    unread, slots = torch.full_like(lengths, -1), torch.arange(len(lengths), dtype=torch.int32)
    return StateSpans(starts, unread, torch.zeros_like(lengths), slots, lengths, torch.zeros_like(starts), none, none)


def _in_groups(windows: Sequence[list[int]], num_tokens: int) -> Iterator[list[list[int]]]:
    """Splits the windows into groups of at most `num_tokens` tokens, with at least one window each."""
    group: list[list[int]] = []
    for window in windows:
        if group and sum(map(len, group)) + len(window) > num_tokens:
            yield group
            group = []
        group.append(window)
    yield group
