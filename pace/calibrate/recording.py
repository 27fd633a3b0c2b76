"""Calibration text through a model, layer by layer: what its matrix products read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, ForwardBatch, KVSpec, LayerBlocks, LayerCache, Spans
from pace.llm.layers import Layer, Linear
from pace.llm.layers.rotary import Angles
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.ops import native, reference
from pace.ops.reference_experts import sum_of_experts

BATCH_TOKENS = 2048
"""Of windows that run through a layer at a time."""

NUM_SAMPLES = 512
"""Inputs of a product that are kept as they are, spread evenly over the text: scales of channels are compared on
them."""


class InputStatistics:
    """Of all inputs `x [tokens, K]` of a product, in the order in which they come."""

    def __init__(self, k: int, num_tokens: int, with_hessian: bool):
        self.hessian = torch.zeros(k, k) if with_hessian else None
        """Sum of x x'; None where nobody wants it."""
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
        """Whether there are as many inputs as channels. From fewer, GPTQ learns what holds for these alone: on others its
        error is up to 1.4 times that of rounding to the nearest, and at twice as many 0.6 times."""
        return self.count >= len(self.squares)

    @property
    def samples(self) -> Tensor:
        """`[at most NUM_SAMPLES, K]`."""
        return torch.cat(self._samples)

    def rescale(self, factors: Tensor) -> None:
        """Channels are multiplied by `factors [K]`, positive: as if these inputs had come."""
        if self.hessian is not None:
            self.hessian.mul_(factors).mul_(factors[:, None])
        self.squares *= factors.square()
        self.magnitudes *= factors
        self.largest *= factors
        self._samples = [samples * factors for samples in self._samples]


class RecordingOps:
    """The functions of `pace.ops` on matrices that can be changed in place: products in plain torch, all else on the
    kernels. What products with the weights of `listeners` (by id) read is told to these first."""

    def __init__(self, listeners: Mapping[int, Callable[[Tensor], object]]):
        self._listeners = listeners

    def linear(self, x: Tensor, weight: Any, *arguments: Any, **more: Any) -> Tensor:
        self._tell(x, weight)
        return reference.linear(x, weight, *arguments, **more)

    def linear_glu(self, x: Tensor, weight: Any, *arguments: Any, **more: Any) -> Tensor:
        self._tell(x, weight)
        return reference.linear_glu(x, weight, *arguments, **more)

    def experts(self, x: Tensor, gate_up: Any, down: Any, *arguments: Any, **more: Any) -> Tensor:
        """The products of an expert read the rows that chose it."""
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
    """Windows of the text, one span each, and the angles of their tokens."""

    batch: ForwardBatch
    angles: Angles


class EnoughSeen(Exception):
    """Ends a layer's forward once the last input that somebody waits for has come."""


class CalibrationText:
    """Windows of tokens and what the layers so far have made of them: `hidden`, float32 `[tokens, hidden]` for each
    step.

    Memory: 4 bytes for each token and channel, besides what one step takes."""

    def __init__(self, model: BaseModelForCausalLM, windows: Sequence[list[int]]):
        """Needs the model's embedding, and nothing else of its weights."""
        self.steps = [self._step(model, group) for group in _in_groups(windows, BATCH_TOKENS)]
        self.hidden = [model.embed(reference, step.batch) for step in self.steps]
        self.num_tokens = sum(len(step.batch.tokens) for step in self.steps)
        self._num_blocks = max(int(step.batch.spans.block_table.max()) + 1 for step in self.steps)
        self._cache: tuple[LayerCache, LayerBlocks] = (None, None)  # of the last layer

    def record(self, layer: Layer, products: Sequence[Linear], with_hessian: bool) -> list[InputStatistics]:
        """Of the inputs that these products of a layer get. Its forward goes no further than to the last of them."""
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
        for step, x in zip(self.steps, self.hidden):
            missing.update(id(product.weight) for product in products)
            try:
                self._run(ops, layer, step, x)
            except EnoughSeen:
                pass
        return found

    def advance(self, layer: Layer) -> None:
        """`hidden` goes through the layer."""
        for index, step in enumerate(self.steps):
            self.hidden[index] = self._run(RecordingOps({}), layer, step, self.hidden[index])

    def _run(self, ops: Any, layer: Layer, step: Step, x: Tensor) -> Tensor:
        return layer(ops, x, step.angles, step.batch, self._blocks(layer.cache))

    def _blocks(self, cache: LayerCache) -> LayerBlocks:
        """What a layer that keeps `cache` writes and reads; layers that keep the same use it in turn."""
        if cache != self._cache[0]:
            self._cache = None, None  # gives back the memory before more is taken
            self._cache = cache, KVSpec((cache,), torch.float32).allocate(self._num_blocks)[0] if cache else None
        return self._cache[1]

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
        )
        return Step(batch, model.angles(batch))


def _in_groups(windows: Sequence[list[int]], num_tokens: int) -> Iterator[list[list[int]]]:
    """The windows in runs of about `num_tokens`, at least one each."""
    group: list[list[int]] = []
    for window in windows:
        if group and sum(map(len, group)) + len(window) > num_tokens:
            yield group
            group = []
        group.append(window)
    yield group
