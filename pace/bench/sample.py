"""Runs a few layers of a checkpoint here, to correct the predicted speed of the whole model.

The shares of `prediction.py` come from other machines and similar formats. Running layers of the model itself, stored
as they would be, gives its own shares.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from pace import _C
from pace.batch import Shares
from pace.bench.costs import Costs
from pace.bench.limits import Limits
from pace.bench.measure import WARM_UP_STEPS, decode_seconds, prefill_seconds
from pace.bench.prediction import efficiencies, predict
from pace.bench.result import Subject
from pace.llm.engine.engine import Engine
from pace.llm.layers import Layer
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.fill import fill
from pace.llm.loading.model import make_model
from pace.llm.loading.plan import plan_layout
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.runners import make_runner
from pace.memory import format_bytes
from pace.ops import native
from pace.quant import QuantizationConfig

SAMPLE_BYTES = 256 << 20
"""Bytes of layers to run: more than the caches of a CPU hold, or decoding would be faster than with the whole model."""
MAX_PROMPT = 512
MAX_CACHE_BYTES = 1 << 30
"""Maximum size of the cache of a sample."""
STEPS = 24
"""Decode steps."""
MAX_RUNS, MAX_SECONDS = 5, 2.0
"""Limits on the number of runs of the prompt and on their total seconds."""


class CannotSample(Exception):
    """A few layers cannot be run by themselves, or not with this load: too few positions, or too much cache."""


class Prompts(NamedTuple):
    """Load to predict: a prompt of `prompt` tokens, and decoding `batch` sequences of `context` tokens."""

    prompt: int
    context: int
    batch: int


class Corrections(NamedTuple):
    """Measured seconds over predicted seconds."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Sample:
    """Layers of a checkpoint whose weights are on this machine."""

    checkpoint: Checkpoint

    def corrections(
        self,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        quantization: QuantizationConfig | None,
        limits: Limits,
        asked: Prompts,
    ) -> Corrections:
        """Measures the corrections for weights in `dtype`, or quantised. Raises what loading the model raises, and
        CannotSample."""
        model = make_model(self.checkpoint, dtype, native, kv_dtype, quantization, media=True)
        if any(isinstance(cache, Shares) for cache in model.kv_spec.layers):
            raise CannotSample("some of its layers share keys and values")
        with _threads(limits.threads), _no_warnings():
            reader = self.checkpoint.open_weights(model.config.quantization_config)
            with nullcontext() if reader is self.checkpoint.gguf else reader:
                names, _ = plan_layout(model, reader)
                model.towers = []
                model.layers = choose_layers(model.layers, dtype, SAMPLE_BYTES)
                fill(model, reader, names, model.targets(), limits.threads)
            limit = model.max_position_embeddings - STEPS - WARM_UP_STEPS - 2
            if limit < 1:
                raise CannotSample(f"the model has too few positions: {model.max_position_embeddings}")
            asked = Prompts(min(asked.prompt, MAX_PROMPT, limit), min(asked.context, limit), asked.batch)
            measured = _measure(model, asked)
        costs = Costs.of(model, dtype, kv_dtype)
        layers, head = efficiencies(limits.isa, dtype, costs)
        predicted = predict(costs, layers, limits, *asked, head)
        return Corrections(measured[0] / predicted.prefill_seconds, measured[1] / predicted.step_seconds)


def choose_layers(layers: list[Layer], dtype: torch.dtype, num_bytes: int) -> list[Layer]:
    """Returns layers of about `num_bytes` in total, in order, and not fewer than there are distinct sizes. They are
    spread evenly over the sizes, because files store some layers with more bits."""
    sizes = [layer.planned_nbytes(native, dtype) for layer in layers]
    by_size = sorted(range(len(layers)), key=lambda index: (sizes[index], index))
    count = min(len(layers), max(len(set(sizes)), round(num_bytes * len(layers) / sum(sizes))))
    chosen = {by_size[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)}
    return [layer for index, layer in enumerate(layers) if index in chosen]


def _measure(model: BaseModelForCausalLM, asked: Prompts) -> tuple[float, float]:
    """Returns the seconds of a prompt and of a decode step."""
    length = max(asked.prompt, asked.context) + STEPS + WARM_UP_STEPS + 2
    room = 2 * asked.batch * Costs.of(model, model.dtype, model.kv_dtype).cached_bytes(length) + (64 << 20)
    if room > MAX_CACHE_BYTES:
        raise CannotSample(f"{asked.batch} sequences of {length} tokens need a cache of {format_bytes(room)}")
    slots = {"num_slots": 2 * asked.batch} if model.kv_spec.has_states else {}
    engine = Engine.create(make_runner(model, "native"), native, room, cache_options=slots)
    subject = Subject("sample", model, engine, "native", 0, 0, 0, 0)
    prefill_seconds(subject, min(asked.prompt, 32))
    started, of_prompt = time.perf_counter(), []
    while not of_prompt or (len(of_prompt) < MAX_RUNS and time.perf_counter() - started < MAX_SECONDS):
        of_prompt.append(prefill_seconds(subject, asked.prompt))
    return statistics.median(of_prompt), decode_seconds(subject, asked.context, STEPS, asked.batch, asked.context)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = _C.get_num_threads()
    _C.set_num_threads(count)
    try:
        yield
    finally:
        _C.set_num_threads(before)


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Silences warnings that planning the whole model has already logged."""
    logger = logging.getLogger("pace")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
